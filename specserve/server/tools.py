"""The functions that a chat may call: checked here, told to the model by its chat template."""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from typing import Any  # JSON that is passed on as it is

import msgspec

from specserve.errors import RequestError
from specserve.server.wire import ChatBody, FunctionBody, ToolBody, ToolCallBody, ToolChoiceBody

MAX_TOOLS = 128
NAME_PATTERN = "[A-Za-z0-9_.:/-]{1,128}"
CHOICES = ("none", "auto", "required")


class ToolUse(msgspec.Struct, frozen=True, kw_only=True):
    """for_template: as chat templates take them; empty where the model is to call nothing
    names:     of functions that it may call
    max_calls: None: as many as it likes
    forced:    functions one of which it must call; (): it may say what it likes
    """

    for_template: list[dict[str, Any]] = []
    names: frozenset[str] = frozenset()
    max_calls: int | None = None
    forced: tuple[FunctionBody, ...] = ()


def tool_use(body: ChatBody) -> ToolUse:
    """RequestError names tools[i].field or tool_choice."""
    tools = body.tools or []
    choice = _choice(body.tool_choice, tools)
    functions = _functions(tools)
    if not functions or choice == "none":
        # A model that is told of functions calls them: then what it says would be no text.
        return ToolUse()
    named = isinstance(body.tool_choice, ToolChoiceBody)
    called = [one for one in functions if one.name == choice] if named else functions
    return ToolUse(
        for_template=[_for_template(function) for function in functions],
        names=frozenset(function.name for function in called),
        max_calls=1 if named or body.parallel_tool_calls is False else None,
        forced=tuple(called) if named or choice == "required" else (),
    )


def _choice(asked: str | ToolChoiceBody | None, tools: Seq[ToolBody]) -> str:
    """none, auto, required, or the name of the function to call."""
    if asked is None:
        return "auto"
    named = asked.function.name if isinstance(asked, ToolChoiceBody) and asked.function else None
    choice = asked if isinstance(asked, str) else named
    if choice is None or (named is None and choice not in CHOICES):
        raise RequestError(
            "tool_choice must be 'none', 'auto', 'required', or "
            "{'type': 'function', 'function': {'name': …}}",
            param="tool_choice",
        )
    known = [tool.function.name for tool in tools if tool.function]
    if named is not None and named not in known:
        raise RequestError(
            f"tool_choice names {named[:128]!r}, which is not among tools", param="tool_choice"
        )
    if not tools and choice == "required":
        raise RequestError(
            "tool_choice is 'required', but there are no tools: give some", param="tool_choice"
        )
    return choice


def _functions(tools: Seq[ToolBody]) -> list[FunctionBody]:
    if len(tools) > MAX_TOOLS:
        raise RequestError(
            f"tools has {len(tools)} entries, the limit is {MAX_TOOLS}: offer fewer", param="tools"
        )
    functions: dict[str, FunctionBody] = {}
    for i, tool in enumerate(tools):
        if tool.type != "function" or tool.function is None:
            raise RequestError(
                f"tools[{i}] is of type {tool.type[:64]!r}, this server knows only functions: "
                "{'type': 'function', 'function': {'name': …}}",
                param=f"tools[{i}]",
            )
        name = tool.function.name
        if not re.fullmatch(NAME_PATTERN, name):
            raise RequestError(
                f"tools[{i}].function.name must be 1 to 128 letters, digits or any of _ . : / -",
                param=f"tools[{i}].function.name",
            )
        if name in functions:
            raise RequestError(
                f"tools[{i}].function.name is {name!r} like another one's: give each its own",
                param=f"tools[{i}].function.name",
            )
        functions[name] = tool.function
    return [*functions.values()]


def _for_template(function: FunctionBody) -> dict[str, Any]:
    described = {"description": function.description, "parameters": function.parameters}
    given = {key: value for key, value in described.items() if value is not None}
    return {"type": "function", "function": {"name": function.name, **given}}


def calls_for_template(calls: Seq[ToolCallBody]) -> list[dict[str, Any]]:
    """Templates write arguments as JSON themselves, so they want them as an object."""
    return [
        {
            "type": "function",
            **({} if call.id is None else {"id": call.id}),
            "function": {
                "name": call.function.name,
                "arguments": _arguments(call.function.arguments),
            },
        }
        for call in calls
    ]


def _arguments(text: str | None) -> dict[str, Any] | str:
    """A text where it is no object: what the model once said must not end its conversation."""
    if not text or text.isspace():
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return text

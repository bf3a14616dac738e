"""The body of /v1/responses, and the conversation that it means.

Nothing is stored, so what would lean on something stored is refused, and so is what would change
the answer and is not supported.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NoReturn  # Any: JSON that is passed on as it is

import msgspec

from specserve.errors import RequestError
from specserve.server.errors import reworded
from specserve.server.wire import ChatBody, Extensions, convert_body

_ROLES = ("system", "developer", "user")
ITEM_TYPES = ("message", "reasoning", "function_call", "function_call_output")
PART_TYPES = (
    "input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal",
)  # fmt: skip


class InputPart(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct, frozen=True, kw_only=True):
    """A message, a call of a function, its output, or reasoning: `type` says which."""

    type: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class ResponseTool(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    name: str | None = None


class TextFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    format: TextFormat | None = None


LOGPROBS = "message.output_text.logprobs"


class ResponsesBody(Extensions, frozen=True, kw_only=True):
    input: str | list[InputItem] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    text: TextOptions | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include: list[str] | None = None
    store: bool | None = None  # nothing is, and the reply says so
    top_logprobs: int | None = None

    background: object = None
    conversation: object = None
    max_tool_calls: object = None
    previous_response_id: object = None
    prompt: object = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())


_REFUSED = {
    "background": "replies are made while the client waits",
    "conversation": "this server stores no conversations: send all of it in input",
    "max_tool_calls": "it is of tools that the server itself calls, of which there are none",
    "previous_response_id": "this server stores no responses: send the conversation in input",
    "prompt": "this server stores no prompts: send the text in input or instructions",
}


def chat_of(body: ResponsesBody) -> ChatBody:
    """The same as a chat. RequestError names the field as this endpoint calls it."""
    for name, why in _REFUSED.items():
        if getattr(body, name):  # fields of the Struct
            _refuse(name, why)
    if body.top_logprobs and not body.wants_logprobs:
        raise RequestError(
            f"top_logprobs is {body.top_logprobs}, but nothing asks for log-probabilities: add "
            f"{LOGPROBS!r} to include",
            param="top_logprobs",
        )
    messages = _messages(body)
    shared = {name: getattr(body, name) for name in Extensions.__struct_fields__}
    return convert_body(
        {
            **shared,
            "messages": messages,
            "max_completion_tokens": body.max_output_tokens,
            "logprobs": body.wants_logprobs,
            "top_logprobs": body.top_logprobs,
            "tools": [_tool(tool) for tool in body.tools or ()],
            "tool_choice": _tool_choice(body.tool_choice),
            "parallel_tool_calls": body.parallel_tool_calls,
            "response_format": _response_format(body.text),
            "chat_template_kwargs": body.chat_template_kwargs,
        },
        ChatBody,
    )


def own_name(param: str | None) -> str | None:
    """A chat's field as this endpoint calls it."""
    for theirs, ours in _NAMES.items():
        if param is not None and param.startswith(theirs):
            return ours + param.removeprefix(theirs).replace("].function.", "].")
    return param


def in_own_words(error: RequestError) -> RequestError:
    """A chat's refusal as this endpoint puts it."""
    error.param = own_name(error.param)
    error.message = reworded(error.message, _NAMES)
    return error


_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "json_schema.schema": "schema",
    "tools": "tools",
}


def _refuse(name: str, why: str) -> NoReturn:
    raise RequestError(f"{name} is not supported: {why}", param=name, code="unsupported_parameter")


def _tool(tool: ResponseTool) -> dict[str, Any]:
    if tool.name is None:
        return {"type": tool.type}
    function = msgspec.structs.asdict(tool)
    return {"type": function.pop("type"), "function": function}


def _tool_choice(choice: str | ResponseToolChoice | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, ResponseToolChoice):
        return choice
    function = None if choice.name is None else {"name": choice.name}
    return {"type": choice.type, "function": function}


def _response_format(text: TextOptions | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    schema = msgspec.structs.asdict(text.format)
    kind = schema.pop("type")
    return {"type": kind, "json_schema": schema} if kind == "json_schema" else {"type": kind}


# ---- input -----------------------------------------------------------------------------------


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if not body.input:
        raise RequestError("input is empty: give a text or a list of items", param="input")
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    turn = _Turn()
    for i, item in enumerate(body.input):
        messages += turn.read(item, f"input[{i}]")
    return messages + turn.end()


class _Turn:
    """Reasoning, text and calls of the assistant in a row are one message of a chat."""

    def __init__(self) -> None:
        self._said: dict[str, Any] = {}

    def read(self, item: InputItem, where: str) -> list[dict[str, Any]]:
        """The messages that are complete now."""
        match "message" if item.type is None else item.type:
            case "message" if item.role == "assistant":
                ended = self.end() if self._said.keys() & {"content", "tool_calls"} else []
                self._said["content"] = _text(item.content, f"{where}.content")
                return ended
            case "message":
                if item.role not in _ROLES:
                    raise RequestError(
                        f"{where}.role must be assistant, or one of: {', '.join(_ROLES)}",
                        param=f"{where}.role",
                    )
                text = _text(item.content, f"{where}.content")
                return [*self.end(), {"role": item.role, "content": text}]
            case "reasoning":
                ended = self.end() if self._said else []
                thoughts = item.content or item.summary or ""
                self._said["reasoning_content"] = _text(thoughts, f"{where}.content")
                return ended
            case "function_call":
                self._said.setdefault("tool_calls", []).append(_call(item, where))
                return []
            case "function_call_output":
                output = _text(item.output, f"{where}.output")
                result = {"role": "tool", "content": output, "tool_call_id": item.call_id}
                return [*self.end(), result]
            case other:
                raise RequestError(
                    f"{where} is of type {other[:64]!r}, this server knows {', '.join(ITEM_TYPES)}",
                    param=where,
                    code="unsupported_parameter",
                )

    def end(self) -> list[dict[str, Any]]:
        said, self._said = self._said, {}
        return [{"role": "assistant", "content": None, **said}] if said else []


def _call(item: InputItem, where: str) -> dict[str, Any]:
    if item.name is None:
        raise RequestError(f"{where}.name is missing", param=f"{where}.name")
    function = {"name": item.name, "arguments": item.arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _text(content: str | Seq[InputPart] | None, where: str) -> str:
    if content is None:
        raise RequestError(f"{where} is missing: it must be a text", param=where)
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for i, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in PART_TYPES or text is None:
            raise RequestError(
                f"{where}[{i}] is of type {part.type[:64]!r}, this server reads only text",
                param=f"{where}[{i}]",
                code="unsupported_parameter",
            )
        texts.append(text)
    return "".join(texts)

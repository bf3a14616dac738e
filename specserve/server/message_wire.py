"""The bodies of /v1/messages and its count_tokens, and the conversation that they mean."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any  # JSON that is passed on as it is

import msgspec

from specserve.errors import RequestError
from specserve.server.errors import reworded
from specserve.server.wire import ChatBody, Extensions, convert_body

BLOCK_TYPES = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")


class InBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Text, thinking, the use of a tool or its result: `type` says which."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[InBlock] | None = None


class InMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[InBlock]


class InTool(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class InToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(msgspec.Struct, frozen=True, kw_only=True):
    type: str


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True):
    format: OutputFormat | None = None


class MessagesBody(Extensions, frozen=True, kw_only=True):
    messages: list[InMessage] | None = None
    system: str | list[InBlock] | None = None
    tools: list[InTool] | None = None
    tool_choice: InToolChoice | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfig | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    container: object = None
    context_management: object = None
    mcp_servers: object = None


class CountTokensBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    messages: list[InMessage] | None = None
    system: str | list[InBlock] | None = None
    tools: list[InTool] | None = None
    tool_choice: InToolChoice | None = None
    thinking: ThinkingBody | None = None


_REFUSED = ("container", "context_management", "mcp_servers")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_OWN_NAMES = {
    "prompt": "messages",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
    "json_schema.schema": "schema",
}


def in_own_words(error: RequestError) -> RequestError:
    """A chat's refusal as this endpoint puts it: the message alone names the field."""
    error.message = reworded(error.message, _OWN_NAMES)
    return error


def chat_of(body: MessagesBody) -> ChatBody:
    """The same as a chat. RequestError names the field as this endpoint calls it."""
    for name in _REFUSED:
        if getattr(body, name):  # fields of the Struct
            raise RequestError(
                f"{name} is not supported by this server: leave it out",
                param=name,
                code="unsupported_parameter",
            )
    if body.max_tokens is None:
        raise RequestError(
            "max_tokens is required: how many tokens the reply may have", param="max_tokens"
        )
    shared = {name: getattr(body, name) for name in Extensions.__struct_fields__}
    return convert_body(
        {
            **shared,
            **_conversation(body),
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "response_format": _response_format(body.output_config),
            "chat_template_kwargs": body.chat_template_kwargs or _thinking(body.thinking),
        },
        ChatBody,
    )


def counted_chat(body: CountTokensBody) -> ChatBody:
    fields = {**_conversation(body), "model": body.model}
    return convert_body({**fields, "chat_template_kwargs": _thinking(body.thinking)}, ChatBody)


def _conversation(body: MessagesBody | CountTokensBody) -> dict[str, Any]:
    messages = [] if body.system is None else [_system(body.system)]
    if not body.messages:
        raise RequestError("messages is empty: it must have at least one message", param="messages")
    for i, message in enumerate(body.messages):
        messages += _messages(message, f"messages[{i}]")
    # An assistant's text at the end is where the reply goes on.
    continued = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    choice = body.tool_choice
    return {
        "messages": messages,
        "tools": [_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())],
        "tool_choice": _tool_choice(choice),
        "parallel_tool_calls": not (choice and choice.disable_parallel_tool_use),
        "continue_final_message": continued,
        "add_generation_prompt": not continued,
    }


def _system(system: str | Seq[InBlock]) -> dict[str, Any]:
    """Its blocks are paragraphs: some clients send several, none of which ends with a space."""
    if isinstance(system, str):
        return {"role": "system", "content": system}
    texts = [_text([block], f"system[{i}]") for i, block in enumerate(system)]
    return {"role": "system", "content": "\n\n".join(texts)}


def _tool(tool: InTool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise RequestError(
            f"{where} is of type {tool.type[:64]!r}, this server knows only tools of the client's",
            param=where,
            code="unsupported_parameter",
        )
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: InToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool" and choice.name is not None:
        return {"type": "function", "function": {"name": choice.name}}
    if choice.type not in _CHOICES:
        raise RequestError(
            f"tool_choice.type must be {', '.join(_CHOICES)}, or tool with a name",
            param="tool_choice",
        )
    return _CHOICES[choice.type]


def _thinking(asked: ThinkingBody | None) -> dict[str, Any] | None:
    return None if asked is None else {"enable_thinking": asked.type != "disabled"}


def _response_format(asked: OutputConfig | None) -> dict[str, Any] | None:
    if asked is None or asked.format is None:
        return None
    return {"type": asked.format.type, "json_schema": {"schema": asked.format.schema}}


# ---- messages --------------------------------------------------------------------------------


def _messages(message: InMessage, where: str) -> list[dict[str, Any]]:
    """A chat's messages: results of tools are messages of their own there."""
    if message.role not in ("user", "assistant"):
        raise RequestError(
            f"{where}.role is {message.role[:64]!r}, it must be user or assistant (what the "
            "system says is in the field system)",
            param=f"{where}.role",
        )
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if not message.content:
        raise RequestError(f"{where}.content is empty", param=f"{where}.content")
    if message.role == "assistant":
        return [_said(message.content, f"{where}.content")]
    return _asked(message.content, f"{where}.content")


def _said(blocks: Seq[InBlock], where: str) -> dict[str, Any]:
    texts: list[InBlock] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        if block.type == "tool_use":
            calls.append(_call(block, f"{where}[{i}]"))
        elif block.type in ("thinking", "redacted_thinking"):
            thoughts.append(block.thinking or "")
        else:
            _text([block], where, first=i)
            texts.append(block)
    message: dict[str, Any] = {"role": "assistant", "content": _text(texts, where)}
    if calls:
        message["tool_calls"] = calls
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    return message


def _call(block: InBlock, where: str) -> dict[str, Any]:
    if block.name is None:
        raise RequestError(f"{where}.name is missing", param=f"{where}.name")
    arguments = msgspec.json.encode(block.input or {}).decode()
    return {
        "id": block.id,
        "type": "function",
        "function": {"name": block.name, "arguments": arguments},
    }


def _asked(blocks: Seq[InBlock], where: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        if block.type == "tool_result":
            content = block.content or ""
            text = content if isinstance(content, str) else _text(content, f"{where}[{i}].content")
            messages.append({"role": "tool", "content": text, "tool_call_id": block.tool_use_id})
            continue
        text = _text([block], where, first=i)
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += text
        else:
            messages.append({"role": "user", "content": text})
    return messages


def _text(blocks: Seq[InBlock], where: str, *, first: int = 0) -> str:
    """first: the index of the first of these blocks"""
    for i, block in enumerate(blocks, first):
        if block.type != "text" or block.text is None:
            raise RequestError(
                f"{where}[{i}] is of type {block.type[:64]!r}, which cannot stand here: this "
                f"server reads {', '.join(BLOCK_TYPES)}",
                param=f"{where}[{i}]",
                code="unsupported_parameter",
            )
    return "".join(block.text or "" for block in blocks)

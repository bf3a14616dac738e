"""For models whose chat template knows no tools: they are told of them in their messages.

The system message says what there is and how to call it; earlier calls and their results become
text, in the format in which calls are read.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any  # messages and tools as templates take them

import msgspec

from specserve.server.call_reader import CallFormat

Message = dict[str, Any]


def told_in_text(
    messages: Seq[Message], tools: Seq[dict[str, Any]], layout: CallFormat
) -> list[Message]:
    """The same messages without roles and fields that only templates for tools know."""
    told: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if told and told[-1].get("results"):
                told[-1]["content"] += f"\n{result}"
            else:
                told.append({"role": "user", "content": result, "results": True})
            continue
        told.append(_with_calls_written(message, layout))
    told = [{key: message[key] for key in message if key != "results"} for message in told]
    return _with_instructions(told, _instructions(tools, layout)) if tools else told


def _with_calls_written(message: Message, layout: CallFormat) -> Message:
    calls = [
        _written(layout, _json(call["function"]["name"]), _arguments(call))
        for call in message.get("tool_calls", ())
    ]
    if not calls:
        return message
    plain = {key: value for key, value in message.items() if key != "tool_calls"}
    parts = [message["content"], layout.between.join(calls)]
    return {**plain, "content": "\n".join(part for part in parts if part)}


def _with_instructions(messages: list[Message], text: str) -> list[Message]:
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    content = f"{first['content']}\n\n{text}" if first["content"] else text
    return [{**first, "content": content}, *messages[1:]]


def _instructions(tools: Seq[dict[str, Any]], layout: CallFormat) -> str:
    known = "\n".join(_json(tool["function"]) for tool in tools)
    example = _written(layout, '"NAME"', "{ARGUMENTS}")
    return (
        "You can use these functions. Each line describes one, its parameters as a JSON schema:\n"
        f"{known}\n"
        "When one of them helps, reply with nothing but its call, written exactly like this:\n"
        f"{example}\n"
        "You will be told what it returned."
    )


def _written(layout: CallFormat, name: str, arguments: str) -> str:
    """name, arguments: as JSON"""
    call = f'{{"name": {name}, "{layout.arguments}": {arguments}}}'
    return f"{layout.before}{call}{layout.after}"


def _arguments(call: dict[str, Any]) -> str:
    """Text where the model's were no JSON: it is shown what it wrote."""
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else _json(arguments)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()

"""What the anthropic package makes of replies: `with_anthropic.py URL KEY BUSY_KEY`."""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic
from questions import ADD, refusals, until_it_breaks, user

URL, KEY, BUSY_KEY = sys.argv[1:4]
TOOL: Any = {"name": "add", "input_schema": ADD["function"]["parameters"]}


def client(key: str = KEY) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=URL.removesuffix("/v1"), api_key=key, max_retries=0)


def asked(prompt: str, **more: Any) -> Any:
    fixed = {"model": "test", "max_tokens": 200, "extra_body": {"temperature": 0}}
    return {**fixed, "messages": user(prompt), **more}


def ask(prompt: str, key: str = KEY, **more: Any) -> Any:
    return client(key).messages.create(**asked(prompt, **more))


def said(message: Any) -> dict[str, Any]:
    kinds = {"text": "text", "thinking": "thinking"}
    blocks = [[b.type, getattr(b, kinds[b.type])] for b in message.content if b.type in kinds]
    usage = message.usage
    total = usage.input_tokens + usage.cache_read_input_tokens
    return {"blocks": blocks, "reason": message.stop_reason, "usage": [total, usage.output_tokens]}


def streamed(prompt: str, **more: Any) -> Any:
    with client().messages.stream(**asked(prompt, **more)) as stream:
        return stream.get_final_message()


def tools() -> dict[str, Any]:
    message = ask("add", tools=[TOOL])
    calls = [[b.name, b.input] for b in message.content if b.type == "tool_use"]
    again = streamed("add", tools=[TOOL])
    use_id = message.content[-1].id
    result = [{"type": "tool_result", "tool_use_id": use_id, "content": "3"}]
    history = [
        *user("add"),
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": result},
    ]
    return {
        "call": calls[0],
        "streamed": next([b.name, b.input] for b in again.content if b.type == "tool_use"),
        "after": ask("", messages=history, tools=[TOOL]).content[0].text,
    }


def breaks() -> list[str]:
    with client().messages.stream(**asked("break")) as stream:
        return until_it_breaks(stream.text_stream)


report = {
    "version": anthropic.__version__,
    "chat": said(ask("say")),
    "stream": said(streamed("say")),
    "tools": tools(),
    "breaks": breaks(),
    "count": client().messages.count_tokens(model="test", messages=user("say")).input_tokens,
    "refusals": refusals(
        {
            "400": lambda: ask("say", extra_body={"temperature": 3}),
            "400, too long": lambda: ask("a" * 2000),
            "401": lambda: ask("say", key="wrong"),
            "404": lambda: ask("say", model="other"),
            "429": lambda: ask("say", key=BUSY_KEY),
        }
    ),
}
print(json.dumps(report))

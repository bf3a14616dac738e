"""What litellm makes of a server's replies: `with_litellm.py URL KEY BUSY_KEY PROVIDER`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network for prices

import litellm
from questions import ADD, SCHEMA, called, refusals, until_it_breaks, user

URL, KEY, BUSY_KEY, PROVIDER = sys.argv[1:5]
litellm.suppress_debug_info = True


def ask(prompt: str, **more: Any) -> Any:
    return litellm.completion(
        **{
            "model": f"{PROVIDER}/test",
            "api_base": URL,
            "api_key": KEY,
            "messages": user(prompt),
            "max_retries": 0,
            "temperature": 0,
            **more,
        }
    )


def chat() -> dict[str, Any]:
    reply = ask("say")
    return {
        "text": reply.choices[0].message.content,
        "reasoning": reply.choices[0].message.reasoning_content,
        "reason": reply.choices[0].finish_reason,
        "usage": [reply.usage.prompt_tokens, reply.usage.completion_tokens],
    }


def stream() -> dict[str, Any]:
    chunks = list(ask("say", stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    [usage] = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    return {
        "text": "".join(delta.content or "" for delta in deltas),
        "reasoning": "".join(getattr(delta, "reasoning_content", "") or "" for delta in deltas),
        "reason": next(reason for reason in reasons if reason),
        "usage": [usage.prompt_tokens, usage.completion_tokens],
    }


def tools() -> dict[str, Any]:
    message = ask("add", tools=[ADD]).choices[0].message
    chunks = list(ask("add", tools=[ADD], stream=True))
    built = litellm.stream_chunk_builder(chunks).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
    after = ask("", messages=[*user("add"), message.model_dump(), result], tools=[ADD])
    return {
        "call": called(message.tool_calls[0].function),
        "streamed": called(built.tool_calls[0].function),
        "after": after.choices[0].message.content,
    }


def structured() -> Any:
    form = {"type": "json_schema", "json_schema": {"name": "kind", "schema": SCHEMA}}
    return json.loads(ask("describe", response_format=form).choices[0].message.content)


def breaks() -> list[str]:
    chunks = ask("break", stream=True)
    return until_it_breaks(chunk.choices[0].delta.content or "" for chunk in chunks)


report = {
    "chat": chat(),
    "stream": stream(),
    "tools": tools(),
    "structured": structured(),
    "breaks": breaks(),
    "refusals": refusals(
        {
            "400": lambda: ask("say", temperature=3),
            "400, too long": lambda: ask("a" * 2000),
            "401": lambda: ask("say", api_key="wrong"),
            "404": lambda: ask("say", model=f"{PROVIDER}/other"),
            "429": lambda: ask("say", api_key=BUSY_KEY),
        }
    ),
}
print(json.dumps(report))

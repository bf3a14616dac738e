"""What the openai package makes of a server's replies: `with_openai.py URL KEY BUSY_KEY`."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai
from questions import ADD, SCHEMA, called, refusals, until_it_breaks, user

URL, KEY, BUSY_KEY = sys.argv[1:4]


def client(key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=URL, api_key=key, max_retries=0)


def ask(prompt: str, key: str = KEY, **more: Any) -> Any:
    asked = {"model": "test", "messages": user(prompt), "temperature": 0, **more}
    return client(key).chat.completions.create(**asked)


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
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    [usage] = [chunk.usage for chunk in chunks if chunk.usage]
    return {
        "text": "".join(choice.delta.content or "" for choice in choices),
        "reasoning": "".join(
            getattr(choice.delta, "reasoning_content", None) or "" for choice in choices
        ),
        "reason": next(choice.finish_reason for choice in choices if choice.finish_reason),
        "usage": [usage.prompt_tokens, usage.completion_tokens],
    }


def tools() -> dict[str, Any]:
    message = ask("add", tools=[ADD]).choices[0].message
    asked: Any = {"model": "test", "messages": user("add"), "tools": [ADD], "temperature": 0}
    with client().chat.completions.stream(**asked) as events:
        streamed = events.get_final_completion().choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
    after = ask("", messages=[*user("add"), message, result], tools=[ADD])
    return {
        "call": called(message.tool_calls[0].function),
        "streamed": called(streamed.tool_calls[0].function),
        "after": after.choices[0].message.content,
    }


def structured() -> Any:
    form = {"type": "json_schema", "json_schema": {"name": "kind", "schema": SCHEMA}}
    return json.loads(ask("describe", response_format=form).choices[0].message.content)


def responses() -> dict[str, Any]:
    """Whole and streamed, with log-probabilities of the text's tokens."""
    asked: Any = {"model": "test", "input": "say", "temperature": 0, "top_logprobs": 1}
    asked["include"] = ["message.output_text.logprobs"]
    whole = client().responses.create(**asked)
    with client().responses.stream(**asked) as stream:
        events = list(stream)
    told = [one for e in events if e.type == "response.output_text.delta" for one in e.logprobs]
    content = whole.output[-1].content[0]
    return {
        "text": whole.output_text,
        "last": events[-1].type,
        "logprobs": [one.logprob for one in content.logprobs],
        "streamed": [one.logprob for one in told],
    }


def completions() -> dict[str, Any]:
    asked: Any = {"model": "test", "prompt": "a", "max_tokens": 3, "temperature": 0, "logprobs": 1}
    whole = client().completions.create(**asked)
    chunks = list(client().completions.create(**asked, stream=True))
    return {
        "whole": whole.choices[0].text,
        "streamed": "".join(chunk.choices[0].text for chunk in chunks),
        "tokens": len(whole.choices[0].logprobs.tokens),
    }


def breaks() -> list[str]:
    return until_it_breaks(
        chunk.choices[0].delta.content or "" for chunk in ask("break", stream=True)
    )


report = {
    "version": openai.__version__,
    "chat": chat(),
    "stream": stream(),
    "tools": tools(),
    "structured": structured(),
    "responses": responses(),
    "completions": completions(),
    "breaks": breaks(),
    "models": [model.id for model in client().models.list()],
    "refusals": refusals(
        {
            "400": lambda: ask("say", temperature=3),
            "400, too long": lambda: ask("a" * 2000),
            "401": lambda: ask("say", key="wrong"),
            "404": lambda: ask("say", model="other"),
            "429": lambda: ask("say", key=BUSY_KEY),
        }
    ),
}
print(json.dumps(report))

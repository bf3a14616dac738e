"""What langchain-openai makes of a server's replies: `with_langchain.py URL KEY BUSY_KEY`."""

from __future__ import annotations

import json
import sys
from typing import Any

from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from questions import ADD, SCHEMA, refusals, until_it_breaks

URL, KEY, BUSY_KEY = sys.argv[1:4]


def model(**more: Any) -> ChatOpenAI:
    return ChatOpenAI(
        **{
            "model": "test",
            "base_url": URL,
            "api_key": KEY,
            "temperature": 0,
            "max_retries": 0,
            "stream_usage": True,
            **more,
        }
    )


def said(message: Any) -> dict[str, Any]:
    usage = message.usage_metadata
    return {
        "text": message.content,
        "reason": message.response_metadata["finish_reason"],
        "usage": [usage["input_tokens"], usage["output_tokens"]],
    }


def streamed(runnable: Any, question: Any) -> AIMessageChunk:
    whole = None
    for chunk in runnable.stream(question):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    return whole


def tools() -> dict[str, Any]:
    bound = model().bind_tools([ADD])
    message = bound.invoke("add")
    chunk = streamed(bound, "add")
    call = message.tool_calls[0]
    result = ToolMessage("3", tool_call_id=call["id"])
    return {
        "call": [call["name"], call["args"]],
        "streamed": [chunk.tool_calls[0]["name"], chunk.tool_calls[0]["args"]],
        "after": bound.invoke([HumanMessage("add"), message, result]).content,
    }


def responses() -> dict[str, Any]:
    blocks = model(use_responses_api=True).invoke("say").content_blocks
    return {
        "text": "".join(block["text"] for block in blocks if block["type"] == "text"),
        "blocks": [block["type"] for block in blocks],
    }


def breaks() -> list[str]:
    return until_it_breaks(chunk.text for chunk in model().stream("break"))


report = {
    "chat": said(model().invoke("say")),
    "stream": said(streamed(model(), "say")),
    "tools": tools(),
    "structured": model().with_structured_output(SCHEMA, method="json_schema").invoke("describe"),
    "responses": responses(),
    "breaks": breaks(),
    "refusals": refusals(
        {
            "400": lambda: model(temperature=3).invoke("say"),
            "400, too long": lambda: model().invoke("a" * 2000),
            "401": lambda: model(api_key="wrong").invoke("say"),
            "404": lambda: model(model="other").invoke("say"),
            "429": lambda: model(api_key=BUSY_KEY).invoke("say"),
        }
    ),
}
print(json.dumps(report))

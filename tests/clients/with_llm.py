"""What the `llm` library makes of a server's replies: `with_llm.py URL KEY BUSY_KEY`.

Its models are in extra-openai-models.yaml of the directory LLM_USER_PATH, which the test wrote.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import llm
from questions import SCHEMA, refusals, until_it_breaks

_, KEY, BUSY_KEY = sys.argv[1:4]


def ask(prompt: str, *, stream: bool, name: str = "test", key: str = KEY, **more: Any) -> Any:
    response = llm.get_model(name).prompt(
        prompt, stream=stream, key=key, **{"temperature": 0, **more}
    )
    response.text()
    return response


def said(response: Any) -> dict[str, Any]:
    usage = response.usage()
    return {"text": response.text(), "usage": [usage.input, usage.output]}


def tools(*, stream: bool) -> dict[str, Any]:
    calls = []

    def add(a: int, b: int) -> str:
        """Adds."""
        calls.append(["add", {"a": a, "b": b}])
        return str(a + b)

    chain = llm.get_model("test").chain("add", tools=[add], key=KEY, stream=stream)
    return {"text": "".join(chain), "calls": calls}


def structured() -> Any:
    return json.loads(ask("describe", stream=False, schema=SCHEMA).text())


def breaks() -> list[str]:
    return until_it_breaks(llm.get_model("test").prompt("break", key=KEY, temperature=0))


report = {
    "chat": said(ask("say", stream=False)),
    "stream": said(ask("say", stream=True)),
    "tools": tools(stream=False),
    "streamed tools": tools(stream=True),
    "structured": structured(),
    "breaks": breaks(),
    "refusals": refusals(
        {
            "400": lambda: ask("say", stream=False, presence_penalty=2, stop=""),
            "400, too long": lambda: ask("a" * 2000, stream=True),
            "401": lambda: ask("say", stream=False, key="wrong"),
            "404": lambda: ask("say", stream=False, name="other"),
            "429": lambda: ask("say", stream=False, key=BUSY_KEY),
        }
    ),
}
print(json.dumps(report))

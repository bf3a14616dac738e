"""What every Python client is asked for. Imported by scripts beside it, not by tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
SCHEMA: dict[str, Any] = {
    "title": "Kind",
    "description": "What it is.",
    "type": "object",
    "properties": {"kind": {"enum": ["tree", "shrub"]}, "sure": {"type": "boolean"}},
    "required": ["kind", "sure"],
    "additionalProperties": False,
}


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def called(function: Any) -> list[Any]:
    return [function.name, json.loads(function.arguments)]


def refusals(asks: dict[str, Callable[[], object]]) -> dict[str, str]:
    """What is raised, by status."""
    raised = {}
    for status, ask in asks.items():
        try:
            ask()
        except Exception as error:
            raised[status] = type(error).__name__
    return raised


def until_it_breaks(texts: Iterable[str]) -> list[str]:
    """What came, and what was raised then."""
    said = ""
    try:
        for text in texts:
            said += text
    except Exception as error:
        return [said, type(error).__name__]
    return [said, "nothing was raised"]

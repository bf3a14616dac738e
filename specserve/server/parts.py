"""What a reply consists of, as its endpoints spell it: reasoning, text, and calls of functions.

A reader turns the text of one choice into parts while it arrives. However the text is cut into
pieces, the parts join to the same reply, so that a stream and a whole reply say the same, and so
that nothing depends on how many guesses of a step were right.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import msgspec


class Text(msgspec.Struct, frozen=True):
    """at: where it begins in all that the reader was given, in characters"""

    text: str
    at: int


class Reasoning(msgspec.Struct, frozen=True):
    text: str


class CallStart(msgspec.Struct, frozen=True):
    """call_idx: 0, 1, … in the order of the reply; call_id: no other call has it"""

    call_idx: int
    call_id: str
    name: str


class CallArguments(msgspec.Struct, frozen=True):
    """The next piece of a JSON object, of the call that started last."""

    call_idx: int
    text: str


Part = Text | Reasoning | CallStart | CallArguments


class Reader(Protocol):
    """One choice's text, read as it arrives.

    reasoning_bytes: how much of it, in UTF-8, was reasoning and its marks
    """

    reasoning_bytes: int

    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """What was held back because more might have followed."""
        ...

    @property
    def calls(self) -> bool:
        """Whether the reply ends so that its calls are to be made: there are some, all whole."""
        ...


class PlainReader:
    """The text is the reply."""

    calls = False
    reasoning_bytes = 0

    def __init__(self) -> None:
        self._at = 0

    def push(self, text: str) -> list[Part]:
        at = self._at
        self._at += len(text)
        return [Text(text, at)] if text else []

    def finish(self) -> list[Part]:
        return []


class Call(msgspec.Struct, frozen=True):
    call_id: str
    name: str
    arguments: str  # JSON, an object; its beginning where the reply was cut in it


class Joined(msgspec.Struct, frozen=True):
    """A whole reply: the same parts, joined."""

    reasoning: str
    text: str
    calls: list[Call]


def joined(parts: Seq[Part]) -> Joined:
    starts = [part for part in parts if isinstance(part, CallStart)]
    arguments = {start.call_idx: "" for start in starts}
    for part in parts:
        if isinstance(part, CallArguments):
            arguments[part.call_idx] += part.text
    return Joined(
        reasoning="".join(part.text for part in parts if isinstance(part, Reasoning)),
        text="".join(part.text for part in parts if isinstance(part, Text)),
        calls=[Call(start.call_id, start.name, arguments[start.call_idx]) for start in starts],
    )

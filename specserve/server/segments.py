"""A reply as the stretches that some endpoints number: reasoning, text, a call, in their order."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Literal

import msgspec

from specserve.server.parts import CallArguments, CallStart, Part, Reasoning


class Segment(msgspec.Struct, kw_only=True):
    """Written by Segments alone. text: of a call its arguments, JSON"""

    idx: int
    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call_id: str = ""
    name: str = ""
    whole: bool = False  # it has ended by itself; of a call: its arguments are a JSON object


class Change(msgspec.Struct, frozen=True):
    """What happened to a segment: it opened, got `more` text, or closed."""

    what: Literal["opened", "more", "closed"]
    segment: Segment
    more: str = ""


class Segments:
    """all: closed ones and the one that is open"""

    def __init__(self) -> None:
        self.all: list[Segment] = []
        self._open: Segment | None = None

    def push(self, parts: Iterable[Part]) -> list[Change]:
        changes: list[Change] = []
        for part in parts:
            if isinstance(part, CallStart):
                changes += self._next("call", call_id=part.call_id, name=part.name)
                continue
            if not isinstance(part, CallArguments):
                kind: Literal["reasoning", "text"] = (
                    "reasoning" if isinstance(part, Reasoning) else "text"
                )
                if self._open is None or self._open.kind != kind:
                    changes += self._next(kind)
            assert self._open is not None
            self._open.text += part.text
            changes.append(Change("more", self._open, part.text))
        return changes

    def finish(self, *, cut: bool) -> list[Change]:
        """cut: the reply was, so its last segment is not whole. An empty reply is an empty text."""
        changes = [] if self.all else self._next("text")
        return changes + self._close(whole=not cut)

    def _next(
        self, kind: Literal["reasoning", "text", "call"], *, call_id: str = "", name: str = ""
    ) -> list[Change]:
        changes = self._close(whole=True)
        self._open = Segment(idx=len(self.all), kind=kind, call_id=call_id, name=name)
        self.all.append(self._open)
        return [*changes, Change("opened", self._open)]

    def _close(self, *, whole: bool) -> list[Change]:
        if self._open is None:
            return []
        closed, self._open = self._open, None
        closed.whole = _is_object(closed.text) if closed.kind == "call" else whole
        return [Change("closed", closed)]


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False

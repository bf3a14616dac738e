"""A reply as the stretches that some endpoints number: reasoning, text, a call, in their order."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Literal

import msgspec

from specserve.server.parts import CallArguments, CallStart, Part, Reasoning, Text
from specserve.server.replies import TokenLogprob
from specserve.server.text_logprobs import TextLogprobs


class Segment(msgspec.Struct, kw_only=True):
    """Written by Segments alone. text: of a call its arguments, JSON"""

    idx: int
    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call_id: str = ""
    name: str = ""
    whole: bool = False  # it has ended by itself; of a call: its arguments are a JSON object
    logprobs: list[TokenLogprob] = []


class Change(msgspec.Struct, frozen=True):
    """What happened to a segment: it opened, got `more` text, or closed.

    logprobs: of the text that it got, and at the end of what ended it
    """

    what: Literal["opened", "more", "closed"]
    segment: Segment
    more: str = ""
    logprobs: list[TokenLogprob] = []


class Segments:
    """all: closed ones and the one that is open"""

    def __init__(self, logprobs: TextLogprobs | None = None) -> None:
        """logprobs: of its text, which the caller pushes chunks to first; None: not wanted"""
        self._logprobs = logprobs
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
            changes.append(self._more(self._open, part))
        return changes

    def finish(self, *, cut: bool) -> list[Change]:
        """cut: the reply was, so its last segment is not whole. An empty reply is an empty text."""
        changes = [] if self.all else self._next("text")
        if self._logprobs is not None and self._open is not None and self._open.kind == "text":
            changes += self._end(self._open, self._logprobs.take_end())
        return changes + self._close(whole=not cut)

    def _more(self, segment: Segment, part: Text | Reasoning | CallArguments) -> Change:
        segment.text += part.text
        if self._logprobs is None or not isinstance(part, Text):
            return Change("more", segment, part.text)
        told = self._logprobs.take(part.at, len(part.text))
        segment.logprobs += told
        return Change("more", segment, part.text, told)

    def _end(self, segment: Segment, told: list[TokenLogprob]) -> list[Change]:
        segment.logprobs += told
        return [Change("more", segment, "", told)] if told else []

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

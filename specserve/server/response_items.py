"""Segments of a reply as items of /v1/responses, and the events that tell of them."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable

import msgspec

from specserve.server.response_replies import (
    ArgumentsDelta,
    ArgumentsDone,
    CallItem,
    ContentAdded,
    ContentDone,
    Item,
    ItemAdded,
    ItemDone,
    ItemStatus,
    MessageItem,
    OutputText,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    TextDelta,
    TextDone,
)
from specserve.server.segments import Change, Segment

_DELTAS: dict[str, type[ArgumentsDelta | ReasoningDelta | TextDelta]] = {
    "call": ArgumentsDelta,
    "reasoning": ReasoningDelta,
    "text": TextDelta,
}
_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}


class Items:
    """The items of one reply, each with an id of its own, and their events in the order of OpenAI's
    documents, numbered across the stream."""

    def __init__(self) -> None:
        self._unique = uuid.uuid4().hex
        self._numbers = itertools.count()

    def number(self) -> int:
        return next(self._numbers)

    def item(self, segment: Segment, status: ItemStatus | None = None) -> Item:
        """status: of one that is open. As it is then: without content."""
        if status is None:
            status = "completed" if segment.whole else "incomplete"
        item_id = self._id(segment)
        begun = status != "in_progress"
        if segment.kind == "call":
            return CallItem(
                id=item_id,
                call_id=segment.call_id,
                name=segment.name,
                arguments=segment.text if begun else "",
                status=status,
            )
        content = _content(segment)
        if isinstance(content, ReasoningText):
            return ReasoningItem(id=item_id, status=status, content=[content] if begun else [])
        return MessageItem(id=item_id, status=status, content=[content] if begun else [])

    def events(self, changes: Iterable[Change]) -> list[msgspec.Struct]:
        told: list[msgspec.Struct] = []
        for change in changes:
            if change.what == "opened":
                told += self._opened(change.segment)
            elif change.what == "more":
                told.append(self._more(change))
            else:
                told += self._closed(change.segment)
        return told

    def _id(self, segment: Segment) -> str:
        return f"{_PREFIXES[segment.kind]}{self._unique}{segment.idx}"

    def _opened(self, segment: Segment) -> list[msgspec.Struct]:
        added = ItemAdded(
            sequence_number=self.number(),
            output_index=segment.idx,
            item=self.item(segment, "in_progress"),
        )
        if segment.kind == "call":
            return [added]
        part = ContentAdded(
            sequence_number=self.number(),
            output_index=segment.idx,
            item_id=self._id(segment),
            part=ReasoningText("") if segment.kind == "reasoning" else OutputText(text=""),
        )
        return [added, part]

    def _more(self, change: Change) -> msgspec.Struct:
        segment = change.segment
        delta = _DELTAS[segment.kind](
            sequence_number=self.number(),
            output_index=segment.idx,
            item_id=self._id(segment),
            delta=change.more,
        )
        if isinstance(delta, TextDelta) and change.logprobs:
            return msgspec.structs.replace(delta, logprobs=change.logprobs)
        return delta

    def _closed(self, segment: Segment) -> list[msgspec.Struct]:
        told = self._call_done(segment) if segment.kind == "call" else self._text_done(segment)
        done = ItemDone(
            sequence_number=self.number(), output_index=segment.idx, item=self.item(segment)
        )
        return [*told, done]

    def _call_done(self, segment: Segment) -> list[msgspec.Struct]:
        return [
            ArgumentsDone(
                sequence_number=self.number(),
                output_index=segment.idx,
                item_id=self._id(segment),
                name=segment.name,
                arguments=segment.text,
            )
        ]

    def _text_done(self, segment: Segment) -> list[msgspec.Struct]:
        item_id, idx, text = self._id(segment), segment.idx, segment.text
        number = self.number()
        done: TextDone | ReasoningDone
        if segment.kind == "reasoning":
            done = ReasoningDone(
                sequence_number=number, output_index=idx, item_id=item_id, text=text
            )
        else:
            done = TextDone(
                sequence_number=number,
                output_index=idx,
                item_id=item_id,
                text=text,
                logprobs=segment.logprobs,
            )
        part = ContentDone(
            sequence_number=self.number(),
            output_index=idx,
            item_id=item_id,
            part=_content(segment),
        )
        return [done, part]


def _content(segment: Segment) -> OutputText | ReasoningText:
    if segment.kind == "reasoning":
        return ReasoningText(segment.text)
    return OutputText(text=segment.text, logprobs=segment.logprobs)

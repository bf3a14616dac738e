"""How a finished span is built, off the event loop, and how the two trace families meet.

Requests (service `specserve`): server span -> `chat {model}` -> tokenize, queue, prefill per chunk,
decode -> decode.rounds, stream.
Engine (service `specserve-engine`): engine.window -> engine.step -> plan, draft, target_forward,
verify, commit. One trace per window and not per step: fifty traces a second would push the
requests out of a trace store. Families meet in links only, both ways: a step and a window link to
the decode spans of their requests, a decode span to its windows and kept steps.

Spans are plain values, not the SDK's: ids and times were chosen when things happened, its limits
(128 links, 128 events, oldest lost) do not apply, and making and encoding one takes a tenth of the
time. Our own caps hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec
from opentelemetry.trace import SpanContext
from opentelemetry.util.types import AttributeValue

from .context import child_context
from .records import RowRecord

MAX_LINKS = 512  # links and outcome events of one step or window span
MAX_DECODE_STEP_LINKS = 64  # step links on one decode span; the first ones are kept
MAX_DECODE_WINDOW_LINKS = 64  # five minutes of windows
ROUND_STEPS = 16  # of one decode.rounds span, or
ROUND_SECONDS = 1.0
MAX_ROUNDS = 256  # of one request; the last takes the rest
_MAX_FOLLOWED = 4096  # requests whose links are being collected at once
_LONGEST_ERROR = 200  # characters

INTERNAL: Final = 1  # kinds, as OTLP numbers them
SERVER: Final = 2
_HAS_IS_REMOTE = 0x100  # span flags: bit 8 says that bit 9 is known
_IS_REMOTE = 0x200

Attributes = Mapping[str, AttributeValue]


class Origin(NamedTuple):
    """Where spans come from: the attributes of a resource, and what made them."""

    resource: Attributes
    scope: str
    version: str


class SharedAttributes(dict[str, AttributeValue]):
    """Of many events, as one object. encoded: for who encodes them, to do it once"""

    encoded = b""


class Event(NamedTuple):
    name: str
    attributes: Attributes
    time_ns: int


class Span(msgspec.Struct, frozen=True):
    """A finished one. error: None: it did not fail; else what is known, which may be nothing"""

    name: str
    context: SpanContext
    parent: SpanContext | None
    origin: Origin
    kind: int
    start_ns: int
    end_ns: int
    attributes: Attributes
    events: Sequence[Event] = ()
    links: Sequence[SpanContext] = ()
    error: str | None = None

    @property
    def flags(self) -> int:
        remote = _IS_REMOTE if self.parent is not None and self.parent.is_remote else 0
        return self.context.trace_flags | _HAS_IS_REMOTE | remote


def link_flags(link: SpanContext) -> int:
    return link.trace_flags | _HAS_IS_REMOTE | (_IS_REMOTE if link.is_remote else 0)


class SpanFactory:
    """Builds the spans of one resource; times are seconds since the epoch."""

    def __init__(self, resource: Attributes, version: str) -> None:
        self._origin = Origin(resource, "specserve", version)

    def span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start: float,
        end: float,
        attributes: Attributes,
        *,
        kind: int = INTERNAL,
        links: Sequence[SpanContext] = (),
        events: Sequence[Event] = (),
        error: str | None = None,
    ) -> Span:
        start_ns = to_ns(start)
        end_ns = max(start_ns, to_ns(end))  # a phase that never ran, a clock set back
        if error is not None:
            error = error[:_LONGEST_ERROR]
        origin = self._origin
        return Span(
            name, context, parent, origin, kind, start_ns, end_ns, attributes, events, links, error
        )

    def child(
        self, name: str, parent: SpanContext, start: float, end: float, attributes: Attributes
    ) -> Span:
        return self.span(name, child_context(parent), parent, start, end, attributes)


class Round:
    """A stretch of one request's decode steps: what it drafted and kept in each."""

    def __init__(self, start: float) -> None:
        self.start = start
        self.end = start
        self.drafters: list[str] = []
        self.drafted: list[int] = []  # per step, as the next one
        self.accepted: list[int] = []
        self.num_emitted = 0

    def add(self, row: RowRecord, end: float) -> None:
        self.end = end
        if row.num_draft_tokens and row.drafter not in self.drafters:
            self.drafters.append(row.drafter)
        self.drafted.append(row.num_draft_tokens)
        self.accepted.append(row.num_accepted_tokens)
        self.num_emitted += row.num_emitted_tokens


class DecodeNotes:
    """What the steps say of one request, until its decode span is built: its windows, its kept
    steps, its rounds."""

    def __init__(self) -> None:
        self.windows: list[SpanContext] = []
        self.steps: list[SpanContext] = []
        self.num_dropped = 0
        self.rounds: list[Round] = []

    def add_window(self, window: SpanContext) -> None:
        if len(self.windows) >= MAX_DECODE_WINDOW_LINKS:
            self.num_dropped += 1
            return
        self.windows.append(window)

    def add_step(self, step: SpanContext) -> None:
        if len(self.steps) >= MAX_DECODE_STEP_LINKS:
            self.num_dropped += 1
            return
        self.steps.append(step)

    def add_row(self, row: RowRecord, start: float, end: float) -> None:
        """start, end: of the step"""
        last = self.rounds[-1] if self.rounds else None
        full = last is None or len(last.drafted) >= ROUND_STEPS or end - last.start >= ROUND_SECONDS
        if last is None or (full and len(self.rounds) < MAX_ROUNDS):
            last = Round(start)
            self.rounds.append(last)
        last.add(row, end)


class DecodeBook:
    """Decode span id -> its notes. Bounded: a request whose record was dropped is forgotten."""

    def __init__(self) -> None:
        self._by_span_id: OrderedDict[int, DecodeNotes] = OrderedDict()

    def of(self, decode_span_id: int) -> DecodeNotes:
        notes = self._by_span_id.get(decode_span_id)
        if notes is None:
            notes = self._by_span_id[decode_span_id] = DecodeNotes()
            if len(self._by_span_id) > _MAX_FOLLOWED:
                self._by_span_id.popitem(last=False)
        return notes

    def take(self, decode_span_id: int) -> DecodeNotes:
        return self._by_span_id.pop(decode_span_id, None) or DecodeNotes()


def to_ns(seconds: float) -> int:
    return int(seconds * 1e9)

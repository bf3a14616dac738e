"""How a finished span is built, off the event loop, and how the two trace families meet.

Requests (service `specserve`): server span -> tokenize, queue, prefill per chunk, decode.
Engine (service `specserve-engine`): engine.window -> engine.step -> plan, draft, target_forward,
verify, commit. One trace per window and not per step: fifty traces a second would push the
requests out of a trace store. Families meet in links only, both ways: a step and a window link to
the decode spans of their requests, a decode span to its windows and kept steps.

Spans are ReadableSpan values built directly: ids and times were chosen when things happened, and
the SDK's limits (128 links, 128 events, oldest lost) do not apply. Our own caps do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from .context import child_context

MAX_LINKS = 512  # links and outcome events of one step or window span
MAX_DECODE_STEP_LINKS = 64  # step links on one decode span; the first ones are kept
MAX_DECODE_WINDOW_LINKS = 64  # five minutes of windows
_MAX_FOLLOWED = 4096  # requests whose links are being collected at once

Attributes = Mapping[str, AttributeValue]

UNSET = Status(StatusCode.UNSET)


class SpanFactory:
    """Builds the spans of one resource; times are seconds since the epoch."""

    def __init__(self, resource: Resource, version: str) -> None:
        self._resource = resource
        self._scope = InstrumentationScope("specserve", version)

    def span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        start: float,
        end: float,
        attributes: Attributes,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Sequence[Link] = (),
        events: Sequence[Event] = (),
        status: Status = UNSET,
    ) -> ReadableSpan:
        start_ns = to_ns(start)
        return ReadableSpan(
            name,
            context,
            parent,
            self._resource,
            attributes,
            events,
            links,
            kind,
            status=status,
            start_time=start_ns,
            end_time=max(start_ns, to_ns(end)),  # a phase that never ran, a clock set back
            instrumentation_scope=self._scope,
        )

    def child(
        self, name: str, parent: SpanContext, start: float, end: float, attributes: Attributes
    ) -> ReadableSpan:
        return self.span(name, child_context(parent), parent, start, end, attributes)


class DecodeLinks:
    """Which windows and kept steps a request ran in, until its decode span is built."""

    def __init__(self) -> None:
        self.windows: list[SpanContext] = []
        self.steps: list[SpanContext] = []
        self.num_dropped = 0

    def add_window(self, window: SpanContext) -> None:
        if self.windows and self.windows[-1].span_id == window.span_id:
            return
        if len(self.windows) >= MAX_DECODE_WINDOW_LINKS:
            self.num_dropped += 1
            return
        self.windows.append(window)

    def add_step(self, step: SpanContext) -> None:
        if len(self.steps) >= MAX_DECODE_STEP_LINKS:
            self.num_dropped += 1
            return
        self.steps.append(step)


class LinkBook:
    """Decode span id -> its links. Bounded: a request whose record was dropped is forgotten."""

    def __init__(self) -> None:
        self._by_span_id: OrderedDict[int, DecodeLinks] = OrderedDict()

    def of(self, decode: SpanContext) -> DecodeLinks:
        links = self._by_span_id.get(decode.span_id)
        if links is None:
            links = self._by_span_id[decode.span_id] = DecodeLinks()
            if len(self._by_span_id) > _MAX_FOLLOWED:
                self._by_span_id.popitem(last=False)
        return links

    def take(self, decode_span_id: int) -> DecodeLinks:
        return self._by_span_id.pop(decode_span_id, None) or DecodeLinks()


def status_of(error: str | None) -> Status:
    return UNSET if error is None else Status(StatusCode.ERROR, error[:200])


def to_ns(seconds: float) -> int:
    return int(seconds * 1e9)

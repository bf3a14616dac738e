"""What a trace says of a request or of engine steps, as numbers: seconds, tokens, guesses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from itertools import pairwise, zip_longest

import msgspec

from . import names
from .otlp_reading import OtlpSpan, plain
from .trace_store import StoredTrace

Attributes = dict[str, object]

OUTSIDE = "outside these"


class Guesses(msgspec.Struct):
    num_steps: int = 0  # that had guesses
    num_drafted: int = 0
    num_accepted: int = 0
    num_emitted: int = 0  # in those steps
    drafted_at: list[int] = []
    accepted_at: list[int] = []
    drafters: list[str] = []

    def add(self, other: Guesses) -> None:
        self.num_steps += other.num_steps
        self.num_drafted += other.num_drafted
        self.num_accepted += other.num_accepted
        self.num_emitted += other.num_emitted
        self.drafted_at = _sums(self.drafted_at, other.drafted_at)
        self.accepted_at = _sums(self.accepted_at, other.accepted_at)
        self.drafters = sorted({*self.drafters, *other.drafters})


class Step(msgspec.Struct):
    """One kept engine step."""

    span_id: str
    index: int
    kind: str
    start_ns: int
    end_ns: int
    num_requests: int
    num_tokens: int
    num_prefill_tokens: int
    num_waiting: int
    num_blocks_free: int
    phases: dict[str, int]  # name -> ns

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns


class Window(msgspec.Struct):
    num_steps: int
    steps: list[Step]


class Request(msgspec.Struct):
    trace_id: str
    name: str
    request_id: str
    start_ns: int
    end_ns: int
    phases: dict[str, int]  # name of span -> ns, longest first
    queued: list[tuple[int, int, str]]  # start, end, reason
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int
    num_preemptions: int
    ttft_seconds: float | None
    blocked_seconds: float  # in which writes of the reply waited for the client
    finish_reasons: list[str]
    error: str
    guesses: Guesses
    step_ids: set[str]  # what its decode spans link to

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns


def facts_of(trace: StoredTrace) -> Request | Window | None:
    """None: neither a request that came to the engine, nor an engine window."""
    spans = [read.span for read in trace.spans()]
    if any(span.name == names.DECODE for span in spans):
        return _request(trace, spans)
    if any(span.name == names.ENGINE_STEP for span in spans):
        return _window(spans)
    return None


def time_by_phase(spans: Sequence[OtlpSpan]) -> dict[str, int]:
    """Nanoseconds by name of span, longest first: each moment belongs to the shortest span that
    covers it, so that the sum is the trace's time. Spans inside a decode count as the decode; what
    only spans with children cover is OUTSIDE."""
    decodes = {span.span_id for span in spans if span.name == names.DECODE}
    spans = [span for span in spans if span.parent_span_id not in decodes]
    parents = {span.parent_span_id for span in spans}
    begins = sorted(spans, key=lambda span: span.start_ns)
    moments = sorted({moment for span in spans for moment in (span.start_ns, span.end_ns)})
    covering: list[tuple[int, bool, int, str]] = []  # a heap: length, has children, end, name
    times: Counter[str] = Counter()
    begun = 0
    for moment, following in pairwise(moments):
        while begun < len(begins) and begins[begun].start_ns <= moment:
            span = begins[begun]
            is_parent = span.span_id in parents
            name = OUTSIDE if is_parent else span.name
            heappush(covering, (span.end_ns - span.start_ns, is_parent, span.end_ns, name))
            begun += 1
        while covering and covering[0][2] <= moment:
            heappop(covering)
        if covering:
            times[covering[0][3]] += following - moment
    return dict(times.most_common())


def _request(trace: StoredTrace, spans: Sequence[OtlpSpan]) -> Request:
    decodes = [span for span in spans if span.name == names.DECODE]
    about = [plain(span.attributes) for span in decodes]
    guesses = Guesses()
    for attributes in about:
        guesses.add(_guesses(attributes))
    first_tokens = [_float(a[names.LATENCY_TTFT]) for a in about if names.LATENCY_TTFT in a]
    return Request(
        trace_id=trace.trace_id,
        name=trace.root()[1],
        request_id=str(about[0].get(names.REQUEST_ID, "")),
        start_ns=trace.start_ns,
        end_ns=trace.end_ns,
        phases=time_by_phase(spans),
        queued=list(_queued(spans)),
        num_prompt_tokens=max(_int(a, names.GEN_AI_INPUT_TOKENS) for a in about),
        num_output_tokens=sum(_int(a, names.GEN_AI_OUTPUT_TOKENS) for a in about),
        num_steps=sum(_int(a, names.DECODE_STEPS) for a in about),
        num_preemptions=sum(_int(a, names.PREEMPTIONS) for a in about),
        ttft_seconds=min(first_tokens, default=None),
        blocked_seconds=_blocked(spans),
        finish_reasons=[text for a in about for text in _texts(a, names.GEN_AI_FINISH_REASONS)],
        error=next((span.status.message or "failed" for span in spans if span.is_error), ""),
        guesses=guesses,
        step_ids={link.span_id.lower() for span in decodes for link in span.links},
    )


def _blocked(spans: Sequence[OtlpSpan]) -> float:
    streams = (plain(span.attributes) for span in spans if span.name == names.STREAM)
    return sum(_float(attributes.get(names.STREAM_BLOCKED)) for attributes in streams)


def _queued(spans: Sequence[OtlpSpan]) -> Iterator[tuple[int, int, str]]:
    for span in spans:
        if span.name == names.QUEUE:
            reason = str(plain(span.attributes).get(names.QUEUE_REASON, ""))
            yield span.start_ns, span.end_ns, reason


def _window(spans: Sequence[OtlpSpan]) -> Window:
    phases: dict[str, dict[str, int]] = {}
    for span in spans:
        phases.setdefault(span.parent_span_id, {})[span.name] = span.end_ns - span.start_ns
    steps = [
        _step(span, phases.get(span.span_id, {}))
        for span in spans
        if span.name == names.ENGINE_STEP
    ]
    roots = [plain(span.attributes) for span in spans if span.name == names.ENGINE_WINDOW]
    told = sum(_int(attributes, names.WINDOW_STEPS) for attributes in roots)
    return Window(max(told, len(steps)), steps)


def _step(span: OtlpSpan, phases: dict[str, int]) -> Step:
    attributes = plain(span.attributes)
    return Step(
        span_id=span.span_id,
        index=_int(attributes, names.STEP_INDEX),
        kind=str(attributes.get(names.STEP_KIND, "")),
        start_ns=span.start_ns,
        end_ns=span.end_ns,
        num_requests=_int(attributes, names.BATCH_REQUESTS),
        num_tokens=_int(attributes, names.BATCH_TOKENS),
        num_prefill_tokens=_int(attributes, names.BATCH_PREFILL_TOKENS),
        num_waiting=_int(attributes, names.REQUESTS_WAITING),
        num_blocks_free=_int(attributes, names.KV_BLOCKS_FREE),
        phases=phases,
    )


def _guesses(attributes: Attributes) -> Guesses:
    return Guesses(
        num_steps=_int(attributes, names.SPEC_STEPS),
        num_drafted=_int(attributes, names.SPEC_DRAFT_TOKENS),
        num_accepted=_int(attributes, names.SPEC_ACCEPTED_TOKENS),
        num_emitted=_int(attributes, names.SPEC_EMITTED_TOKENS),
        drafted_at=_ints(attributes, names.SPEC_DRAFTED_AT_POSITION),
        accepted_at=_ints(attributes, names.SPEC_ACCEPTED_AT_POSITION),
        drafters=_texts(attributes, names.SPEC_DRAFTERS),
    )


def _sums(left: list[int], right: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(left, right, fillvalue=0)]


def _int(attributes: Attributes, key: str) -> int:
    """0 where a file from elsewhere has none, or another type."""
    value = attributes.get(key)
    return value if isinstance(value, int) else 0


def _float(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _ints(attributes: Attributes, key: str) -> list[int]:
    values = attributes.get(key)
    return [v for v in values if isinstance(v, int)] if isinstance(values, list) else []


def _texts(attributes: Attributes, key: str) -> list[str]:
    values = attributes.get(key)
    return [str(value) for value in values] if isinstance(values, list) else []

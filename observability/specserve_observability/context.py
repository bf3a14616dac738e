"""W3C trace context: parsing, printing and fresh ids.

A context travels in the request as a `traceparent` string, never in a contextvar: the engine is
another task than the HTTP handler.
"""

from __future__ import annotations

import random
import re
from functools import lru_cache

from opentelemetry.trace import SpanContext, TraceFlags, TraceState

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_NOT_SAMPLED = TraceFlags(TraceFlags.DEFAULT)
_ids = random.SystemRandom()  # a seeded test or model must not make two runs share trace ids


def parse_traceparent(text: str) -> SpanContext | None:
    """The context a W3C `traceparent` names, as one of this process; None where it is not one."""
    match = _TRACEPARENT.fullmatch(text.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    sampled = int(flags, 16) & TraceFlags.SAMPLED
    context = SpanContext(
        int(trace_id, 16), int(span_id, 16), False, _SAMPLED if sampled else _NOT_SAMPLED
    )
    return context if context.is_valid else None


@lru_cache(maxsize=4096)  # a decode span's context comes back in every step of its request
def sampled_context(traceparent: str) -> SpanContext | None:
    """As parse_traceparent; None also where the trace is not kept."""
    context = parse_traceparent(traceparent)
    return context if context is not None and context.trace_flags.sampled else None


def format_traceparent(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def root_context() -> SpanContext:
    """The context of a span that begins a trace."""
    return SpanContext(_new_id(128), _new_id(64), False, _SAMPLED)


def child_context(
    parent: SpanContext, *, span_id: int = 0, trace_state: TraceState | None = None
) -> SpanContext:
    """A span in the parent's trace; span_id 0 draws one."""
    return SpanContext(
        parent.trace_id, span_id or _new_id(64), False, parent.trace_flags, trace_state
    )


def _new_id(num_bits: int) -> int:
    while True:
        number = _ids.getrandbits(num_bits)
        if number:
            return number

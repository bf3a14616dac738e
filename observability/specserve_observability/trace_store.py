"""Traces in memory, newest kept, within a bound: what a viewer searches.

Spans are kept as the bytes they came in beside a summary of their trace, and are decoded when
asked for.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from .otlp_reading import KIND_NAMES, OtlpResource, OtlpScope, OtlpSpan, ReadSpan, decode_span
from .trace_query import TraceQuery, is_true, may_hold, span_test

_SPAN_OVERHEAD_BYTES = 320  # objects around a span's bytes: its id in a set, list cells, headers
_TRACE_OVERHEAD_BYTES = 2500

T = TypeVar("T")


class ServiceCount(msgspec.Struct):
    num_spans: int = 0
    num_errors: int = 0


class SpanGroup(msgspec.Struct):
    """Spans of one trace that share a resource and a scope."""

    resource: OtlpResource
    scope: OtlpScope
    raw_resource: bytes
    raw_scope: bytes
    raw_spans: list[bytes]

    def read(self, wanted: Callable[[bytes], bool] = bool) -> Iterator[ReadSpan]:
        """wanted: which spans' bytes are worth decoding; all by default"""
        for raw in self.raw_spans:
            if wanted(raw):
                span = decode_span(raw)
                yield ReadSpan(
                    span, self.scope, self.resource, raw, self.raw_scope, self.raw_resource
                )


class StoredTrace:
    """Written under the store's lock."""

    def __init__(self, trace_id: str) -> None:
        self.trace_id = trace_id
        self.groups: dict[tuple[bytes, bytes], SpanGroup] = {}
        self.services: dict[str, ServiceCount] = {}
        self.start_ns = sys.maxsize
        self.end_ns = 0
        self.num_bytes = _TRACE_OVERHEAD_BYTES
        self._root: tuple[int, str, str] | None = None  # start, service, name
        self._span_ids: set[str] = set()
        self._parent_ids: Counter[str] = Counter()

    @property
    def num_spans(self) -> int:
        return len(self._span_ids)

    @property
    def num_errors(self) -> int:
        return sum(count.num_errors for count in self.services.values())

    @property
    def num_orphans(self) -> int:
        """Spans whose parent is not here: a caller's, or one that has not ended."""
        return sum(n for parent, n in self._parent_ids.items() if parent not in self._span_ids)

    def root(self) -> tuple[str, str]:
        """Service and name of the first span without a parent; else of the first orphan."""
        if self._root is None:
            orphans = [
                (read.span.start_ns, read.resource.service, read.span.name)
                for read in self.spans()
                if read.span.parent_span_id not in self._span_ids
            ]
            return min(orphans, default=(0, "", ""))[1:]
        return self._root[1:]

    def spans(self) -> Iterator[ReadSpan]:
        for group in self.groups.values():
            yield from group.read()

    def candidates(self, query: TraceQuery) -> Iterator[ReadSpan]:
        for group in self.groups.values():
            yield from group.read(may_hold(query, group.raw_resource + group.raw_scope))

    def add(self, read: ReadSpan) -> int:
        """Returns how many bytes that took: 0 for a span that is here already."""
        span = read.span
        if span.span_id in self._span_ids:
            return 0
        self._span_ids.add(span.span_id)
        key = (read.raw_resource, read.raw_scope)
        group = self.groups.get(key)
        if group is None:
            group = SpanGroup(read.resource, read.scope, read.raw_resource, read.raw_scope, [])
            self.groups[key] = group
        group.raw_spans.append(read.raw)
        self._summarize(span, read.resource.service)
        num_bytes = len(read.raw) + _SPAN_OVERHEAD_BYTES
        self.num_bytes += num_bytes
        return num_bytes

    def _summarize(self, span: OtlpSpan, service: str) -> None:
        self.start_ns = min(self.start_ns, span.start_ns)
        self.end_ns = max(self.end_ns, span.end_ns)
        count = self.services.setdefault(service, ServiceCount())
        count.num_spans += 1
        count.num_errors += span.is_error
        if span.parent_span_id:
            self._parent_ids[span.parent_span_id] += 1
        else:
            root = (span.start_ns, service, span.name)
            self._root = root if self._root is None else min(self._root, root)


class TraceStore:
    """Written by one thread, read by any."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._traces: dict[str, StoredTrace] = {}  # in order of first appearance
        self._operations: dict[str, set[tuple[str, str]]] = {}  # of all that was ever here
        self.num_bytes = 0
        self.num_spans = 0  # ever added
        self.num_evicted_traces = 0

    @property
    def num_traces(self) -> int:
        return len(self._traces)

    def add(self, reads: Iterable[ReadSpan]) -> None:
        with self._lock:
            for read in reads:
                self._add(read)
            while self.num_bytes > self._max_bytes and len(self._traces) > 1:
                oldest = next(iter(self._traces))
                self.num_bytes -= self._traces.pop(oldest).num_bytes
                self.num_evicted_traces += 1

    def services(self) -> list[str]:
        with self._lock:
            return sorted(self._operations)

    def operations(self, service: str, kind: str = "") -> list[tuple[str, str]]:
        """(name, kind) of a service's spans; kind "": of every kind"""
        with self._lock:
            known = sorted(self._operations.get(service, ()))
        return [pair for pair in known if not kind or pair[1] == kind]

    def use(self, trace_id: str, use: Callable[[StoredTrace], T]) -> T | None:
        """What `use` makes of a trace while nothing is written; None where there is none."""
        with self._lock:
            trace = self._traces.get(trace_id)
            return None if trace is None else use(trace)

    def find(self, query: TraceQuery, use: Callable[[StoredTrace], T]) -> list[T]:
        """What `use` makes of the newest traces that match, the newest first.

        A trace matches where one of its spans meets all conditions, as in Jaeger's memory store.
        The writer gets its turn between traces.
        """
        with self._lock:
            candidates = list(reversed(self._traces.values()))
        matches = span_test(query)
        found: list[tuple[int, T]] = []
        for trace in candidates:
            if len(found) >= query.limit:
                break
            with self._lock:
                if _summary_matches(trace, query) and any(map(matches, trace.candidates(query))):
                    found.append((trace.start_ns, use(trace)))
        found.sort(key=lambda pair: pair[0], reverse=True)
        return [made for _, made in found]

    def _add(self, read: ReadSpan) -> None:
        trace = self._traces.get(read.span.trace_id)
        if trace is None:
            trace = self._traces[read.span.trace_id] = StoredTrace(read.span.trace_id)
            self.num_bytes += trace.num_bytes
        num_bytes = trace.add(read)
        if num_bytes:
            self.num_bytes += num_bytes
            self.num_spans += 1
            kind = KIND_NAMES.get(read.span.kind, "")
            self._operations.setdefault(read.resource.service, set()).add((read.span.name, kind))


def _summary_matches(trace: StoredTrace, query: TraceQuery) -> bool:
    """What can be ruled out before any span is decoded."""
    if query.service and query.service not in trace.services:
        return False
    if query.start_max_ns is not None and trace.start_ns > query.start_max_ns:
        return False
    if query.start_min_ns is not None and trace.end_ns < query.start_min_ns:
        return False
    if is_true(query.attributes.get("error", "")) and not trace.num_errors:
        return False
    return trace.end_ns - trace.start_ns >= query.duration_min_ns

"""Batches of records in, finished spans out to the sinks. One thread runs it, and builds alone.

Requests are built one batch later than their steps: a request's record may be written just before
the record of its last step, and its decode span must know that step to link to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from opentelemetry.sdk.resources import Resource

from . import names
from .engine_spans import EngineSpans
from .export import Batch, SpanCounts
from .http_spans import http_spans
from .logs import get_logger
from .records import HttpRecord, RequestRecord
from .request_spans import RequestSpans
from .sampling import StepSampler
from .sinks import Sink
from .spans import DecodeBook, Span, SpanFactory

_OFFER_SPANS = 512  # a request to a collector, which costs as much as the spans of two steps
_BREATH_SPANS = 32
_BREATH_SECONDS = 0.0001  # gives the interpreter's lock to the event loop, where it is in here

R = TypeVar("R")

_log = get_logger("specserve.tracing")


class SpanPipeline:
    """resource: attributes of both services; version: this program's."""

    def __init__(
        self,
        sinks: Sequence[Sink],
        counts: SpanCounts,
        *,
        resource: Mapping[str, str],
        version: str,
        sampler: StepSampler | None = None,
    ) -> None:
        self._sinks = sinks
        self._counts = counts
        book = DecodeBook()
        self._http_factory = _factory(names.REQUEST_SERVICE, resource, version)
        self._request_spans = RequestSpans(self._http_factory, book)
        engine_factory = _factory(names.ENGINE_SERVICE, resource, version)
        self._engine_spans = EngineSpans(engine_factory, sampler or StepSampler(), book)
        self._held_back: list[RequestRecord] = []
        self._ready: list[Span] = []
        self._breathe_at = _BREATH_SPANS

    def handle(self, batch: Batch) -> None:
        """Build what was recorded; with the last batch also what was still waiting."""
        requests, self._held_back = self._held_back, batch.requests
        self._build(batch.steps, self._engine_spans.add)
        self._build([batch.now], self._engine_spans.close_window)
        self._counts.num_step_spans_sampled_out = self._engine_spans.num_sampled_out
        self._build(requests, self._request_spans.build)
        self._build(batch.http, self._http_spans)
        if batch.seconds_left is not None:
            self._build(self._held_back, self._request_spans.build)
            self._build([None], self._engine_spans.close_window)
        self._offer()

    def _http_spans(self, record: HttpRecord) -> Iterable[Span]:
        return http_spans(record, self._http_factory)

    def _build(self, records: Iterable[R], build: Callable[[R], Iterable[Span]]) -> None:
        for record in records:
            try:
                self._ready.extend(build(record))
            except Exception as error:  # one odd record must not end tracing
                self._counts.num_spans_dropped_at_queue += 1
                _log.error("span_build_failed", error=repr(error))
            if len(self._ready) >= _OFFER_SPANS:
                self._offer()
            if len(self._ready) >= self._breathe_at:
                self._breathe_at = len(self._ready) + _BREATH_SPANS
                time.sleep(_BREATH_SECONDS)

    def _offer(self) -> None:
        spans, self._ready, self._breathe_at = self._ready, [], _BREATH_SPANS
        if spans:
            for sink in self._sinks:
                sink.offer(spans)


def _factory(service: str, attributes: Mapping[str, str], version: str) -> SpanFactory:
    resource = Resource.create({**attributes, names.SERVICE_NAME: service})
    return SpanFactory(resource.attributes, version)

"""Records in, finished spans out to the sinks. Run by one thread, the only one that builds spans.

Requests are built one drain later than their steps: a request's record may be written just before
the record of its last step, and its decode span must know that step to link to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from . import names
from .engine_spans import EngineSpans
from .logs import get_logger
from .recorder import Recorder
from .records import RequestRecord
from .request_spans import RequestSpans
from .sampling import StepSampler
from .server_tracer import HttpRecord, ServerTracer, http_spans
from .sinks import Sink
from .spans import LinkBook, SpanFactory

_OFFER_SPANS = 32
_BREATH_SECONDS = 0.0001  # gives the interpreter's lock to the event loop between two offers

R = TypeVar("R")

_log = get_logger("specserve.tracing")


class SpanPipeline:
    """resource: attributes of both services; version: this program's."""

    def __init__(
        self,
        recorder: Recorder,
        server_tracer: ServerTracer,
        sinks: Sequence[Sink],
        *,
        resource: Mapping[str, str],
        version: str,
    ) -> None:
        self._recorder = recorder
        self._server_tracer = server_tracer
        self._sinks = sinks
        book = LinkBook()
        self._http_factory = _factory(names.REQUEST_SERVICE, resource, version)
        self._request_spans = RequestSpans(self._http_factory, book)
        engine_factory = _factory(names.ENGINE_SERVICE, resource, version)
        self._engine_spans = EngineSpans(engine_factory, StepSampler(), book)
        self._held_back: list[RequestRecord] = []
        self._ready: list[ReadableSpan] = []

    def drain(self, now: float) -> None:
        """Build what was recorded since the last call. now: time.time()."""
        requests, self._held_back = self._held_back, self._recorder.requests.take()
        self._build(self._recorder.steps.take(), self._engine_spans.add)
        self._build([now], self._engine_spans.close_window)
        self._recorder.metrics.num_step_spans_sampled_out = self._engine_spans.num_sampled_out
        self._build(requests, self._request_spans.build)
        self._build(self._server_tracer.ended.take(), self._http_spans)
        self._offer()

    def finish(self, now: float) -> None:
        """Drain, and build what was still waiting: held-back requests, the open window."""
        self.drain(now)
        self._build(self._held_back, self._request_spans.build)
        self._build([None], self._engine_spans.close_window)
        self._offer()

    def _http_spans(self, record: HttpRecord) -> Iterable[ReadableSpan]:
        return http_spans(record, self._http_factory)

    def _build(self, records: Iterable[R], build: Callable[[R], Iterable[ReadableSpan]]) -> None:
        for record in records:
            try:
                self._ready.extend(build(record))
            except Exception as error:  # one odd record must not end tracing
                self._recorder.metrics.num_spans_dropped_at_queue += 1
                _log.error("span_build_failed", error=repr(error))
            if len(self._ready) >= _OFFER_SPANS:
                self._offer()
                time.sleep(_BREATH_SECONDS)

    def _offer(self) -> None:
        spans, self._ready = self._ready, []
        if spans:
            for sink in self._sinks:
                sink.offer(spans)


def _factory(service: str, attributes: Mapping[str, str], version: str) -> SpanFactory:
    return SpanFactory(Resource.create({**attributes, names.SERVICE_NAME: service}), version)

"""Composition of tracing: recorder -> drain thread -> sinks.

The engine and the server leave records on the event loop; every half second one thread turns them
into spans and offers them to the sinks. With no sink there is no thread, no queue, and no tracer.

Requests are built one drain later than their steps: a request's record may be written just before
the record of its last step, and its decode span must know that step to link to it.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan

from . import names
from .engine_spans import EngineSpans
from .logs import get_logger
from .metrics import Metrics
from .recorder import Recorder
from .records import RequestRecord
from .request_spans import RequestSpans
from .sampling import StepSampler
from .server_tracer import HttpRecord, ServerTracer, http_spans
from .sinks import FileSink, OtlpSink, Sink
from .spans import LinkBook, SpanFactory

_DRAIN_SECONDS = 0.5
_OFFER_SPANS = 32
_BREATH_SECONDS = 0.0001  # gives the interpreter's lock to the event loop between two offers

R = TypeVar("R")

_log = get_logger("specserve.tracing")


class Tracing:
    """recorder: what the engine writes to; server_tracer: what the server starts spans with, None
    where tracing is off."""

    def __init__(self, recorder: Recorder, drain: _Drain | None) -> None:
        self.recorder = recorder
        self.server_tracer = None if drain is None else drain.server_tracer
        self._drain = drain

    def shutdown(self, timeout: float = 5.0) -> None:
        """Deliver what was recorded, within `timeout` seconds. Blocks: never on the event loop.
        A second call does nothing."""
        drain, self._drain = self._drain, None
        if drain is not None:
            drain.stop(time.monotonic() + timeout)


def open_tracing(
    *,
    otlp_endpoint: str | None = None,
    trace_file: str | Path | None = None,
    service_version: str,
    metrics: Metrics | None = None,
    resource: Mapping[str, str] | None = None,
) -> Tracing:
    """Start tracing to the sinks given; with neither, only metrics are kept.

    otlp_endpoint: base URL of an OTLP/HTTP collector, such as http://127.0.0.1:4318
    trace_file:    OTLP JSON lines are appended to it
    metrics:       what the recorder counts into; a fresh Metrics if None
    resource:      further resource attributes, such as names.MODEL_TARGET

    Raises ValueError (endpoint is not a URL) and OSError (file cannot be opened).
    """
    metrics = metrics or Metrics()
    sinks: list[Sink] = []
    if trace_file is not None:
        sinks.append(FileSink(trace_file, metrics))
    if otlp_endpoint is not None:
        sinks.append(OtlpSink(otlp_endpoint, metrics))
    recorder = Recorder(metrics, has_sink=bool(sinks))
    if not sinks:
        return Tracing(recorder, None)
    attributes = {
        **(resource or {}),
        names.SERVICE_VERSION: service_version,
        names.SERVICE_INSTANCE_ID: str(uuid.uuid4()),
    }
    drain = _Drain(
        recorder,
        ServerTracer(metrics),
        sinks,
        requests=_factory(names.REQUEST_SERVICE, attributes, service_version),
        engine=_factory(names.ENGINE_SERVICE, attributes, service_version),
    )
    drain.start()
    return Tracing(recorder, drain)


def _factory(service: str, attributes: Mapping[str, str], version: str) -> SpanFactory:
    return SpanFactory(Resource.create({**attributes, names.SERVICE_NAME: service}), version)


class _Drain:
    """The thread between the records and the sinks; the only one that touches span builders."""

    def __init__(
        self,
        recorder: Recorder,
        server_tracer: ServerTracer,
        sinks: list[Sink],
        *,
        requests: SpanFactory,
        engine: SpanFactory,
    ) -> None:
        self.server_tracer = server_tracer
        self._recorder = recorder
        self._sinks = sinks
        book = LinkBook()
        self._http_factory = requests
        self._request_spans = RequestSpans(requests, book)
        self._engine_spans = EngineSpans(engine, StepSampler(), book)
        self._held_back: list[RequestRecord] = []
        self._ready: list[ReadableSpan] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="specserve-spans", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, deadline: float) -> None:
        self._stopping.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        for sink in self._sinks:
            sink.close(deadline)

    def _run(self) -> None:
        while not self._stopping.wait(_DRAIN_SECONDS):
            self._drain()
        self._drain()
        self._build(self._held_back, self._request_spans.build)
        self._ready.extend(self._engine_spans.close_window())
        self._offer()

    def _drain(self) -> None:
        requests, self._held_back = self._held_back, self._recorder.requests.take()
        self._build(self._recorder.steps.take(), self._engine_spans.add)
        self._ready.extend(self._engine_spans.close_window(now=time.time()))
        self._recorder.metrics.num_step_spans_sampled_out = self._engine_spans.num_sampled_out
        self._build(requests, self._request_spans.build)
        self._build(self.server_tracer.ended.take(), self._http_spans)
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

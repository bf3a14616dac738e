"""Composition of tracing: recorder -> drain thread -> sinks.

The engine and the server leave records on the event loop; every half second one thread turns them
into spans and offers them to the sinks. With no sink there is no thread, no queue, and no tracer.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import names
from .metrics import Metrics
from .pipeline import SpanPipeline
from .recorder import Recorder
from .server_tracer import ServerTracer
from .sinks import FileSink, OtlpSink, Sink, traces_url

_DRAIN_SECONDS = 0.5


class Tracing:
    """recorder: what the engine writes to; server_tracer: what the server starts spans with, None
    where tracing is off."""

    def __init__(
        self, recorder: Recorder, server_tracer: ServerTracer | None, drain: _DrainThread | None
    ) -> None:
        self.recorder = recorder
        self.server_tracer = server_tracer
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
    url = None if otlp_endpoint is None else traces_url(otlp_endpoint)
    sinks: list[Sink] = []
    if trace_file is not None:
        sinks.append(FileSink(trace_file, metrics))
    if url is not None:
        sinks.append(OtlpSink(url, metrics))
    recorder = Recorder(metrics, has_sink=bool(sinks))
    if not sinks:
        return Tracing(recorder, None, None)
    server_tracer = ServerTracer(metrics)
    attributes = {
        **(resource or {}),
        names.SERVICE_VERSION: service_version,
        names.SERVICE_INSTANCE_ID: str(uuid.uuid4()),
    }
    pipeline = SpanPipeline(
        recorder, server_tracer, sinks, resource=attributes, version=service_version
    )
    drain = _DrainThread(pipeline, sinks)
    drain.start()
    return Tracing(recorder, server_tracer, drain)


class _DrainThread:
    def __init__(self, pipeline: SpanPipeline, sinks: Sequence[Sink]) -> None:
        self._pipeline = pipeline
        self._sinks = sinks
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
            self._pipeline.drain(time.time())
        self._pipeline.finish(time.time())

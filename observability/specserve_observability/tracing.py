"""Composition of tracing: recorder -> drain thread -> exporter.

The engine and the server leave records on the event loop; every half second one thread gathers
them and hands them to whoever makes spans: a side process, or an exporter in this one. With no sink
there is no thread, no process, no queue, and no tracer.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import msgspec

from . import names
from .export import Batch, Exporter, ExportSettings
from .exporter_process import ExporterProcess
from .in_process import InProcessExporter
from .logs import get_logger
from .metrics import Metrics
from .otlp_delivery import Environment
from .recorder import Recorder
from .server_tracer import ServerTracer
from .sinks import endpoint_url

_DRAIN_SECONDS = 0.5
_BATCH_STEPS = 256  # encoded in one go, which holds the interpreter: 2 ms where they have 16 rows

_log = get_logger("specserve.tracing")


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
    settings: ExportSettings,
    *,
    service_version: str,
    metrics: Metrics | None = None,
    resource: Mapping[str, str] | None = None,
) -> Tracing:
    """Start tracing to the sinks that settings name; with none, only metrics are kept.

    metrics:  what the recorder counts into; a fresh Metrics if None
    resource: further resource attributes, such as names.MODEL_TARGET

    Raises ValueError (endpoint is not a URL) and OSError (file cannot be opened).
    """
    metrics = metrics or Metrics()
    recorder = Recorder(metrics, has_sink=settings.has_sink)
    if not settings.has_sink:
        return Tracing(recorder, None, None)
    server_tracer = ServerTracer(metrics)
    attributes = {
        **(resource or {}),
        names.SERVICE_VERSION: service_version,
        names.SERVICE_INSTANCE_ID: str(uuid.uuid4()),
    }
    exporter = _exporter(settings, metrics, attributes, service_version)
    drain = _DrainThread(recorder, server_tracer, exporter)
    drain.start()
    return Tracing(recorder, server_tracer, drain)


def _exporter(
    settings: ExportSettings, metrics: Metrics, resource: Mapping[str, str], version: str
) -> Exporter:
    if settings.exporter == "thread":
        return InProcessExporter(settings, metrics, resource=resource, version=version)
    if endpoint_url(settings) is not None:  # here, where whoever started the server sees the error
        Environment.read(os.environ)
    if settings.trace_file is not None:
        _probe(Path(settings.trace_file))
    return ExporterProcess(settings, metrics, resource=resource, version=version)


def _probe(trace_file: Path) -> None:
    """OSError where the side process could not open it as it will: to read its end, to append."""
    if trace_file.exists() and not trace_file.is_file():  # opening a FIFO would wait for a reader
        raise OSError(errno.EINVAL, "it is no ordinary file, so it cannot be rotated")
    open(trace_file, "ab+").close()


class _DrainThread:
    def __init__(self, recorder: Recorder, server_tracer: ServerTracer, exporter: Exporter) -> None:
        self._recorder = recorder
        self._server_tracer = server_tracer
        self._exporter = exporter
        self._deadline = 0.0
        self._failures: set[type[Exception]] = set()  # that were logged
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="specserve-spans", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, deadline: float) -> None:
        self._deadline = deadline
        self._stopping.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._exporter.close(deadline)

    def _run(self) -> None:
        while not self._stopping.wait(_DRAIN_SECONDS):
            self._hand_over()
        self._hand_over()
        # Of its own: that this one was the last is told even where the one before was lost.
        seconds_left = max(0.0, self._deadline - time.monotonic())
        self._give(Batch([], [], [], time.time(), seconds_left))

    def _hand_over(self) -> None:
        # In this order: a request taken here has all but its last step in what is taken next.
        requests = [
            msgspec.structs.replace(one, inter_token_seconds=(), inter_chunk_seconds=())
            for one in self._recorder.requests.take()  # gaps are for metrics, and many
        ]
        steps = self._recorder.steps.take()
        http = self._server_tracer.ended.take()
        now = time.time()
        while len(steps) > _BATCH_STEPS:
            first, steps = steps[:_BATCH_STEPS], steps[_BATCH_STEPS:]
            self._give(Batch(first, [], [], now))
        self._give(Batch(steps, requests, http, now))

    def _give(self, batch: Batch) -> None:
        try:
            self._exporter.handle(batch)
        except Exception as error:  # one odd record must not end tracing
            self._exporter.lose(batch)
            if type(error) not in self._failures:
                self._failures.add(type(error))
                _log.exception("trace_batch_failed", num_records=batch.num_records)

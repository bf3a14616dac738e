"""Where finished spans go. A sink never makes the drain thread wait for the network.

What cannot be delivered is dropped and counted: `specserve_spans_dropped_total`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from .logs import get_logger
from .metrics import Metrics
from .otlp_json import encode_line
from .recorder import BoundedQueue

_BATCH_SPANS = 64  # two noisy runs: no worse for the event loop's p99 than 16
_QUEUED_SPANS = 4096
_EXPORT_TIMEOUT_SECONDS = 10.0

_log = get_logger("specserve.tracing")


class Sink(Protocol):
    def offer(self, spans: Sequence[ReadableSpan]) -> None:
        """Called by the drain thread only; returns at once."""
        ...

    def close(self, deadline: float) -> None:
        """Deliver what is left until `deadline` (time.monotonic), then give up."""
        ...


class FileSink:
    """Appends OTLP JSON lines to a file. Raises OSError if it cannot be opened."""

    def __init__(self, path: str | Path, metrics: Metrics) -> None:
        self._metrics = metrics
        self._file = open(path, "ab+")  # noqa: SIM115 - closed in close()
        self._failed = False
        if self._file.tell() > 0:
            self._file.seek(-1, 2)
            if self._file.read(1) != b"\n":  # an earlier run was cut off inside its last line
                self._file.write(b"\n")

    def offer(self, spans: Sequence[ReadableSpan]) -> None:
        try:
            self._file.write(encode_line(spans))
            self._file.flush()
        except (OSError, ValueError) as error:  # disk full; closed by a late shutdown
            self._metrics.num_spans_dropped_at_queue += len(spans)
            if not self._failed:
                _log.error("trace_file_write_failed", error=str(error))
            self._failed = True

    def close(self, deadline: float) -> None:
        self._file.close()


class OtlpSink:
    """OTLP over HTTP (protobuf) from a thread of its own, behind a bounded queue.

    url: where spans are posted, as traces_url gives it
    """

    def __init__(self, url: str, metrics: Metrics) -> None:
        # Imported here: it brings an HTTP client that a server without --otlp-endpoint never needs.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        self._metrics = metrics
        self._queue: BoundedQueue[ReadableSpan] = BoundedQueue(_QUEUED_SPANS)
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_TIMEOUT_SECONDS)
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="specserve-otlp", daemon=True)
        self._thread.start()

    def offer(self, spans: Sequence[ReadableSpan]) -> None:
        num_kept = sum(self._queue.put(span) for span in spans)
        self._metrics.num_spans_dropped_at_queue += len(spans) - num_kept
        if num_kept:
            self._wake.set()

    def close(self, deadline: float) -> None:
        self._closing.set()
        self._wake.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        gave_up = self._thread.is_alive()
        num_left = len(self._queue.take())
        self._metrics.num_spans_dropped_at_queue += num_left
        # Ends a retry that is waiting; the export thread counts its batch. The SDK's method has no
        # annotations.
        self._exporter.shutdown()  # type: ignore[no-untyped-call]
        if gave_up:
            _log.warning("trace_export_gave_up", num_spans_dropped=num_left)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while batch := self._queue.take(_BATCH_SPANS):
                if not self._deliver(batch):
                    self._metrics.num_spans_dropped_at_export += len(batch)
            if self._closing.is_set():
                return

    def _deliver(self, batch: list[ReadableSpan]) -> bool:
        try:
            return self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:  # older exporters (1.38 does) raise where a collector is down
            _log.warning("trace_export_failed", error=repr(error))
            return False


def traces_url(endpoint: str) -> str:
    """`http://host:4318` -> `http://host:4318/v1/traces`; a full URL is kept.

    Raises ValueError where the endpoint is not an http(s) URL.
    """
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(
            f"--otlp-endpoint is {endpoint!r}, which is not an http:// or https:// URL: "
            "give the collector's OTLP/HTTP address, for example http://127.0.0.1:4318"
        )
    base = endpoint.rstrip("/")
    return base if parts.path.rstrip("/").endswith("/v1/traces") else f"{base}/v1/traces"

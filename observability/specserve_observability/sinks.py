"""Where finished spans go. A sink never makes the drain thread wait for the network.

What cannot be delivered is dropped and counted: `specserve_spans_dropped_total`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from io import BufferedRandom
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from .export import ExportSettings, Protocols, SpanCounts
from .logs import get_logger
from .otlp_delivery import open_delivery
from .otlp_json import encode_line
from .otlp_protobuf import encode_request, encode_span
from .recorder import BoundedQueue
from .spans import Origin, Span

_REQUEST_SPANS = 512  # of one request, or
_REQUEST_BYTES = 2**20  # collectors take 4 MiB over gRPC, unless told otherwise
_LINE_SPANS = 32
_QUEUED_SPANS = 4096
_OLD_FILES = 3  # trace files kept beside the one that is written
_HTTP_EXAMPLE = "http://127.0.0.1:4318"

_log = get_logger("specserve.tracing")


class Sink(Protocol):
    def offer(self, spans: Sequence[Span]) -> None:
        """Called by the drain thread only; returns at once."""
        ...

    def close(self, deadline: float) -> None:
        """Deliver what is left until `deadline` (time.monotonic), then give up."""
        ...


class FileSink:
    """Appends OTLP JSON lines to a file. Raises OSError if it cannot be opened.

    max_bytes: a file that would grow beyond becomes PATH.1, that one PATH.2, the oldest goes
    """

    def __init__(self, path: str | Path, counts: SpanCounts, max_bytes: int) -> None:
        self._path = Path(path)
        self._counts = counts
        self._max_bytes = max_bytes
        self._failed = False
        self._file: BufferedRandom = open(path, "ab+")  # noqa: SIM115 - closed in close()
        self._num_bytes = self._file.tell()
        if self._num_bytes > 0:
            self._file.seek(-1, 2)
            if self._file.read(1) != b"\n":  # an earlier run was cut off inside its last line
                self._num_bytes += self._file.write(b"\n")

    def offer(self, spans: Sequence[Span]) -> None:
        for first in range(0, len(spans), _LINE_SPANS):
            self._write(spans[first : first + _LINE_SPANS])

    def _write(self, spans: Sequence[Span]) -> None:
        try:
            line = encode_line(spans)
            if self._num_bytes and self._num_bytes + len(line) > self._max_bytes:
                self._rotate()
            self._num_bytes += self._file.write(line)
            self._file.flush()
        except (OSError, ValueError) as error:  # disk full; closed by a late shutdown, no Unicode
            self._counts.num_spans_dropped_at_queue += len(spans)
            if not self._failed:
                _log.error("trace_file_write_failed", error=str(error))
            self._failed = True

    def _rotate(self) -> None:
        if self._path.exists():  # else it was moved before, and no new one could be opened
            for idx in range(_OLD_FILES, 0, -1):
                older = self._old(idx - 1) if idx > 1 else self._path
                if older.exists():
                    older.replace(self._old(idx))
        full, self._file = self._file, open(self._path, "ab+")  # noqa: SIM115
        full.close()
        self._num_bytes = 0

    def _old(self, idx: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{idx}")

    def close(self, deadline: float) -> None:
        self._file.close()


class OtlpSink:
    """OTLP from a thread of its own, behind a bounded queue.

    url: where spans are posted, as endpoint_url gives it
    """

    def __init__(self, url: str, protocol: Protocols, counts: SpanCounts) -> None:
        self._counts = counts
        self._queue: BoundedQueue[Span] = BoundedQueue(_QUEUED_SPANS)
        self._delivery = open_delivery(url, protocol)
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="specserve-otlp", daemon=True)
        self._thread.start()

    def offer(self, spans: Sequence[Span]) -> None:
        num_kept = sum(self._queue.put(span) for span in spans)
        self._counts.num_spans_dropped_at_queue += len(spans) - num_kept
        if num_kept:
            self._wake.set()

    def close(self, deadline: float) -> None:
        self._closing.set()
        self._wake.set()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        gave_up = self._thread.is_alive()
        num_left = len(self._queue.take())
        self._counts.num_spans_dropped_at_queue += num_left
        self._delivery.close()  # the thread counts the request that it is at
        if gave_up:
            _log.warning("trace_export_gave_up", num_spans_dropped=num_left)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while spans := self._queue.take(_REQUEST_SPANS):
                for part in self._requests(spans):
                    self._deliver(part)
            if self._closing.is_set():
                return

    def _requests(self, spans: Sequence[Span]) -> Iterator[_Request]:
        request = _Request()
        for span in spans:
            try:
                request.add(span)
            except ValueError as error:  # a text that is no Unicode
                self._counts.num_spans_dropped_at_export += 1
                _log.error("span_encoding_failed", error=repr(error))
            if request.num_bytes >= _REQUEST_BYTES:
                yield request
                request = _Request()
        yield request

    def _deliver(self, request: _Request) -> None:
        try:
            delivered = not request.num_spans or self._delivery.deliver(request.encode())
        except Exception as error:  # of a library; the thread must not end
            _log.warning("trace_export_failed", error=repr(error))
            delivered = False
        if not delivered:
            self._counts.num_spans_dropped_at_export += request.num_spans


class _Request:
    """An ExportTraceServiceRequest while it grows: encoded spans by their origin."""

    def __init__(self) -> None:
        self._by_origin: dict[int, tuple[Origin, list[bytes]]] = {}
        self.num_spans = 0
        self.num_bytes = 0

    def add(self, span: Span) -> None:
        data = encode_span(span)
        self._by_origin.setdefault(id(span.origin), (span.origin, []))[1].append(data)
        self.num_spans += 1
        self.num_bytes += len(data)

    def encode(self) -> bytes:
        return b"".join(encode_request(*group) for group in self._by_origin.values())


def open_sinks(settings: ExportSettings, counts: SpanCounts) -> list[Sink]:
    """Raises ValueError (endpoint is not a URL) and OSError (file cannot be opened)."""
    url = endpoint_url(settings)
    sinks: list[Sink] = []
    if settings.trace_file is not None:
        sinks.append(FileSink(settings.trace_file, counts, settings.trace_file_bytes))
    if url is not None:
        sinks.append(OtlpSink(url, settings.otlp_protocol, counts))
    return sinks


def endpoint_url(settings: ExportSettings) -> str | None:
    """HTTP: `http://host:4318` -> `http://host:4318/v1/traces`, a full URL is kept; gRPC: as given.

    Raises ValueError where the endpoint is not an http(s) URL.
    """
    endpoint = settings.otlp_endpoint
    if endpoint is None:
        return None
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        example = "http://127.0.0.1:4317" if settings.otlp_protocol == "grpc" else _HTTP_EXAMPLE
        raise ValueError(
            f"--otlp-endpoint is {endpoint!r}, which is not an http:// or https:// URL: "
            f"give the collector's OTLP address, for example {example}"
        )
    base = endpoint.rstrip("/")
    if settings.otlp_protocol == "grpc" or parts.path.rstrip("/").endswith("/v1/traces"):
        return base
    return f"{base}/v1/traces"

"""Requests that are encoded already, sent to an OTLP collector over HTTP or gRPC.

As the OpenTelemetry specification has it: which answers are worth another try, with pauses that
grow, and the headers, certificates and compression that OTEL_EXPORTER_OTLP_* variables ask for. The
SDK's exporters do the same, but take their own spans only, and encode them themselves.
"""

from __future__ import annotations

import gzip
import os
import random
import ssl
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Final, Literal, Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec
from opentelemetry.util.re import parse_env_headers

from .export import Protocols
from .logs import get_logger

Compression = Literal["none", "gzip", "deflate"]
_TIMEOUT_SECONDS = 10.0  # of a request, all its tries together
_MAX_TRIES = 6
_FIRST_PAUSE_SECONDS = 1.0
_JITTER = 0.2
_METHOD: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_HTTP_AGAIN = frozenset((408, 429, 502, 503, 504))
_GRPC_AGAIN = frozenset(
    (
        "CANCELLED",
        "DEADLINE_EXCEEDED",
        "RESOURCE_EXHAUSTED",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNAVAILABLE",
        "DATA_LOSS",
    )
)

_log = get_logger("specserve.tracing")


class Environment(msgspec.Struct, frozen=True):
    """What OTEL_EXPORTER_OTLP_* variables say; those with TRACES in their name go first."""

    headers: Mapping[str, str] = {}
    certificate: str | None = None  # of the authority that a collector's was signed by
    client_key: str | None = None
    client_certificate: str | None = None
    compression: Compression = "none"

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Environment:
        """ValueError: there is no such compression; OSError: a file cannot be read."""

        def told(name: str) -> str | None:
            traces = variables.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}")
            return traces or variables.get(f"OTEL_EXPORTER_OTLP_{name}") or None

        compression = (told("COMPRESSION") or "none").strip().lower()
        if compression not in ("none", "gzip", "deflate"):
            raise ValueError(
                f"OTEL_EXPORTER_OTLP_COMPRESSION is {compression!r}: give none, gzip or deflate"
            )
        for name in ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE"):
            _content(told(name))
        return cls(
            headers=parse_env_headers(told("HEADERS") or "", liberal=True),
            certificate=told("CERTIFICATE"),
            client_key=told("CLIENT_KEY"),
            client_certificate=told("CLIENT_CERTIFICATE"),
            compression=compression,  # type: ignore[arg-type]  # one of the three, by now
        )

    def tls_context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.certificate)
        if self.client_certificate:
            context.load_cert_chain(self.client_certificate, self.client_key)
        return context


class Answer(msgspec.Struct, frozen=True):
    """trouble: what went wrong; empty: delivered. again: another try may help, after `pause`."""

    trouble: str = ""
    again: bool = False
    pause: float | None = None  # seconds, as the collector asks


class Transport(Protocol):
    def send(self, data: bytes, timeout: float) -> Answer:
        """Blocks up to `timeout` seconds, as far as a library keeps to it."""
        ...

    def close(self) -> None: ...


class HttpTransport:
    """By urllib3, which takes a quarter of the CPU time of requests, built on it. Redirects are not
    followed."""

    def __init__(self, url: str, environment: Environment) -> None:
        import urllib3  # here: of no use to a server without --otlp-endpoint

        self._url = url
        self._headers = {
            "user-agent": "specserve",
            **environment.headers,
            "content-type": "application/x-protobuf",
        }
        if environment.compression != "none":
            self._headers["content-encoding"] = environment.compression
        self._pack = _PACKERS[environment.compression]
        context = environment.tls_context() if url.startswith("https") else None
        proxy = _proxy_of(url)
        self._pool = (
            urllib3.ProxyManager(proxy, ssl_context=context)
            if proxy
            else urllib3.PoolManager(ssl_context=context)
        )
        self._failure = urllib3.exceptions.HTTPError

    def send(self, data: bytes, timeout: float) -> Answer:
        body = self._pack(data)
        try:
            reply = self._pool.request(
                "POST",
                self._url,
                body=body,
                headers=self._headers,
                timeout=timeout,
                retries=False,
                redirect=False,
            )
        except self._failure as error:
            return Answer(repr(error), again=True)
        if 200 <= reply.status < 300:
            return Answer()
        again = reply.status in _HTTP_AGAIN
        return Answer(
            f"HTTP status {reply.status}", again, _pause(reply.headers.get("retry-after"))
        )

    def close(self) -> None:
        self._pool.clear()


class GrpcTransport:
    """url: http:// is in the clear, https:// is TLS."""

    def __init__(self, url: str, environment: Environment) -> None:
        import grpc  # likewise

        parts = urlsplit(url)
        compression = (
            grpc.Compression.Gzip
            if environment.compression == "gzip"
            else grpc.Compression.NoCompression
        )
        if parts.scheme == "https":
            credentials = grpc.ssl_channel_credentials(
                _content(environment.certificate),
                _content(environment.client_key),
                _content(environment.client_certificate),
            )
            self._channel = grpc.secure_channel(parts.netloc, credentials, compression=compression)
        else:
            self._channel = grpc.insecure_channel(parts.netloc, compression=compression)
        self._export = self._channel.unary_unary(_METHOD)  # bytes in, bytes out
        self._metadata = tuple((key.lower(), value) for key, value in environment.headers.items())
        self._failure = grpc.RpcError

    def send(self, data: bytes, timeout: float) -> Answer:
        try:
            self._export(data, timeout=timeout, metadata=self._metadata)
        except self._failure as error:
            status = error.code().name
            return Answer(f"gRPC status {status}: {error.details()}", status in _GRPC_AGAIN)
        return Answer()

    def close(self) -> None:
        self._channel.close()


class Delivery:
    """One request at a time, tried again where that may help. deliver() and close() may be called
    from two threads."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._closed = threading.Event()
        self._failing = False

    def deliver(self, data: bytes) -> bool:
        """False: it is lost, which is logged where the one before was not."""
        trouble = self._trouble(data)
        if trouble and not self._failing:
            _log.warning("trace_export_failed", error=trouble)
        self._failing = bool(trouble)
        return not trouble

    def close(self) -> None:
        """Ends a pause between two tries; what is delivered from now on is lost."""
        self._closed.set()
        self._transport.close()

    def _trouble(self, data: bytes) -> str:
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        trouble, pause = "tracing ended before it was sent", _FIRST_PAUSE_SECONDS
        for _ in range(_MAX_TRIES):
            if self._closed.is_set():
                return trouble
            answer = self._transport.send(data, max(0.01, deadline - time.monotonic()))
            trouble = answer.trouble
            if not answer.again:
                return trouble
            wait = answer.pause
            if wait is None:
                wait = pause * random.uniform(1 - _JITTER, 1 + _JITTER)
            pause *= 2
            if time.monotonic() + wait > deadline:
                return trouble
            self._closed.wait(wait)
        return trouble


def open_delivery(url: str, protocol: Protocols) -> Delivery:
    environment = Environment.read(os.environ)
    make = GrpcTransport if protocol == "grpc" else HttpTransport
    return Delivery(make(url, environment))


def _proxy_of(url: str) -> str | None:
    """What HTTP_PROXY, HTTPS_PROXY and NO_PROXY say of it."""
    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme)
    return proxy if proxy and not proxy_bypass(parts.hostname or "") else None


def _deflate(data: bytes) -> bytes:
    return zlib.compress(data, 1)


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, 1)


_PACKERS: Final[Mapping[Compression, Callable[[bytes], bytes]]] = {
    "none": lambda data: data,
    "gzip": _gzip,
    "deflate": _deflate,
}


def _content(path: str | None) -> bytes | None:
    if path is None:
        return None
    with open(path, "rb") as file:
        return file.read()


def _pause(retry_after: str | None) -> float | None:
    """Seconds that a Retry-After header asks for, by number or date; None: it says nothing."""
    if retry_after is None:
        return None
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return None

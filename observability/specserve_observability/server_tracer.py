"""Spans of HTTP requests: the roots under which the engine's request spans hang.

The handler only notes times and ids; the span is built by the drain thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

import msgspec
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import (
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from . import names
from .context import child_context, format_traceparent, root_context
from .metrics import Metrics
from .recorder import BoundedQueue
from .spans import UNSET, Attributes, SpanFactory

_PROPAGATOR = TraceContextTextMapPropagator()
_MAX_CHILDREN = 64


class ChildRecord(msgspec.Struct, frozen=True, array_like=True):
    name: str
    start: float
    end: float
    attributes: Attributes


class HttpRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One HTTP request that ended; times in seconds since the epoch."""

    context: SpanContext
    parent: SpanContext | None
    method: str
    route: str
    start: float
    end: float
    status: int
    attributes: Attributes
    children: tuple[ChildRecord, ...]


class ServerTracer:
    """Makes a ServerSpan per HTTP request. Exists only where tracing is on."""

    def __init__(self, metrics: Metrics, capacity: int = 8192) -> None:
        self._metrics = metrics
        self.ended: BoundedQueue[HttpRecord] = BoundedQueue(capacity)

    def start(self, *, method: str, route: str, headers: Mapping[str, str]) -> ServerSpan:
        """Begin the span now. headers: lower-case or case-insensitive; a valid `traceparent` in
        them becomes the parent, and its sampled flag is obeyed."""
        parent = get_current_span(_PROPAGATOR.extract(dict(_trace_headers(headers))))
        incoming = parent.get_span_context()
        return ServerSpan(
            self,
            incoming if incoming.is_valid else None,
            method,
            route,
            _request_attributes(method, route, headers),
        )

    def put(self, record: HttpRecord) -> None:
        if not self.ended.put(record):
            self._metrics.num_records_dropped += 1


class ServerSpan:
    """The span of one HTTP request, from the first byte read to the end of its stream."""

    def __init__(
        self,
        tracer: ServerTracer,
        parent: SpanContext | None,
        method: str,
        route: str,
        attributes: dict[str, AttributeValue],
    ) -> None:
        self._tracer = tracer
        self._parent = parent
        self._method = method
        self._route = route
        self._attributes = attributes
        self._start = time.time()
        self._children: list[ChildRecord] = []
        self._ended = False
        self._context = (
            root_context()
            if parent is None
            else child_context(parent, trace_state=parent.trace_state)
        )
        self.traceparent: str | None = format_traceparent(self._context)

    def child(self, name: str, start: float, end: float, attributes: Attributes) -> None:
        """A part of the request that has happened, such as `tokenize`; times in epoch seconds."""
        if len(self._children) < _MAX_CHILDREN:
            self._children.append(ChildRecord(name, start, end, attributes))

    def end(self, status: int, attributes: Attributes) -> None:
        """status: the HTTP status sent. The first call counts, a second does nothing."""
        if self._ended:
            return
        self._ended = True
        if not self._context.trace_flags.sampled:
            return
        record = HttpRecord(
            context=self._context,
            parent=self._parent,
            method=self._method,
            route=self._route,
            start=self._start,
            end=time.time(),
            status=status,
            attributes={**self._attributes, **attributes},
            children=tuple(self._children),
        )
        self._tracer.put(record)


def http_spans(record: HttpRecord, factory: SpanFactory) -> Iterator[ReadableSpan]:
    attributes: dict[str, AttributeValue] = dict(record.attributes)
    attributes[names.HTTP_RESPONSE_STATUS_CODE] = record.status
    status = UNSET
    if record.status >= 500:  # a 4xx is the client's error, not this server's
        attributes.setdefault(names.ERROR_TYPE, str(record.status))
        status = Status(StatusCode.ERROR)
    yield factory.span(
        f"{record.method} {record.route}",
        record.context,
        record.parent,
        record.start,
        record.end,
        attributes,
        kind=SpanKind.SERVER,
        status=status,
    )
    for child in record.children:
        yield factory.child(child.name, record.context, child.start, child.end, child.attributes)


def _trace_headers(headers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in ("traceparent", "tracestate"):
        value = headers.get(name)
        if value is not None:
            yield name, value


def _request_attributes(
    method: str, route: str, headers: Mapping[str, str]
) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        names.HTTP_REQUEST_METHOD: method,
        names.HTTP_ROUTE: route,
        names.URL_SCHEME: "http",
    }
    if "{" not in route:
        attributes[names.URL_PATH] = route
    user_agent = headers.get("user-agent")
    if user_agent is not None:
        attributes[names.USER_AGENT] = user_agent
    try:
        host = urlsplit(f"//{headers.get('host', '')}")
        if host.hostname:
            attributes[names.SERVER_ADDRESS] = host.hostname
        if host.port:
            attributes[names.SERVER_PORT] = host.port
    except ValueError:  # a Host header that is no address says nothing
        pass
    return attributes

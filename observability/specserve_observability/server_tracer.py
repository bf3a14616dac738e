"""Spans of HTTP requests: the roots under which the engine's request spans hang.

The handler only notes times and ids; whoever drains the records builds the spans.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from opentelemetry.trace import SpanContext, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from . import names
from .context import child_context, format_traceparent, root_context
from .metrics import Metrics
from .recorder import BoundedQueue
from .records import ChildRecord, HttpRecord, OperationRecord, Values
from .spans import Attributes

_PROPAGATOR = TraceContextTextMapPropagator()
_MAX_CHILDREN = 64


class ServerTracer:
    """Makes a ServerSpan per HTTP request. Exists only where tracing is on."""

    def __init__(self, metrics: Metrics, capacity: int = 8192) -> None:
        self._metrics = metrics
        self.ended: BoundedQueue[HttpRecord] = BoundedQueue(capacity)

    def start(
        self, *, method: str, route: str, headers: Mapping[str, str], scheme: str = "http"
    ) -> ServerSpan:
        """Begin the span now. headers: lower-case or case-insensitive; a valid `traceparent` in
        them becomes the parent, and its sampled flag is obeyed."""
        parent = get_current_span(_PROPAGATOR.extract(dict(_trace_headers(headers))))
        incoming = parent.get_span_context()
        return ServerSpan(
            self,
            incoming if incoming.is_valid else None,
            method,
            route,
            _request_attributes(method, route, scheme, headers),
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
        attributes: Values,
    ) -> None:
        self._tracer = tracer
        self._parent = parent
        self._method = method
        self._route = route
        self._attributes = attributes
        self._start = time.time()
        self._children: list[ChildRecord] = []
        self._operation: tuple[str, str, float] | None = None  # name, traceparent, start
        self._ended = False
        self._context = root_context() if parent is None else child_context(parent)

    @property
    def own_traceparent(self) -> str | None:
        return format_traceparent(self._context)

    @property
    def traceparent(self) -> str | None:
        """Of the span under which what is done now belongs: the operation's, once it has begun."""
        return self.own_traceparent if self._operation is None else self._operation[1]

    def begin_operation(self, name: str) -> None:
        """Once: what the model is asked for (`chat`) has a span of its own from here to the end."""
        context = child_context(self._context)
        self._operation = (name, format_traceparent(context), time.time())

    def child(self, name: str, start: float, end: float, attributes: Attributes) -> None:
        """A part of the request that has happened, such as `tokenize`; times in epoch seconds."""
        if len(self._children) < _MAX_CHILDREN:
            of_operation = self._operation is not None
            self._children.append(ChildRecord(name, start, end, dict(attributes), of_operation))

    def end(self, status: int, attributes: Attributes, operation: Attributes | None = None) -> None:
        """status: the HTTP status sent; operation: attributes of that span, if it has begun.
        The first call counts, a second does nothing."""
        if self._ended:
            return
        self._ended = True
        if not self._context.trace_flags.sampled:
            return
        parent = self._parent
        record = HttpRecord(
            context=format_traceparent(self._context),
            parent=None if parent is None else format_traceparent(parent),
            trace_state="" if parent is None else parent.trace_state.to_header(),
            method=self._method,
            route=self._route,
            start=self._start,
            end=time.time(),
            status=status,
            attributes={**self._attributes, **attributes},
            operation=self._operation and OperationRecord(*self._operation, dict(operation or {})),
            children=tuple(self._children),
        )
        self._tracer.put(record)


def _trace_headers(headers: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in ("traceparent", "tracestate"):
        value = headers.get(name)
        if value is not None:
            yield name, value


def _request_attributes(method: str, route: str, scheme: str, headers: Mapping[str, str]) -> Values:
    attributes: Values = {
        names.HTTP_REQUEST_METHOD: method,
        names.HTTP_ROUTE: route,
        names.URL_SCHEME: scheme,
    }
    if "{" not in route:
        attributes[names.URL_PATH] = route
    user_agent = headers.get("user-agent")
    if user_agent is not None:
        attributes[names.USER_AGENT] = _as_text(user_agent)
    try:
        host = urlsplit(f"//{headers.get('host', '')}")
        if host.hostname:
            attributes[names.SERVER_ADDRESS] = _as_text(host.hostname)
        if host.port:
            attributes[names.SERVER_PORT] = host.port
    except ValueError:  # a Host header that is no address says nothing
        pass
    return attributes


def _as_text(header: str) -> str:
    """Bytes of a header that are no UTF-8 stand in it as lone surrogates, which nothing encodes."""
    return header.encode(errors="replace").decode()

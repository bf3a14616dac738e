"""An HttpRecord -> the server's span, its operation's, and those of its parts."""

from __future__ import annotations

from collections.abc import Iterator

from opentelemetry.trace import SpanContext, TraceState
from opentelemetry.util.types import AttributeValue

from . import names
from .context import parse_traceparent
from .records import HttpRecord, OperationRecord
from .spans import SERVER, Span, SpanFactory


def http_spans(record: HttpRecord, factory: SpanFactory) -> Iterator[Span]:
    server = _context(record.context, record.trace_state)
    parent = _context(record.parent, record.trace_state, is_remote=True) if record.parent else None
    attributes: dict[str, AttributeValue] = dict(record.attributes)
    attributes[names.HTTP_RESPONSE_STATUS_CODE] = record.status
    failed = record.status >= 500  # a 4xx is the client's error, not this server's
    if failed:
        attributes.setdefault(names.ERROR_TYPE, str(record.status))
    error = "" if failed else None
    yield factory.span(
        f"{record.method} {record.route}",
        server,
        parent,
        record.start,
        record.end,
        attributes,
        kind=SERVER,
        error=error,
    )
    operation = server
    if record.operation is not None:
        operation = _context(record.operation.context, record.trace_state)
        yield _operation(record.operation, operation, server, record.end, factory, error)
    for child in record.children:
        above = operation if child.of_operation else server
        yield factory.child(child.name, above, child.start, child.end, child.attributes)


def _operation(
    record: OperationRecord,
    context: SpanContext,
    parent: SpanContext,
    end: float,
    factory: SpanFactory,
    error: str | None,
) -> Span:
    model = record.attributes.get(names.GEN_AI_REQUEST_MODEL)
    attributes = {**record.attributes, names.GEN_AI_OPERATION_NAME: record.name}
    name = f"{record.name} {model}" if model else record.name
    return factory.span(name, context, parent, record.start, end, attributes, error=error)


def _context(traceparent: str, trace_state: str, *, is_remote: bool = False) -> SpanContext:
    """Raises ValueError where a record names no context."""
    context = parse_traceparent(traceparent)
    if context is None:
        raise ValueError(f"{traceparent!r} is no traceparent")
    state = TraceState.from_header([trace_state]) if trace_state else None
    return SpanContext(context.trace_id, context.span_id, is_remote, context.trace_flags, state)

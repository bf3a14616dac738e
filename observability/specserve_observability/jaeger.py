"""OTLP spans as Jaeger's JSON: what its UI opens by upload, and what its query API answers with.

The UI reads `{"data": [{traceID, spans, processes}]}` from a plain file; OTLP JSON it can only
send to a backend for conversion. Parents become CHILD_OF references and links FOLLOWS_FROM, events
become logs, scope, kind and status become tags, in Jaeger's order. Times are microseconds since
the epoch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from .otlp_reading import (
    ERROR_CODE,
    KIND_NAMES,
    SERVICE_NAME,
    KeyValue,
    OtlpEvent,
    OtlpResource,
    OtlpScope,
    OtlpSpan,
    ReadSpan,
    TraceFileError,
    read_lines,
)
from .trace_files import rotated_files

Json = dict[str, object]

_OK_CODE = 1
_MAX_SAFE_INTEGER = 2**53 - 1  # beyond it JavaScript rounds, so Jaeger writes text


class JaegerTrace:
    """One Jaeger trace under construction: its spans, and a process per resource."""

    def __init__(self, trace_id: str) -> None:
        self.trace_id = trace_id
        self.spans: list[Json] = []
        self.processes: dict[str, Json] = {}
        self._process_ids: dict[bytes, str] = {}

    def add(self, read: ReadSpan) -> None:
        self.spans.append(_span(read.span, read.scope, self._process_id(read)))

    def json(self) -> Json:
        return {
            "traceID": self.trace_id,
            "spans": self.spans,
            "processes": self.processes,
            "warnings": None,
        }

    def _process_id(self, read: ReadSpan) -> str:
        known = self._process_ids.get(read.raw_resource)
        if known is not None:
            return known
        process_id = f"p{len(self.processes) + 1}"
        self._process_ids[read.raw_resource] = process_id
        self.processes[process_id] = _process(read.resource)
        return process_id


def jaeger_traces(spans: Iterable[ReadSpan]) -> list[Json]:
    """Traces in order of first appearance."""
    traces: dict[str, JaegerTrace] = {}
    for read in spans:
        trace_id = read.span.trace_id
        trace = traces.get(trace_id)
        if trace is None:
            trace = traces[trace_id] = JaegerTrace(trace_id)
        trace.add(read)
    return [trace.json() for trace in traces.values()]


def export_jaeger(lines: Iterable[str | bytes]) -> Json:
    """Jaeger UI JSON of every span in the lines.

    Blank lines are skipped. Raises TraceFileError, naming the line, for anything else that is not
    an OTLP trace object.
    """
    return {"data": jaeger_traces(read_lines(lines))}


def _spans_of(path: Path) -> Iterator[ReadSpan]:
    """With what was rotated away. Raises TraceFileError, naming part and line."""
    for part in rotated_files(path):
        with part.open("rb") as lines:
            try:
                yield from read_lines(lines)
            except TraceFileError as error:
                raise TraceFileError(f"{part}: {error}") from error


def export_main(argv: Sequence[str]) -> int:
    """`specserve trace export FILE --format jaeger-json -o OUT`, without its first two words.

    Returns the process's exit status: 0, or 1 where a file cannot be read, written or understood.
    """
    parser = argparse.ArgumentParser(
        prog="specserve trace export",
        description="Turn a --trace-file into what Jaeger's UI opens by upload.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="written by --trace-file")
    parser.add_argument("--format", choices=["jaeger-json"], default="jaeger-json")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT")
    args = parser.parse_args(argv)
    try:
        exported = {"data": jaeger_traces(_spans_of(args.file))}
        args.output.write_bytes(msgspec.json.encode(exported))
    except (TraceFileError, OSError) as error:
        print(f"specserve trace export: {error}", file=sys.stderr)
        return 1
    return 0


def _process(resource: OtlpResource) -> Json:
    rest = [pair for pair in resource.attributes if pair.key != SERVICE_NAME]
    return {"serviceName": resource.service, "tags": _tags(rest)}


def _span(span: OtlpSpan, scope: OtlpScope, process_id: str) -> Json:
    return {
        "traceID": span.trace_id,
        "spanID": span.span_id,
        "operationName": span.name,
        "references": _references(span),
        "startTime": span.start_ns // 1000,
        "duration": max(0, span.end_ns - span.start_ns) // 1000,
        "tags": [*_scope_tags(scope), *_tags(span.attributes), *_derived_tags(span)],
        "logs": [_log(event) for event in span.events],
        "processID": process_id,
        "warnings": None,
    }


def _references(span: OtlpSpan) -> list[Json]:
    """The parent first: a viewer takes the first reference inside the trace for the parent."""
    references: list[Json] = []
    if span.parent_span_id:
        references.append(_reference("CHILD_OF", span.trace_id, span.parent_span_id))
    references += [_reference("FOLLOWS_FROM", link.trace_id, link.span_id) for link in span.links]
    return references


def _reference(ref_type: str, trace_id: str, span_id: str) -> Json:
    return {"refType": ref_type, "traceID": trace_id, "spanID": span_id}


def _scope_tags(scope: OtlpScope) -> list[Json]:
    pairs = (("otel.scope.name", scope.name), ("otel.scope.version", scope.version))
    return [_tag(key, value) for key, value in pairs if value]


def _derived_tags(span: OtlpSpan) -> list[Json]:
    tags: list[Json] = []
    if span.kind in KIND_NAMES:
        tags.append(_tag("span.kind", KIND_NAMES[span.kind]))
    if span.status.code == _OK_CODE:
        tags.append(_tag("otel.status_code", "OK"))
    if span.status.code == ERROR_CODE:
        tags.append(_tag("otel.status_code", "ERROR"))
        tags.append(_tag("error", True))
    if span.status.message:
        tags.append(_tag("otel.status_description", span.status.message))
    if span.trace_state:
        tags.append(_tag("w3c.tracestate", span.trace_state))
    return tags


def _log(event: OtlpEvent) -> Json:
    name = [_tag("event", event.name)] if event.name else []
    return {
        "timestamp": int(event.time_unix_nano) // 1000,
        "fields": [*name, *_tags(event.attributes)],
    }


def _tags(pairs: Sequence[KeyValue]) -> list[Json]:
    return [_tag(pair.key, pair.value.plain()) for pair in pairs]


def _tag(key: str, value: object) -> Json:
    """Arrays and maps become JSON text, as Jaeger's own translation does."""
    match value:
        case bool():
            return {"key": key, "type": "bool", "value": value}
        case int():
            safe = abs(value) <= _MAX_SAFE_INTEGER
            return {"key": key, "type": "int64", "value": value if safe else str(value)}
        case float():
            return {"key": key, "type": "float64", "value": value}
        case str():
            return {"key": key, "type": "string", "value": value}
        case _:
            return {"key": key, "type": "string", "value": msgspec.json.encode(value).decode()}

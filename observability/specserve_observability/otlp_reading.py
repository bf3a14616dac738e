"""Lines of OTLP JSON, as `--trace-file` and collectors write them, read and checked.

Reading is strict about types and quiet about fields it does not know. Spans are kept as the bytes
they came in: an API that answers with OTLP hands them on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated

import msgspec

ERROR_CODE = 2  # of a span's status
KIND_NAMES = {1: "internal", 2: "server", 3: "client", 4: "producer", 5: "consumer"}
SERVICE_NAME = "service.name"
NO_SERVICE = "OTLPResourceNoServiceName"  # what Jaeger calls a resource that has no name


class TraceFileError(ValueError):
    """A file or a line that is not OTLP JSON; the message names it."""


# Checked where a line is read: nobody who asks for a number later expects an error.
Integer = (
    Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    | Annotated[str, msgspec.Meta(pattern=r"\A-?[0-9]{1,19}\Z")]
)


class AnyValue(msgspec.Struct, rename="camel", omit_defaults=True):
    string_value: str | None = None
    bool_value: bool | None = None
    int_value: Integer | None = None
    double_value: float | None = None
    array_value: ArrayValue | None = None
    kvlist_value: KeyValueList | None = None
    bytes_value: str | None = None  # base64

    def plain(self) -> object:
        if self.array_value is not None:
            return [value.plain() for value in self.array_value.values]
        if self.kvlist_value is not None:
            return {pair.key: pair.value.plain() for pair in self.kvlist_value.values}
        if self.int_value is not None:
            return int(self.int_value)
        for value in (self.string_value, self.bool_value, self.double_value, self.bytes_value):
            if value is not None:
                return value
        return ""


class ArrayValue(msgspec.Struct):
    values: list[AnyValue] = []


class KeyValue(msgspec.Struct):
    key: str
    value: AnyValue = msgspec.field(default_factory=AnyValue)


class KeyValueList(msgspec.Struct):
    values: list[KeyValue] = []


class OtlpEvent(msgspec.Struct, rename="camel"):
    time_unix_nano: Integer = 0
    name: str = ""
    attributes: list[KeyValue] = []


class OtlpLink(msgspec.Struct, rename="camel"):
    trace_id: str
    span_id: str


class OtlpStatus(msgspec.Struct):
    code: int = 0
    message: str = ""


class OtlpSpan(msgspec.Struct, rename="camel"):
    trace_id: str
    span_id: str
    name: str
    start_time_unix_nano: Integer
    end_time_unix_nano: Integer
    parent_span_id: str = ""
    trace_state: str = ""
    kind: int = 0
    attributes: list[KeyValue] = []
    events: list[OtlpEvent] = []
    links: list[OtlpLink] = []
    status: OtlpStatus = msgspec.field(default_factory=OtlpStatus)

    @property
    def start_ns(self) -> int:
        return int(self.start_time_unix_nano)

    @property
    def end_ns(self) -> int:
        return int(self.end_time_unix_nano)

    @property
    def is_error(self) -> bool:
        return self.status.code == ERROR_CODE


class OtlpScope(msgspec.Struct):
    name: str = ""
    version: str = ""
    attributes: list[KeyValue] = []


class OtlpResource(msgspec.Struct):
    attributes: list[KeyValue] = []

    @property
    def service(self) -> str:
        for pair in self.attributes:
            if pair.key == SERVICE_NAME:
                return str(pair.value.plain()) or NO_SERVICE
        return NO_SERVICE


class RawScopeSpans(msgspec.Struct):
    spans: list[msgspec.Raw] = []
    scope: msgspec.Raw = msgspec.Raw(b"{}")


class RawResourceSpans(msgspec.Struct, rename="camel"):
    scope_spans: list[RawScopeSpans] = []
    resource: msgspec.Raw = msgspec.Raw(b"{}")


class TraceLine(msgspec.Struct, rename="camel"):
    resource_spans: list[RawResourceSpans]


class ReadSpan(msgspec.Struct):
    """One span with what stands around it, and the bytes it came in."""

    span: OtlpSpan
    scope: OtlpScope
    resource: OtlpResource
    raw: bytes
    raw_scope: bytes
    raw_resource: bytes


_HEX = re.compile("[0-9a-fA-F]+")
_NO_PARENT = "0" * 16
_BARE_INTEGER = re.compile(
    rb'("(?:startTimeUnixNano|endTimeUnixNano|timeUnixNano|intValue)"\s*:\s*)(-?\d+)'
)
_decode_line = msgspec.json.Decoder(TraceLine).decode
_decode_resource = msgspec.json.Decoder(OtlpResource).decode
_decode_scope = msgspec.json.Decoder(OtlpScope).decode
_decode_span = msgspec.json.Decoder(OtlpSpan).decode


def plain(pairs: Sequence[KeyValue]) -> dict[str, object]:
    return {pair.key: pair.value.plain() for pair in pairs}


def read_spans(line: bytes | str) -> list[ReadSpan]:
    """Every span of one OTLP JSON object. Raises TraceFileError where it is not one."""
    try:
        return [read for group in _decode_line(line).resource_spans for read in _in_group(group)]
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise TraceFileError(f"not OTLP JSON ({error})") from error


def read_lines(lines: Iterable[bytes | str]) -> Iterator[ReadSpan]:
    """Blank lines are skipped. Raises TraceFileError, naming the line, for anything else."""
    for line_num, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            spans = read_spans(line)
        except TraceFileError as error:
            raise TraceFileError(
                f"line {line_num} is {error}: "
                "remove the line, or give the file of a run that ended cleanly"
            ) from error
        yield from spans


def _in_group(group: RawResourceSpans) -> Iterator[ReadSpan]:
    raw_resource = _canonical(group.resource)
    resource = _decode_resource(raw_resource)
    for scope_spans in group.scope_spans:
        raw_scope = _canonical(scope_spans.scope)
        scope = _decode_scope(raw_scope)
        for raw in scope_spans.spans:
            span = decode_span(raw)
            yield ReadSpan(span, scope, resource, _canonical(raw), raw_scope, raw_resource)


def _canonical(raw: msgspec.Raw) -> bytes:
    """64-bit integers as text, as OTLP JSON wants them and JavaScript needs them.

    A copy: a Raw keeps the whole line it was cut from alive.
    """
    return _BARE_INTEGER.sub(rb'\1"\2"', bytes(raw))


def decode_span(raw: bytes | msgspec.Raw) -> OtlpSpan:
    """Checked, ids in lower case. Raises msgspec.MsgspecError or ValueError."""
    span = _decode_span(raw)
    span.trace_id = _hex_id("traceId", span.trace_id, 32)
    span.span_id = _hex_id("spanId", span.span_id, 16)
    if span.parent_span_id:
        parent = _hex_id("parentSpanId", span.parent_span_id, 16)
        span.parent_span_id = "" if parent == _NO_PARENT else parent
    if span.start_ns < 0 or span.end_ns < 0:
        raise ValueError(f"span {span.span_id} has a negative time")
    return span


def _hex_id(name: str, text: str, length: int) -> str:
    if len(text) != length or not _HEX.fullmatch(text):
        raise ValueError(f"{name} is {text[:40]!r}, not {length} hex digits")
    return text.lower()

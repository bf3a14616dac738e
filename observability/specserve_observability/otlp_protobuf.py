"""Spans as OTLP in protobuf's wire format, written by hand.

The SDK's encoder makes a message object per value: a step of 16 rows has some 150 attributes, and
took it 1 ms of the CPU that the step itself needs. Most attributes say what others said before, so
here each pair of key and value is encoded once and then looked up. tests/test_trace_protobuf.py
compares the bytes with what protobuf's own encoder writes.

Field numbers are those of opentelemetry/proto/trace/v1/trace.proto and common/v1/common.proto.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from struct import Struct
from typing import TypeVar

from opentelemetry.trace import SpanContext
from opentelemetry.util.types import AnyValue

from .spans import Attributes, Event, Origin, SharedAttributes, Span, link_flags

_MAX_CACHED = 8192  # pairs of key and value; then the cache begins anew
_LONGEST_CACHED = 128  # bytes; texts of requests would fill it with what never comes again
_CACHED_TYPES = frozenset((int, str))  # of which no two are equal: 1 == 1.0 == True

K = TypeVar("K")

_double = Struct("<d").pack
_fixed32 = Struct("<I").pack
_times = Struct("<BQBQ").pack  # start_time_unix_nano = 7 and end_time_unix_nano = 8, fixed64
_event_time = Struct("<BQ").pack  # time_unix_nano = 1


def _varint(number: int) -> bytes:
    """number >= 0"""
    if number < 0x80:
        return number.to_bytes(1)
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


_LENGTHS = [_varint(number) for number in range(4096)]


def _sized(body: bytes) -> bytes:
    """As the value of a length-delimited field: its length, then itself."""
    size = len(body)
    return (_LENGTHS[size] if size < 4096 else _varint(size)) + body


def _text(tag: bytes, text: str) -> bytes:
    return tag + _sized(text.encode()) if text else b""


class _Cache(dict[K, bytes]):
    """Of what `encode` makes of a key; bounded."""

    def __init__(self, encode: Callable[[K], bytes]) -> None:
        self._encode = encode

    def __missing__(self, key: K) -> bytes:
        data = self._encode(key)
        if len(data) <= _LONGEST_CACHED:
            if len(self) >= _MAX_CACHED:
                self.clear()
            self[key] = data
        return data


def _link_of(ids: tuple[int, int, int]) -> bytes:
    trace_id, span_id, flags = ids
    body = b"\x0a\x10" + trace_id.to_bytes(16) + b"\x12\x08" + span_id.to_bytes(8)
    return b"\x6a" + _sized(body + b"\x35" + _fixed32(flags))


def _float_head_of(key: str) -> bytes:
    """All of a key and a float but the float: which is 8 bytes, always."""
    body = _text(b"\x0a", key) + b"\x12\x09\x21"
    return _sized(body + bytes(8))[:-8]


_pairs: _Cache[tuple[str, AnyValue]] = _Cache(lambda pair: _key_value(pair))
_items: _Cache[AnyValue] = _Cache(lambda item: _item(item))
_float_heads: _Cache[str] = _Cache(_float_head_of)
_names: _Cache[tuple[str, int]] = _Cache(
    lambda pair: _text(b"\x2a", pair[0]) + b"\x30" + _varint(pair[1])
)
_event_names: _Cache[str] = _Cache(lambda name: _text(b"\x12", name))
_link_cache: _Cache[tuple[int, int, int]] = _Cache(_link_of)


def encode_request(origin: Origin, spans: Iterable[bytes]) -> bytes:
    """A part of an ExportTraceServiceRequest; the parts of several origins, one behind the other,
    are one request.

    spans: as encode_span() makes them
    """
    resource = _attributes(b"\x0a", origin.resource)
    scope = _text(b"\x0a", origin.scope) + _text(b"\x12", origin.version)
    body = b"\x12".join([b"\x0a" + _sized(scope), *spans])
    return b"\x0a" + _sized(b"\x0a" + _sized(resource) + b"\x12" + _sized(body))


def encode_span(span: Span) -> bytes:
    """Its length and itself. Raises UnicodeEncodeError where a text holds lone surrogates."""
    context, parent = span.context, span.parent
    return _sized(
        b"".join(
            (
                b"\x0a\x10",
                context.trace_id.to_bytes(16),
                b"\x12\x08",
                context.span_id.to_bytes(8),
                _text(b"\x1a", context.trace_state.to_header()) if context.trace_state else b"",
                b"" if parent is None else b"\x22\x08" + parent.span_id.to_bytes(8),
                _names[span.name, span.kind],
                _times(0x39, span.start_ns, 0x41, span.end_ns),
                _attributes(b"\x4a", span.attributes) if span.attributes else b"",
                _events(span.events) if span.events else b"",
                _links(span.links) if span.links else b"",
                b"\x7a\x00" if span.error is None else b"\x7a" + _sized(_status(span.error)),
                b"\x85\x01",
                _fixed32(span.flags),
            )
        )
    )


def _events(events: Sequence[Event]) -> bytes:
    return b"".join(
        [
            b"\x5a"
            + _sized(
                _event_time(0x09, event.time_ns)
                + _event_names[event.name]
                + _event_attributes(event.attributes)
            )
            for event in events
        ]
    )


def _event_attributes(attributes: Attributes) -> bytes:
    if type(attributes) is not SharedAttributes:
        return _attributes(b"\x1a", attributes)
    if not attributes.encoded:
        attributes.encoded = _attributes(b"\x1a", attributes)
    return attributes.encoded


def _links(links: Sequence[SpanContext]) -> bytes:
    return b"".join([_link_cache[link.trace_id, link.span_id, link_flags(link)] for link in links])


def _status(error: str) -> bytes:
    return _text(b"\x12", error) + b"\x18\x02"


def _attributes(tag: bytes, attributes: Attributes) -> bytes:
    if not attributes:
        return b""
    return tag + tag.join(
        [
            _pairs[pair]
            if (kind := type(pair[1])) in _CACHED_TYPES
            else _float_heads[pair[0]] + _double(pair[1])
            if kind is float
            else _key_value(pair)
            for pair in attributes.items()
        ]
    )


def _key_value(pair: tuple[str, AnyValue]) -> bytes:
    key, value = pair
    return _sized(_text(b"\x0a", key) + b"\x12" + _sized(_value(value)))


def _item(value: AnyValue) -> bytes:
    """Of an array."""
    return b"\x0a" + _sized(_value(value))


def _value(value: AnyValue) -> bytes:
    match value:
        case bool():
            return b"\x10\x01" if value else b"\x10\x00"
        case int():
            return b"\x18" + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)
        case float():
            return b"\x21" + _double(value)
        case str():
            return b"\x0a" + _sized(value.encode())
        case Mapping():
            return b"\x32" + _sized(_attributes(b"\x0a", value))
        case Sequence():
            return b"\x2a" + _sized(
                b"".join(
                    [_items[item] if type(item) in _CACHED_TYPES else _item(item) for item in value]
                )
            )
        case _:
            return b""

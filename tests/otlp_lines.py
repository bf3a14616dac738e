"""Lines of a trace file written by hand, where a test needs spans that no engine would write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

SECOND = 10**9
BEGIN = 1_800_000_000 * SECOND  # nanoseconds since the epoch

Json = dict[str, object]


def a_span(
    number: int,
    name: str = "work",
    *,
    trace: int = 1,
    parent: int = 0,
    start: float = 0.0,
    seconds: float = 1.0,
    kind: int = 1,
    error: str = "",
    links: Sequence[tuple[int, int]] = (),
    **attributes: object,
) -> Json:
    """links: (trace, number). In the names of attributes `__` stands for a dot."""
    span: Json = {
        "traceId": f"{trace:032x}",
        "spanId": f"{number:016x}",
        "name": name,
        "kind": kind,
        "startTimeUnixNano": str(BEGIN + int(start * SECOND)),
        "endTimeUnixNano": str(BEGIN + int((start + seconds) * SECOND)),
        "attributes": pairs({key.replace("__", "."): v for key, v in attributes.items()}),
        "links": [{"traceId": f"{t:032x}", "spanId": f"{s:016x}"} for t, s in links],
        "status": {"code": 2, "message": error} if error else {},
    }
    if parent:
        span["parentSpanId"] = f"{parent:016x}"
    return span


def a_line(*spans: Json, service: str = "specserve", **resource: object) -> bytes:
    """One line of a trace file, its end included."""
    about = {"service.name": service, **resource}
    group = {
        "resource": {"attributes": pairs(about)},
        "scopeSpans": [{"scope": {"name": "specserve", "version": "1.2.3"}, "spans": spans}],
    }
    return json.dumps({"resourceSpans": [group]}).encode() + b"\n"


def overlapping_spans() -> list[Json]:
    """Of one request, whose phases overlap and leave gaps."""
    return [
        a_span(1, "POST /v1/x", seconds=10),
        a_span(2, "chat demo", parent=1, start=0.5, seconds=9),
        a_span(3, "queue", parent=2, start=0.5, seconds=0.5),
        a_span(4, "prefill", parent=2, start=1, seconds=1),
        a_span(5, "decode", parent=2, start=2, seconds=4),
        a_span(6, "decode.rounds", parent=5, start=2, seconds=3),
        a_span(7, "decode", parent=2, start=2, seconds=3),  # the second of n = 2
        a_span(8, "stream", parent=2, start=2, seconds=7),
    ]


def odd_lines() -> list[bytes]:
    """Each is JSON, and has something that no reader of spans can use."""
    span = a_span(99, trace=99)
    values = [{"intValue": "abc"}, {"intValue": "9" * 5000}, {"intValue": 2**64 - 1}]
    shallow = b'{"stringValue": "deep"}'
    deep = b'{"arrayValue": {"values": [' * 400 + shallow + b"]}}" * 400
    return [
        *(a_line({**span, "attributes": [{"key": "k", "value": value}]}) for value in values),
        a_line({**span, "events": [{"timeUnixNano": "noon"}]}),
        a_line({**span, "startTimeUnixNano": "1_0"}),
        a_line(a_span(99, k="deep")).replace(shallow, deep),
    ]


def pairs(attributes: Mapping[str, object]) -> list[Json]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: object) -> Json:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case list():
            return {"arrayValue": {"values": [_value(item) for item in value]}}
        case _:
            return {"stringValue": str(value)}

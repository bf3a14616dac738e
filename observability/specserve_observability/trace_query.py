"""What is searched for among traces, in Jaeger's words, and which spans meet it.

Two spellings: API v3's (`query.serviceName`, RFC 3339 times, snake_case as well) and the older
one's (`service`, microseconds). Durations are Go's: `1.5ms`, `2s`, `1m30s`. A time that is not
given does not bound: a file may be older than the two days to which Jaeger defaults.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from .otlp_reading import ERROR_CODE, KIND_NAMES, ReadSpan, plain

MAX_TRACES_FOUND = 1500
_DEFAULT_LIMIT = 100
_UNIT_NS = {"ns": 1, "us": 10**3, "µs": 10**3, "μs": 10**3, "ms": 10**6, "s": 10**9}
_UNIT_NS |= {"m": 60 * 10**9, "h": 3600 * 10**9}
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
_DURATION = re.compile(rf"\+?(?:{_DURATION_PART.pattern})+")
_STATUS_CODES = {"OK": 1, "ERROR": ERROR_CODE}
_PLAIN = re.compile(r"[\w.-]+", re.ASCII)  # what no JSON encoder escapes
_SPECIAL_KEYS = ("error", "span.status", "span.kind", "scope.name", "scope.version")
_FRACTION = re.compile(r"\.(\d+)")


class QueryError(ValueError):
    """A parameter that cannot be read; the message names it and its value."""


class TraceQuery(msgspec.Struct, frozen=True):
    """Empty, zero and None: anything."""

    service: str = ""
    operation: str = ""
    attributes: Mapping[str, str] = {}
    start_min_ns: int | None = None
    start_max_ns: int | None = None
    duration_min_ns: int = 0
    duration_max_ns: int = 0
    limit: int = _DEFAULT_LIMIT


def query_of_v3(parameters: Mapping[str, str]) -> TraceQuery:
    """Of `/api/v3/traces` and `/api/v3/trace-summaries`. Raises QueryError."""

    def named(camel: str) -> tuple[str, str]:
        snake = re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", camel)
        for name in (f"query.{camel}", f"query.{snake}"):
            if parameters.get(name):
                return name, parameters[name]
        return f"query.{camel}", ""

    if parameters.get("query.filter"):
        raise QueryError("query.filter is not supported here: use query.attributes")
    depth = named("searchDepth")
    return _checked(
        TraceQuery(
            service=named("serviceName")[1],
            operation=named("operationName")[1],
            attributes=_attributes(*named("attributes")),
            start_min_ns=_rfc3339_ns(*named("startTimeMin")),
            start_max_ns=_rfc3339_ns(*named("startTimeMax")),
            duration_min_ns=duration_ns(*named("durationMin")),
            duration_max_ns=duration_ns(*named("durationMax")),
            limit=_limit(*(depth if depth[1] else named("numTraces"))),
        )
    )


def query_of_legacy(parameters: Mapping[str, str], tags: Sequence[str]) -> TraceQuery:
    """Of `/api/traces`. tags: each `tag=key:value` parameter. Raises QueryError."""
    attributes = dict(_attributes("tags", parameters.get("tags", "")))
    for tag in tags:
        key, colon, value = tag.partition(":")
        if not colon:
            raise QueryError(f"malformed 'tag' parameter, expecting key:value, received: {tag}")
        attributes[key] = value
    return _checked(
        TraceQuery(
            service=parameters.get("service", ""),
            operation=parameters.get("operation", ""),
            attributes=attributes,
            start_min_ns=_microseconds("start", parameters.get("start", "")),
            start_max_ns=_microseconds("end", parameters.get("end", "")),
            duration_min_ns=duration_ns("minDuration", parameters.get("minDuration", "")),
            duration_max_ns=duration_ns("maxDuration", parameters.get("maxDuration", "")),
            limit=_limit("limit", parameters.get("limit", "")),
        )
    )


def span_test(query: TraceQuery) -> Callable[[ReadSpan], bool]:
    """Whether a span meets every condition."""

    def meets(read: ReadSpan) -> bool:
        span = read.span
        if query.service and read.resource.service != query.service:
            return False
        if query.operation and span.name != query.operation:
            return False
        if query.start_min_ns is not None and span.start_ns < query.start_min_ns:
            return False
        if query.start_max_ns is not None and span.start_ns > query.start_max_ns:
            return False
        duration = span.end_ns - span.start_ns
        if duration < query.duration_min_ns or 0 < query.duration_max_ns < duration:
            return False
        return all(_has(read, key, value) for key, value in query.attributes.items())

    return meets


def may_hold(query: TraceQuery, around: bytes) -> Callable[[bytes], bool]:
    """Whether a span's bytes can hold what is asked for: far cheaper than decoding them.

    around: the bytes of its resource and scope, which may hold an attribute instead
    """
    texts = [query.operation, *(key for key in query.attributes if not _is_about_span(key))]
    needed = [text.encode() for text in texts if _PLAIN.fullmatch(text)]
    needed = [text for text in needed if text not in around]
    return (lambda raw: all(text in raw for text in needed)) if needed else bool


def _is_about_span(key: str) -> bool:
    return key in _SPECIAL_KEYS or key.startswith("resource.")


def is_true(text: str) -> bool:
    return text.lower() in ("true", "1", "t")


def duration_ns(name: str, text: str) -> int:
    if text in ("", "0"):
        return 0
    if not _DURATION.fullmatch(text):
        raise QueryError(f"malformed parameter {name}: {text!r} is not a duration such as 1.5ms")
    return sum(int(float(n) * _UNIT_NS[unit]) for n, unit in _DURATION_PART.findall(text))


def _checked(query: TraceQuery) -> TraceQuery:
    low, high = query.start_min_ns, query.start_max_ns
    if low is not None and high is not None and low >= high:
        raise QueryError("query.startTimeMin must be before query.startTimeMax")
    if 0 < query.duration_max_ns < query.duration_min_ns:
        raise QueryError("'maxDuration' should be greater than 'minDuration'")
    return query


def _attributes(name: str, text: str) -> Mapping[str, str]:
    try:
        return msgspec.json.decode(text, type=dict[str, str]) if text else {}
    except msgspec.MsgspecError as error:
        raise QueryError(f"malformed parameter {name}: {error}: give {{'key': 'text'}}") from error


def _rfc3339_ns(name: str, text: str) -> int | None:
    if not text:
        return None
    fraction = _FRACTION.search(text)
    nanoseconds = int(fraction[1][:9].ljust(9, "0")) if fraction else 0
    try:
        # A client that does not encode its parameters sends a zone's "+" as a blank.
        moment = datetime.fromisoformat(_FRACTION.sub("", text.replace(" ", "+"), count=1))
    except ValueError as error:
        raise QueryError(f"malformed parameter {name}: {error}") from error
    if moment.tzinfo is None:
        raise QueryError(f"malformed parameter {name}: {text!r} has no time zone")
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86400 + since.seconds) * 10**9 + nanoseconds


def _microseconds(name: str, text: str) -> int | None:
    return _integer(name, text) * 1000 if text else None


def _limit(name: str, text: str) -> int:
    limit = _integer(name, text) if text else _DEFAULT_LIMIT
    if not 0 < limit <= MAX_TRACES_FOUND:
        raise QueryError(
            f"{name} is {limit}: search depth must be greater than 0 and at most {MAX_TRACES_FOUND}"
        )
    return limit


def _integer(name: str, text: str) -> int:
    if not re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
        raise QueryError(f"unable to parse param '{name}': {text[:40]!r} is not an integer")
    return int(text)


def _has(read: ReadSpan, key: str, value: str) -> bool:
    span = read.span
    if key == "error":
        return is_true(value) if span.is_error else value.lower() in ("false", "0", "f")
    if key == "span.status":
        return span.status.code == _STATUS_CODES.get(value.upper(), 0)
    if key == "span.kind":
        return KIND_NAMES.get(span.kind, "unspecified") == value.lower()
    if key in ("scope.name", "scope.version"):
        return value == (read.scope.name if key == "scope.name" else read.scope.version)
    if key.startswith("resource."):
        return _is(plain(read.resource.attributes).get(key.removeprefix("resource.")), value)
    places = (span.attributes, read.scope.attributes, read.resource.attributes)
    events = (event.attributes for event in span.events)
    return any(_is(plain(pairs).get(key), value) for pairs in (*places, *events))


def _is(found: object, value: str) -> bool:
    match found:
        case None:
            return False
        case bool():
            return value == str(found).lower()
        case str():
            return value == found
        case int() | float():
            try:
                return float(value) == found
            except ValueError:
                return False
        case _:
            return value.replace(" ", "") == msgspec.json.encode(found).decode().replace(" ", "")

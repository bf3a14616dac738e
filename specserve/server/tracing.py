"""What the server needs of a tracer, so that it depends on a promise and not on a library."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

AttributeValue = str | int | float | bool | Sequence[str] | Sequence[int] | Sequence[float]

_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}"
)


class ServerSpan(Protocol):
    """One HTTP request, from its headers to the last byte of its reply."""

    @property
    def traceparent(self) -> str | None:
        """W3C value that names the span which the engine's spans become children of."""
        ...

    @property
    def own_traceparent(self) -> str | None:
        """W3C value that names this span, for the reply's header; None: there is no such span."""
        ...

    def begin_operation(self, name: str) -> None:
        """What is asked of the model has a span of its own, from here to the end."""
        ...

    def child(
        self, name: str, start: float, end: float, attributes: Mapping[str, AttributeValue]
    ) -> None:
        """A part that has already ended. start, end: time.time() seconds."""
        ...

    def end(
        self,
        status: int,
        attributes: Mapping[str, AttributeValue],
        operation: Mapping[str, AttributeValue],
    ) -> None:
        """status: HTTP status sent; 499: the client left before the reply was complete.

        operation: attributes of the operation's span, if it has begun
        """
        ...


class ServerTracer(Protocol):
    def start(
        self, *, method: str, route: str, headers: Mapping[str, str], scheme: str = "http"
    ) -> ServerSpan:
        """route: the endpoint as documented, never the raw path; headers: of the request."""
        ...


class PassThroughSpan:
    """Without a tracer the caller's own traceparent goes straight to the engine."""

    own_traceparent = None

    def __init__(self, traceparent: str | None) -> None:
        self.traceparent = traceparent

    def begin_operation(self, name: str) -> None:
        return

    def child(
        self, name: str, start: float, end: float, attributes: Mapping[str, AttributeValue]
    ) -> None:
        return

    def end(
        self,
        status: int,
        attributes: Mapping[str, AttributeValue],
        operation: Mapping[str, AttributeValue],
    ) -> None:
        return


class PassThroughTracer:
    def start(
        self, *, method: str, route: str, headers: Mapping[str, str], scheme: str = "http"
    ) -> PassThroughSpan:
        return PassThroughSpan(valid_traceparent(headers.get("traceparent")))


def valid_traceparent(value: str | None) -> str | None:
    """`value` if it is a W3C traceparent that names a trace and a span, else None."""
    if value is None or not _TRACEPARENT.fullmatch(value):
        return None
    return value

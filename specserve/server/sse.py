"""Server-sent events: complete events, comments while idle, the end's mark if any, then the end.

A write waits for the socket, as long as the connection allows (protocol.py): meanwhile the engine's
streams coalesce. The engine itself never waits for a socket.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec
from aiohttp import web

_ENCODER = msgspec.json.Encoder()
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies must not collect events
}
_KEEP_ALIVE = b": keep-alive\n\n"


class Framing(msgspec.Struct, frozen=True, kw_only=True):
    """named: an event's type is its name, too. end: what follows the last event"""

    named: bool
    end: bytes


DONE_MARKED = Framing(named=False, end=b"data: [DONE]\n\n")
NAMED = Framing(named=True, end=b"")


def frame(event: msgspec.Struct, framing: Framing) -> bytes:
    data = b"data: " + _ENCODER.encode(event) + b"\n\n"
    if not framing.named:
        return data
    return f"event: {event.__struct_config__.tag}\n".encode() + data


class EventStream:
    def __init__(self, request: web.Request, framing: Framing) -> None:
        self._request = request
        self._framing = framing
        self._response = web.StreamResponse(headers=_HEADERS)
        self.opened: float | None = None  # time.time() of the headers
        self.num_writes = 0  # of events
        self.blocked_seconds = 0.0  # writes waited for the client to read

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    @property
    def is_open(self) -> bool:
        """Headers are sent: from here on an error can only be an event."""
        return self._response.prepared

    async def open(self) -> None:
        """Headers leave at once: proxies and clients time out on silence before them."""
        self.opened = time.time()
        await self._response.prepare(self._request)

    async def send(self, events: Iterable[msgspec.Struct]) -> None:
        """Each struct one event, all in one write."""
        payload = b"".join([frame(event, self._framing) for event in events])
        if payload:
            self.num_writes += 1
            await self._write(payload)

    async def keep_alive(self) -> None:
        """A comment: the only thing every client ignores (an event without data kills some)."""
        await self._write(_KEEP_ALIVE)

    async def done(self) -> None:
        if self._framing.end:
            await self._write(self._framing.end)
        await self._end()

    async def fail(self, error: msgspec.Struct) -> None:
        """One error event and the connection's end: no finish chunk, no mark of the end."""
        self._response.force_close()
        await self._write(frame(error, self._framing))
        await self._end()

    async def _write(self, payload: bytes) -> None:
        began = time.perf_counter()
        try:
            await self._response.write(payload)
        finally:  # a client that never reads is cut off inside
            self.blocked_seconds += time.perf_counter() - began

    async def _end(self) -> None:
        began = time.perf_counter()
        await self._response.write_eof()
        self.blocked_seconds += time.perf_counter() - began

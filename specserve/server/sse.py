"""Server-sent events: complete `data: …` events, comments while idle, one [DONE], then the end.

A write waits for the socket, as long as the connection allows (protocol.py): meanwhile the engine's
streams coalesce. The engine itself never waits for a socket.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from aiohttp import web

from specserve.errors import RequestError
from specserve.server.errors import encode_error

_ENCODER = msgspec.json.Encoder()
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies must not collect events
}
_KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"


def frame(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


class EventStream:
    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers=_HEADERS)

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    @property
    def is_open(self) -> bool:
        """Headers are sent: from here on an error can only be an event."""
        return self._response.prepared

    async def open(self) -> None:
        """Headers leave at once: proxies and clients time out on silence before them."""
        await self._response.prepare(self._request)

    async def send(self, events: Iterable[msgspec.Struct]) -> None:
        """Each struct one event, all in one write."""
        payload = b"".join([frame(_ENCODER.encode(event)) for event in events])
        if payload:
            await self._response.write(payload)

    async def keep_alive(self) -> None:
        """A comment: the only thing every client ignores (an event without data kills some)."""
        await self._response.write(_KEEP_ALIVE)

    async def done(self) -> None:
        await self._response.write(_DONE)
        await self._response.write_eof()

    async def fail(self, error: RequestError) -> None:
        """One error event and the connection's end: no finish chunk, no [DONE]."""
        self._response.force_close()
        await self._response.write(frame(encode_error(error)))
        await self._response.write_eof()

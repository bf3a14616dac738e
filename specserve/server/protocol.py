"""What aiohttp leaves open on a connection, closed: how many there are, how long one may take to
say what it wants and to read what it gets, and JSON for what is no HTTP."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from specserve.errors import RequestError
from specserve.server import errors
from specserve.server.state import STATE, ServerSettings
from specserve_observability.logs import get_logger

_log = get_logger("specserve.server")
_NO_ACCESS_LOG = logging.getLogger("specserve.access")
_NO_ACCESS_LOG.disabled = True


class ServerProtocol(RequestHandler):
    """One connection."""

    __slots__ = ("_cut_timer", "_header_timer", "_server", "_settings")

    def __init__(self, server: _Server, settings: ServerSettings) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=settings.idle_connection_seconds,
            access_log=_NO_ACCESS_LOG,  # the request's span and metrics say it better
        )
        self._settings = settings
        self._server = server
        self._header_timer: asyncio.TimerHandle | None = None
        self._cut_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if not self._server.takes(self):
            self._refuse()
            return
        # aiohttp itself waits for ever for half-sent headers.
        self._header_timer = self._loop.call_later(self._settings.header_seconds, self.force_close)

    def _refuse(self) -> None:
        assert self.transport is not None
        self.transport.write(_too_many_connections(self._settings.max_connections))
        self.force_close()

    @property
    def is_idle(self) -> bool:
        """Between requests, or in the middle of one's headers. Asked of aiohttp's own state, as its
        keep-alive timer does."""
        return self._waiter is not None and not self._waiter.done()

    def headers_arrived(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    # ---- a client that does not read ---------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cut_later(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.transport is not None:  # else it closes, and the rest has to be read too
            self._cut_not()

    def force_close(self) -> None:
        transport = self.transport
        super().force_close()
        self._cut_later(transport)  # it closes when all is sent, which may be never

    def _cut_later(self, transport: asyncio.Transport | None) -> None:
        if transport is not None and self._cut_timer is None:
            seconds = self._settings.write_seconds
            self._cut_timer = self._loop.call_later(seconds, transport.abort)

    def _cut_not(self) -> None:
        if self._cut_timer is not None:
            self._cut_timer.cancel()
            self._cut_timer = None

    def connection_lost(self, exc: BaseException | None) -> None:
        self.headers_arrived()
        self._server.open_connections.pop(self, None)
        super().connection_lost(exc)
        self._cut_not()

    # ---- what is no HTTP -----------------------------------------------------------------------

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Malformed HTTP never reaches a middleware; its error is shaped here."""
        self.headers_arrived()
        if request.writer.output_size > 0:
            raise ConnectionError("part of a reply has been sent already")
        if status >= 500:
            _log.error("connection_failed", exc_info=exc)
            refusal = errors.internal_error()
        else:
            refusal = RequestError(
                "the request is not valid HTTP/1.1: check its request line, headers and length",
                code="bad_request",
                status=status,
            )
        response = errors.error_response(refusal)
        response.force_close()
        return response


def _too_many_connections(limit: int) -> bytes:
    """A whole reply, before any request: to wait for one would take the place it has not got."""
    body = errors.encode_error(
        RequestError(
            f"this server has {limit} connections, all of them with a request under way "
            "(--max-connections): try again later",
            code="too_many_connections",
            status=503,
        )
    )
    return (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nRetry-After: {errors.RETRY_AFTER_SECONDS}\r\n"
        "Connection: close\r\n\r\n"
    ).encode() + body


class _Server(web.Server):
    def __init__(self, app_server: web.Server, settings: ServerSettings) -> None:
        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            try:
                return await app_server.request_handler(request)
            except web.HTTPExpectationFailed:  # where no route matched, before any middleware
                return errors.error_response(errors.unknown_expectation())

        super().__init__(
            handle,
            request_factory=app_server.request_factory,
            # A client that leaves cancels its handler, which closes its streams.
            handler_cancellation=True,
        )
        self._settings = settings
        # aiohttp's own list keeps a connection for some time after it is lost.
        self.open_connections: dict[ServerProtocol, None] = {}  # oldest first

    def takes(self, newcomer: ServerProtocol) -> bool:
        """The oldest connection without a request gives way where there are too many: idle ones
        must not keep out somebody who asks, a supervisor least of all."""
        if len(self.open_connections) < self._settings.max_connections:
            self.open_connections[newcomer] = None
            return True
        idle = next((other for other in self.open_connections if other.is_idle), None)
        self.open_connections[newcomer] = None
        if idle is None:
            return False
        idle.force_close()
        return True

    def __call__(self) -> ServerProtocol:
        return ServerProtocol(self, self._settings)


class Runner(web.AppRunner):
    """web.AppRunner whose connections are ServerProtocols; aiohttp offers no public way in."""

    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server(), self.app[STATE].settings)

"""What aiohttp does before any handler runs, made to fit: JSON errors and a header deadline."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from specserve.errors import RequestError
from specserve.server import errors
from specserve.server.state import STATE
from specserve_observability.logs import get_logger

_log = get_logger("specserve.server")
_NO_ACCESS_LOG = logging.getLogger("specserve.access")
_NO_ACCESS_LOG.disabled = True


class ServerProtocol(RequestHandler):
    """One connection."""

    __slots__ = ("_deadline", "_header_seconds")

    def __init__(
        self,
        manager: web.Server,
        *,
        loop: asyncio.AbstractEventLoop,
        header_seconds: float,
        idle_seconds: float,
    ) -> None:
        super().__init__(
            manager,
            loop=loop,
            keepalive_timeout=idle_seconds,
            access_log=_NO_ACCESS_LOG,  # the request's span and metrics say it better
        )
        self._header_seconds = header_seconds
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        loop = asyncio.get_running_loop()
        # aiohttp itself waits for ever for half-sent headers.
        self._deadline = loop.call_later(self._header_seconds, self.force_close)

    def headers_arrived(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def connection_lost(self, exc: BaseException | None) -> None:
        self.headers_arrived()
        super().connection_lost(exc)

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


class _Server(web.Server):
    def __init__(self, app_server: web.Server, header_s: float, idle_s: float) -> None:
        super().__init__(
            app_server.request_handler,
            request_factory=app_server.request_factory,
            # A client that leaves cancels its handler, which closes its streams.
            handler_cancellation=True,
        )
        self._seconds = (header_s, idle_s)

    def __call__(self) -> ServerProtocol:
        header_seconds, idle_seconds = self._seconds
        return ServerProtocol(
            self,
            loop=asyncio.get_running_loop(),
            header_seconds=header_seconds,
            idle_seconds=idle_seconds,
        )


class Runner(web.AppRunner):
    """web.AppRunner whose connections are ServerProtocols; aiohttp offers no public way in."""

    async def _make_server(self) -> web.Server:
        settings = self.app[STATE].settings
        server = await super()._make_server()
        return _Server(server, settings.header_seconds, settings.idle_connection_seconds)

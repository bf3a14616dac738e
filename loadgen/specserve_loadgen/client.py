"""The HTTP side: one session, one method per thing asked of the server.

A request's clock starts before its connection is made: a user waits for that too. One reading of
the clock per socket read, by the socket; all events of a read arrived together.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from types import TracebackType
from typing import Self

import aiohttp
import msgspec

from specserve_loadgen.engines import OURS, REQUEST_FIELDS, UNKNOWN, engine_of
from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.prompt import Prompt
from specserve_loadgen.records import Failure, RequestRecord, Turn
from specserve_loadgen.reply import Reply
from specserve_loadgen.settings import Settings
from specserve_loadgen.sse import SseParser
from specserve_loadgen.timed_socket import TimedSockets
from specserve_loadgen.wire import ModelList, Version, http_error_message

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
CONNECT_SECONDS = 10.0
_GOLDEN = (5**0.5 - 1) / 2  # multiples of it fill the interval evenly
DRAIN_SECONDS = 0.5  # after [DONE], for the body to end so that its connection can be reused


def request_body(
    settings: Settings, model: str, prompt: Prompt, request_idx: int, engine: str = UNKNOWN
) -> bytes:
    """The JSON of one request. Options that were not given are not sent."""
    body: dict[str, object] = {
        **REQUEST_FIELDS.get(engine, {}),
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
        "max_tokens": prompt.max_tokens or limit_of(settings, request_idx),
        "seed": settings.seed + request_idx,
    }
    if settings.endpoint == "chat":
        body["messages"] = prompt.messages
    elif prompt.token_ids:
        body["prompt"] = prompt.token_ids
    else:
        body["prompt"] = "\n".join(message.content for message in prompt.messages)
    if settings.temperature is not None:
        body["temperature"] = settings.temperature
    if settings.ignore_eos:
        body["ignore_eos"] = True
    if settings.cache_salt is not None:
        own = f"/{request_idx}" if settings.salt_per_request else ""
        body["cache_salt"] = settings.cache_salt + own
    speculation = {
        "drafter": settings.drafter,
        "max_draft_tokens": settings.max_draft_tokens,
        "verify": settings.verify,
        "detailed": settings.detailed or engine == OURS or None,
    }
    if chosen := {name: value for name, value in speculation.items() if value is not None}:
        body["speculation"] = chosen
    return msgspec.json.encode(body)


def limit_of(settings: Settings, request_idx: int) -> int:
    """Output tokens of one request: the same for the same index, evenly spread over indices."""
    if settings.shortest is None:
        return settings.max_tokens
    share = (0.5 + request_idx * _GOLDEN) % 1.0
    return settings.shortest + int(share * (1 + settings.max_tokens - settings.shortest))


class Client:
    """Async context manager. `clock` gives seconds; only differences of it are used."""

    def __init__(self, settings: Settings, api_key: str | None, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._clock = clock
        self.zero = 0.0  # the clock's reading at 0 s
        self._sockets = TimedSockets(clock)
        self._model = ""
        self.engine = UNKNOWN  # until `find_model`
        self._headers = {"Accept": "text/event-stream", "Content-Type": "application/json"}
        self._auth = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,  # the load decides, not the pool
                socket_factory=self._sockets.make,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._auth,
            timeout=aiohttp.ClientTimeout(
                total=self._settings.request_timeout, sock_connect=CONNECT_SECONDS
            ),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self._session.close()

    def start_clock(self) -> None:
        """Make this moment 0 s: the measured load begins."""
        self.zero = self._clock()

    def now(self) -> float:
        """Seconds on the run's clock."""
        return self._clock() - self.zero

    async def find_model(self) -> str:
        """The model that `send` asks for, and proof that a server is there. LoadgenError."""
        url = self._settings.url
        try:
            async with self._session.get(f"{url}/v1/models") as response:
                body, status = await response.read(), response.status
        except (aiohttp.ClientError, TimeoutError) as error:
            raise LoadgenError(
                f"--url {url}: no server answers there ({_reason(error)}): "
                "start one with `specserve serve`, or give its address"
            ) from None
        if status in (401, 403):
            raise LoadgenError(
                f"--url {url}: HTTP {status}, {http_error_message(body)}: give --api-key"
            )
        try:
            cards = msgspec.json.decode(body, type=ModelList).data if status == 200 else []
        except msgspec.DecodeError:
            cards = []
        if not cards and self._settings.model is None:
            raise LoadgenError(
                f"--url {url}: /v1/models (HTTP {status}) lists no model: give --model"
            )
        self.engine = engine_of(cards[0].owned_by if cards else None)
        self._model = self._settings.model or cards[0].id
        return self._model

    async def server_version(self) -> str | None:
        """What GET /version says, or None where there is no such route."""
        text = await self._get_text("/version")
        if text is None:
            return None
        try:
            return msgspec.json.decode(text, type=Version).version
        except msgspec.DecodeError:
            return None

    async def metrics_text(self) -> str | None:
        """GET /metrics in the Prometheus text format, or None where there is none."""
        return await self._get_text("/metrics")

    async def _get_text(self, path: str) -> str | None:
        try:
            async with self._session.get(
                self._settings.url + path, headers={"Accept": "*/*"}
            ) as response:
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
            return None

    async def send(
        self, prompt: Prompt, turn: Turn, take: Callable[[RequestRecord], None]
    ) -> tuple[RequestRecord, str]:
        """The request's record and answer. `take` gets the record also when cancelled."""
        body = request_body(self._settings, self._model, prompt, turn.request_idx, self.engine)
        reply = Reply(keep_output=self._settings.keep_output)
        failure: Failure | None = Failure(kind="cancelled", message="this client was stopped")
        sent = self.now()
        try:
            failure = await self._stream_anew_if_stale(body, reply)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            failure = Failure(kind="connection", message=_reason(error))
        except TimeoutError:
            limit = self._settings.request_timeout
            failure = Failure(kind="timeout", message=f"no complete reply within {limit:g} s")
        except (aiohttp.ClientError, OSError) as error:
            failure = Failure(kind="connection_lost", message=_reason(error))
        finally:
            ended = self.now() if reply.done_at is None else reply.done_at
            record = reply.record(turn=turn, prompt=prompt, sent=sent, ended=ended, failure=failure)
            take(record)
        return record, reply.text

    async def _stream_anew_if_stale(self, body: bytes, reply: Reply) -> Failure | None:
        """A kept connection may be closed by the server while the request is on its way.

        That is no failure of the server: as other clients do, ask once more if nothing came back.
        """
        try:
            return await self._stream(body, reply)
        except aiohttp.ClientConnectorError:
            raise  # nobody listens
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
            if reply.has_begun:
                raise
            return await self._stream(body, reply)

    async def _stream(self, body: bytes, reply: Reply) -> Failure | None:
        url = self._settings.url + PATHS[self._settings.endpoint]
        async with self._session.post(url, data=body, headers=self._headers) as response:
            reply.has_begun = True
            if response.status != 200:
                return Failure(
                    kind=f"http_{response.status}",
                    message=http_error_message(await response.read()),
                    retry_after=response.headers.get("Retry-After"),
                )
            if response.content_type != "text/event-stream":
                found = response.content_type
                return Failure(kind="not_a_stream", message=f"the reply's content type is {found}")
            parser = SseParser()
            source = self._sockets.behind(response)
            async for data in response.content.iter_any():
                read_at = None if source is None else source.read_at
                now = self.now() if read_at is None else read_at - self.zero
                for event in parser.feed(data):
                    if failure := reply.on_event(event, now):
                        return failure
                    if reply.done_at is not None:
                        await _drain(response)
                        return None
        return Failure(kind="truncated", message="the stream ended without [DONE]")


async def _drain(response: aiohttp.ClientResponse) -> None:
    try:
        async with asyncio.timeout(DRAIN_SECONDS):
            async for _ in response.content.iter_any():
                pass
    except (TimeoutError, aiohttp.ClientError):
        response.close()  # the reply is complete; only its connection is not reused


def _reason(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        errno = error.os_error.errno
        if errno is not None and errno > 0:
            return os.strerror(errno)  # aiohttp's text shows a tuple of addresses
    return str(error) or type(error).__name__

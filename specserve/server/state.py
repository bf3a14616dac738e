"""What every handler shares: one value in the application, and what one request carries."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from specserve.engine import Engine
from specserve.server import errors
from specserve.server.backlog import Backlog
from specserve.server.compiler import GrammarCompiler
from specserve.server.cors import CorsPolicy
from specserve.server.keys import KeyRing, Slots
from specserve.server.readers import ReplyFormat
from specserve.server.tracing import AttributeValue, ServerSpan, ServerTracer
from specserve.server.traffic import TrafficClasses
from specserve_observability.exposition import Exposition
from specserve_observability.http_counters import HttpCounters
from specserve_observability.metrics import DEFAULT_CLASS
from specserve_observability.recorder import StepFeed


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    keep_alive_seconds: float | None = 10.0  # a comment after this long without an event; None: no
    write_seconds: float = 60.0  # a client that leaves a reply unread for this long is cut off
    header_seconds: float = 30.0  # from connection to the end of the first request's headers
    body_seconds: float = 60.0  # from there to the end of the body
    idle_connection_seconds: float = 75.0  # a kept-alive connection without a request
    max_connections: int = 1000
    drain_seconds: float = 30.0  # at shutdown, for live replies to end by themselves
    max_body_bytes: int = 8 * 1024 * 1024  # after decompression
    off_loop_body_bytes: int = 64 * 1024  # larger bodies are parsed on a helper thread
    grammar_seconds: float = 10.0  # how long a request may wait for its grammar to be compiled
    max_waiting_tokens: int = 1_000_000  # of prompts whose first token is to come
    event_seconds: float = 0.25  # between two events of /specserve/events while steps are taken
    idle_event_seconds: float = 2.0  # and while none are
    max_event_listeners: int = 16
    keys: KeyRing | None = None  # None: whoever reaches the port may ask
    traffic_classes: TrafficClasses = TrafficClasses()
    max_concurrent_per_key: int | None = None  # requests under way
    cors: CorsPolicy = CorsPolicy()
    tls: ssl.SSLContext | None = None  # None: plain HTTP
    trace_content: bool = False  # prompts and replies may stand in spans
    tool_call_parser: str = "auto"  # as ReplyFormat.of takes it
    reasoning_parser: str = "auto"  # likewise


class Lifecycle:
    """Which replies are under way, and how they end when the server does."""

    def __init__(self) -> None:
        self.started = False
        self.draining = False
        self._scopes: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextlib.asynccontextmanager
    async def replying(self) -> AsyncIterator[None]:
        """Around the making of one reply; RequestError 503 when shutdown cuts it short."""
        scope = asyncio.timeout(None)
        self._scopes.add(scope)
        self._idle.clear()
        try:
            async with scope:
                yield
        except TimeoutError:
            if scope.expired():
                raise errors.cut_short() from None
            raise
        finally:
            self._scopes.discard(scope)
            if not self._scopes:
                self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, wait for live replies, cut those that outlast `seconds`."""
        self.draining = True
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            now = asyncio.get_running_loop().time()
            for scope in self._scopes:
                scope.reschedule(now)


@dataclass(frozen=True)
class ServerState:
    engine: Engine
    metrics_page: Callable[[str], Exposition]
    http: HttpCounters
    feed: StepFeed
    tracer: ServerTracer
    settings: ServerSettings
    lifecycle: Lifecycle
    slots: Slots
    backlog: Backlog
    reply_format: ReplyFormat
    compiler: GrammarCompiler

    def check_serving(self) -> None:
        """RequestError 503 unless new work can be taken."""
        if self.lifecycle.draining:
            raise errors.stopping()
        if self.engine.error is not None:
            raise errors.engine_dead(self.engine.error)


@dataclass
class RequestContext:
    """One HTTP request's identity and what its spans will say."""

    request_id: str  # echoed as x-request-id; never the engine's id
    span: ServerSpan
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    operation: dict[str, AttributeValue] = field(default_factory=dict)  # of what the model did
    failed_status: int | None = None  # of an error event, after a status line that said 200
    traffic_class: str = DEFAULT_CLASS


STATE = web.AppKey("state", ServerState)
CONTEXT = web.RequestKey("context", RequestContext)


@contextlib.contextmanager
def timed_child(request: web.Request, name: str) -> Iterator[None]:
    """Record the body of the with statement as a child of the request's span."""
    start = time.time()
    try:
        yield
    finally:
        request[CONTEXT].span.child(name, start, time.time(), {})

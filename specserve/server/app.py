"""The application and its runner.

The composition root starts the engine, then serves this application with `create_runner`, then
on a signal awaits `drain(app)`, cleans the runner up and stops the engine:

    await engine.start()
    app = create_app(engine, metrics_page=..., feed=...)
    runner = create_runner(app)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    ...
    await drain(app)          # /ready turns 503 while the port still answers
    await runner.cleanup()
    await engine.stop()
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler

from specserve.engine import Engine
from specserve.server import (
    chat,
    completions,
    events,
    messages,
    openapi,
    operations,
    playground,
    responses,
    tokens,
)
from specserve.server.backlog import Backlog
from specserve.server.compiler import GrammarCompiler
from specserve.server.keys import Slots
from specserve.server.middleware import ROUTE_NAMES, add_headers, around, expected
from specserve.server.protocol import Runner
from specserve.server.readers import ReplyFormat
from specserve.server.state import STATE, Lifecycle, ServerSettings, ServerState
from specserve.server.tracing import PassThroughTracer, ServerTracer
from specserve_observability.exposition import Exposition
from specserve_observability.http_counters import HttpCounters
from specserve_observability.recorder import StepFeed

ROUTES: dict[tuple[str, str], Handler] = {
    ("POST", "/v1/completions"): completions.completions,
    ("POST", "/v1/chat/completions"): chat.chat_completions,
    ("POST", "/v1/responses"): responses.responses,
    ("POST", "/v1/messages"): messages.messages,
    ("POST", "/v1/messages/count_tokens"): messages.count_tokens,
    ("GET", "/v1/models"): operations.list_models,
    ("GET", "/v1/models/{id}"): operations.get_model,
    ("POST", "/tokenize"): tokens.tokenize,
    ("POST", "/detokenize"): tokens.detokenize,
    ("GET", "/health"): operations.health,
    ("GET", "/ready"): operations.ready,
    ("GET", "/version"): operations.version,
    ("GET", "/metrics"): operations.metrics,
    ("GET", "/openapi.json"): openapi.openapi,
    ("GET", "/specserve/events"): events.events,
}


def create_app(
    engine: Engine,
    *,
    metrics_page: Callable[[str], Exposition],
    feed: StepFeed,
    http: HttpCounters | None = None,
    tracer: ServerTracer | None = None,
    settings: ServerSettings | None = None,
) -> web.Application:
    """engine: started by the caller, and stopped by it. metrics_page: what /metrics says
    now to a request with this Accept header. feed: the steps of that engine. http: counts requests
    """
    settings = settings or ServerSettings()
    http = http or HttpCounters()
    http.announce(path for _, path in ROUTES)
    app = web.Application(middlewares=[around], client_max_size=settings.max_body_bytes)
    app[STATE] = ServerState(
        engine=engine,
        metrics_page=metrics_page,
        http=http,
        feed=feed,
        tracer=tracer or PassThroughTracer(),
        settings=settings,
        lifecycle=Lifecycle(),
        slots=Slots(settings.max_concurrent_per_key),
        backlog=Backlog(settings.max_waiting_tokens),
        reply_format=ReplyFormat.of(
            engine.tokenizer, settings.tool_call_parser, settings.reasoning_parser
        ),
        compiler=GrammarCompiler(engine.tokenizer, seconds=settings.grammar_seconds),
    )
    app[ROUTE_NAMES] = {}
    pages = {("GET", path): handler for path, handler in playground.PAGES.items()}
    for (method, path), handler in {**ROUTES, **pages}.items():
        for pattern in _spellings(path):
            route = app.router.add_route(method, pattern, handler, expect_handler=expected)
            if method == "GET":
                app.router.add_route("HEAD", pattern, handler, expect_handler=expected)
            assert route.resource is not None
            app[ROUTE_NAMES][route.resource] = path
    app.on_response_prepare.append(add_headers)
    app.on_startup.append(_mark_started)
    app.on_shutdown.append(drain)
    app.on_cleanup.append(_close)
    return app


def create_runner(app: web.Application) -> web.AppRunner:
    """Serves `app` with JSON errors, deadlines, and handlers that end when their client leaves."""
    # Replies that were cut have this long to say so.
    return Runner(app, shutdown_timeout=5.0)


async def drain(app: web.Application) -> None:
    """Take no new requests; return when live replies have ended or have been cut."""
    state = app[STATE]
    await state.lifecycle.drain(state.settings.drain_seconds)


async def _mark_started(app: web.Application) -> None:
    app[STATE].lifecycle.started = True


async def _close(app: web.Application) -> None:
    app[STATE].compiler.close()


def _spellings(path: str) -> tuple[str, ...]:
    """The path, and the same with any slash repeated: base URLs often end in one."""
    pattern = path.replace("{id}", "{id:.+}")
    parts = pattern.removeprefix("/").split("/")
    repeated = "".join(f"/{{slashes{i}:/*}}{part}" for i, part in enumerate(parts))
    return (pattern, repeated)

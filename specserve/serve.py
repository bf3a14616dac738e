"""`specserve serve`: build, listen, say what to type next, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from aiohttp import web

from specserve.compose import Built, build_engine, drafter_specs
from specserve.engine import Engine
from specserve.errors import ConfigError
from specserve.operation import allow_connections, settings_of, warn_if_open
from specserve.options import ServeOptions
from specserve.server.app import create_app, create_runner, drain
from specserve.server.state import ServerSettings
from specserve.speculation.recording import Recording
from specserve.types import LOSSY_RULES, VerifyRule
from specserve.version import __version__
from specserve_observability import names
from specserve_observability.export import ExportSettings
from specserve_observability.exposition import Exposition, expose
from specserve_observability.logs import configure_logging, get_logger
from specserve_observability.metrics import WAIT_REASONS, Gauges, Metrics
from specserve_observability.tracing import Tracing, open_tracing
from specserve_observability.vllm_families import VllmNames


def serve(options: ServeOptions) -> int:
    """Run until SIGINT or SIGTERM; exit status 0 after a drained stop, 1 when the engine died."""
    # Before anything slow, so that a bad option and a taken port are said at once.
    settings = settings_of(options, os.environ)
    allow_connections(settings.max_connections)
    if options.record_steps and not Path(options.record_steps).absolute().parent.is_dir():
        raise ConfigError(f"--record-steps {options.record_steps}: its folder does not exist")
    with bind(options.host, options.port) as listener:
        return _serve_on(listener, options, settings)


def _serve_on(listener: socket.socket, options: ServeOptions, settings: ServerSettings) -> int:
    configure_logging(json=options.log_format == "json", level=options.log_level)
    drafters = tuple(name for name, _ in drafter_specs(options))
    metrics = Metrics(
        drafters=drafters,
        max_draft_tokens=options.max_draft_tokens,
        traffic_classes=settings.traffic_classes.names,
    )
    tracing = _open_tracing(options, metrics)
    recording = Recording() if options.record_steps else None
    try:
        built = build_engine(
            options,
            recorder=tracing.recorder,
            model_name=options.served_model_name or options.model,
            recording=recording,
            say=_say,
        )
        # What a loaded model consists of lives for ever: never look through it again.
        gc.collect()
        gc.freeze()
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(_run(options, settings, built, tracing, metrics, listener))
    finally:
        try:
            tracing.shutdown()
        finally:
            if recording is not None and options.record_steps:
                _write_steps(recording, Path(options.record_steps))


def _open_tracing(options: ServeOptions, metrics: Metrics) -> Tracing:
    settings = ExportSettings(
        otlp_endpoint=options.otlp_endpoint,
        otlp_protocol=options.otlp_protocol,
        trace_file=options.trace_file,
        trace_file_bytes=options.trace_file_mb * 1_000_000,
        exporter=options.trace_exporter,
        steps_per_second=options.trace_steps_per_second,
        log_json=options.log_format == "json",
        log_level=options.log_level,
    )
    resource = {
        names.MODEL_TARGET: options.model,
        names.MODEL_DRAFT: options.drafters,
        names.DEVICE: options.device,
        names.CONFIG_HASH: hashlib.sha256(msgspec.json.encode(options)).hexdigest()[:12],
    }
    try:
        return open_tracing(
            settings, service_version=__version__, metrics=metrics, resource=resource
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot trace to where --otlp-endpoint or --trace-file say: {error}"
        ) from error


def _write_steps(recording: Recording, path: Path) -> None:
    try:
        _say(f"{recording.write(path)} recorded steps are in {path}")
    except OSError as error:
        _say(f"--record-steps {path}: {error.strerror or error}")


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed; None: asyncio's own.

    16 streams beside each other, int8, 2 cores, client included: 644-733 tokens/s with uvloop,
    580-635 without (three rounds each, in turns).
    """
    try:
        import uvloop
    except ImportError:  # Windows has none
        return None
    return uvloop.new_event_loop


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; ConfigError names the option at fault."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port is {port}, it must be from 0 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host!r} is not an address of this machine: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host"
        ) from error
    return listener


async def _run(
    options: ServeOptions,
    settings: ServerSettings,
    built: Built,
    tracing: Tracing,
    metrics: Metrics,
    listener: socket.socket,
) -> int:
    engine = built.engine

    app = create_app(
        engine,
        metrics_page=partial(metrics_page, engine, metrics, options.metrics_compat),
        feed=tracing.recorder.feed,
        http=metrics.http,
        tracer=tracing.server_tracer,
        settings=settings,
    )
    runner = create_runner(app)
    await engine.start()
    await runner.setup()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await web.SockSite(runner, listener, ssl_context=settings.tls).start()
    warn_if_open(options.host, settings)
    _greet(options, settings, built, listener.getsockname()[1])
    await stop.wait()
    _say("stopping: live streams may finish, new requests get 503")
    await drain(app)  # /ready turns 503 while the port still answers
    await runner.cleanup()
    await engine.stop()
    return 0 if engine.error is None else 1


def metrics_page(engine: Engine, metrics: Metrics, compat: str, accept: str) -> Exposition:
    """What /metrics says now to a request with this Accept header."""
    now = engine.snapshot()
    gauges = Gauges(
        num_running=now.num_running,
        waiting={**dict.fromkeys(WAIT_REASONS, 0), **engine.waiting_by_reason()},
        blocks_free=now.blocks_free,
        blocks_cached=now.blocks_cached,
        blocks_live=now.blocks_live,
        engine_up=engine.error is None,
    )
    names = VllmNames(engine.model_name, engine.config.block_size) if compat == "vllm" else None
    return expose(metrics, gauges, accept=accept, vllm=names)


def _greet(options: ServeOptions, settings: ServerSettings, built: Built, port: int) -> None:
    warn_if_lossy(built.engine.config.default_verify)
    scheme = "http" if settings.tls is None else "https"
    url = f"{scheme}://{options.host}:{port}"
    for line in built.memory.lines():
        _say(line)
    default = built.engine.config.default_drafter
    _say(
        f"speculation: {default}, K = {_default_k(built)}, "
        f"verify {built.engine.config.default_verify}; "
        f"loaded drafters: {', '.join(built.drafter_names) or 'none'}"
    )
    name = built.engine.model_name
    body = f'{{"model": "{name}", "stream": true, "messages": '
    body += '[{"role": "user", "content": "Hello!"}]}'
    header, flag = "", ""
    if settings.keys is not None:
        header, flag = " -H 'authorization: Bearer KEY'", " --api-key KEY"
    print(
        f"""
specserve {__version__} serves {name} at {url}  (Ctrl-C stops it)

Type next, in another terminal:
  curl -N {url}/v1/chat/completions -H 'content-type: application/json'{header} \\
    -d '{body}'
  .venv/bin/specserve loadgen --url {url} --concurrency 4{flag}
  curl{header} {url}/metrics
Or open {url}/ in a browser, and watch it guess.
""",
        flush=True,
    )


def _default_k(built: Built) -> str:
    config = built.engine.config
    chosen = config.default_drafter == "auto"
    return f"0 to {config.max_draft_tokens}" if chosen else str(config.default_draft_tokens)


def warn_if_lossy(verify: VerifyRule) -> None:
    """A server whose default bends the law says so where its operator looks."""
    if verify in LOSSY_RULES:
        get_logger("specserve.serve").warning(
            "lossy_verification",
            verify=verify,
            meaning="replies do not follow the model's law; --verify replay is exact",
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

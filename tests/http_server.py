"""A whole server on a real port: scripted model, real engine, real application."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

from specserve.admission import Limits
from specserve.config import EngineConfig
from specserve.drafting import Drafter
from specserve.engine import Engine, Recorder
from specserve.models.decoder import Decoder
from specserve.models.interface import CausalLM
from specserve.runner import ModelRunner
from specserve.server.app import create_app, create_runner
from specserve.server.state import ServerSettings
from specserve.server.tracing import ServerTracer
from specserve.speculation.speculator import Speculator
from specserve.target import HostTarget
from specserve.tokenizer import Tokenizer
from specserve_observability.exposition import TEXT, Exposition
from tests.engines import ListRecorder
from tests.raw_http import Reply, ask
from tests.scripted import TEMPLATE, Script, ScriptedModel, byte_tokenizer, guessers

CONFIG = EngineConfig(
    block_size=4,
    num_blocks=256,
    max_model_len=256,
    max_num_seqs=16,
    max_num_batched_tokens=128,
    max_prefill_chunk=16,
    default_draft_tokens=3,
    max_draft_tokens=8,
)


class Server:
    def __init__(
        self, engine: Engine, runner: web.AppRunner, port: int, recorder: ListRecorder
    ) -> None:
        self.engine = engine
        self.runner = runner
        self.recorder = recorder
        self.app = runner.app
        self.port = port
        self.base_url = f"http://127.0.0.1:{port}/v1"

    async def get(self, path: str) -> Reply:
        return await ask(self.port, "GET", path)

    async def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> Reply:
        return await ask(self.port, "POST", path, body, headers=headers)

    async def complete(self, **body: object) -> Reply:
        return await self.post("/v1/completions", {"prompt": "say:", "temperature": 0, **body})

    async def chat(self, **body: object) -> Reply:
        messages = [{"role": "user", "content": "say"}]
        return await self.post(
            "/v1/chat/completions", {"messages": messages, "temperature": 0, **body}
        )

    @property
    def num_live(self) -> int:
        """Requests anywhere in the engine, and blocks in use."""
        now = self.engine.snapshot()
        assert now.blocks_free + now.blocks_cached + now.blocks_live == now.blocks_total
        return now.num_running + now.num_waiting + now.blocks_live

    @property
    def num_connections(self) -> int:
        assert self.runner.server is not None
        return len(self.runner.server.connections)

    async def has(self, *, running: int, waiting: int = 0) -> None:
        """Waits until exactly so many requests run and wait."""
        while (now := self.engine.snapshot()).num_running != running or now.num_waiting != waiting:
            await asyncio.sleep(0.002)

    async def is_idle(self) -> None:
        """Waits until nothing is left in the engine."""
        while self.num_live:
            await asyncio.sleep(0.002)


@asynccontextmanager
async def a_server(
    script: Script,
    *,
    config: EngineConfig = CONFIG,
    settings: ServerSettings | None = None,
    on_forward: Callable[[], None] = lambda: None,
    tracer: ServerTracer | None = None,
    send_buffer: int | None = None,
    template: str = TEMPLATE,
    dies: bool = False,
    drafters: Mapping[str, Drafter] | None = None,
    model: CausalLM | None = None,
    recorder: ListRecorder | None = None,
    port: int = 0,
) -> AsyncIterator[Server]:
    """Afterwards no request, no block and no asyncio task may be left.

    send_buffer: bytes the kernel may hold for a client that does not read
    dies:        the engine is meant to be dead at the end
    drafters:    by name; None: those that know the script
    model:       in place of the scripted one; VOCAB_SIZE tokens
    recorder:    None: one that keeps what it gets
    port:        0: any that is free
    """
    recorder = recorder or ListRecorder()
    engine = an_engine(
        ScriptedModel(script, on_forward) if model is None else model,
        config,
        recorder,
        byte_tokenizer(template),
        drafters=guessers(script) if drafters is None else drafters,
    )
    async with over_http(
        engine, recorder, settings=settings, tracer=tracer, send_buffer=send_buffer, port=port
    ) as server:
        yield server
        await server.is_idle()
    assert (engine.error is not None) == dies, engine.error


@asynccontextmanager
async def over_http(
    engine: Engine,
    recorder: ListRecorder,
    *,
    settings: ServerSettings | None = None,
    tracer: ServerTracer | None = None,
    send_buffer: int | None = None,
    port: int = 0,
) -> AsyncIterator[Server]:
    """The engine runs, and is asked over HTTP; afterwards no asyncio task may be left."""
    before = asyncio.all_tasks()
    app = create_app(
        engine,
        metrics_page=lambda accept: Exposition(TEXT, "specserve_up 1\n"),
        feed=recorder.feed,
        tracer=tracer,
        settings=settings,
    )
    runner = create_runner(app)
    await engine.start()
    await runner.setup()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    tls = None if settings is None else settings.tls
    await web.SockSite(runner, listener, ssl_context=tls).start()
    server = Server(engine, runner, listener.getsockname()[1], recorder)
    try:
        yield server
    finally:
        await runner.cleanup()
        await engine.stop()
    assert not await lasting(before)


async def lasting(before: set[asyncio.Task[object]]) -> set[asyncio.Task[object]]:
    """The tasks begun after ``before`` that do not end by themselves within five seconds.

    A client's async generator that is dropped unfinished is closed by a task of the loop's own,
    at whatever moment the garbage collector finds it: such a task is no leak of the server.
    """
    begun = asyncio.all_tasks() - before
    if not begun:
        return begun
    return (await asyncio.wait(begun, timeout=5))[1]


def an_engine(
    model: CausalLM,
    config: EngineConfig,
    recorder: Recorder,
    tokenizer: Tokenizer,
    *,
    drafters: Mapping[str, Drafter],
) -> Engine:
    return Engine(
        model_name="test",
        config=config,
        runner=ModelRunner(
            HostTarget(
                model,
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                vocab_size=tokenizer.vocab_size,
                hidden_size=model.config.hidden_size if isinstance(model, Decoder) else 0,
            ),
            Speculator(dict(drafters), vocab_size=tokenizer.vocab_size),
        ),
        tokenizer=tokenizer,
        limits=Limits.of(
            config,
            vocab_size=tokenizer.vocab_size,
            eos_ids=tokenizer.eos_ids,
            drafters=("none", *drafters),
        ),
        recorder=recorder,
    )


class Pace:
    """An on_forward that lets the engine take only the steps it is given."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)

    def __call__(self) -> None:
        if not self._permits.acquire(timeout=30):
            raise AssertionError("the test gave no more steps")

    def allow(self, num_steps: int = 1) -> None:
        self._permits.release(num_steps)

    def take_back(self) -> None:
        """No step that was given and not taken is left."""
        while self._permits.acquire(blocking=False):
            pass

    async def steps_until_idle(self, server: Server) -> int:
        """Gives steps one by one; how many it took until nothing was left in the engine."""
        for num_steps in range(1000):
            for _ in range(10):  # a step takes a few turns of the loop and one of the thread
                await asyncio.sleep(0.005)
                if server.num_live == 0:
                    return num_steps
            self.allow()
        raise AssertionError("1000 steps and still busy")

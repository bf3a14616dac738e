"""A small OpenAI-style server whose timings and acceptance are written down by the test.

Real sockets, and an optional clock that stands still between writes: the handler moves it, writes
one event, and waits until the client has read the clock for it. Every latency that the client
then computes is known exactly, on any machine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web


class StepClock:
    """Seconds that pass only when told to. Counts its readers."""

    def __init__(self) -> None:
        self.now = 100.0
        self.num_reads = 0

    def __call__(self) -> float:
        self.num_reads += 1
        return self.now

    async def read_after(self, num_reads: int) -> None:
        while self.num_reads == num_reads:
            await asyncio.sleep(0)


class Step(msgspec.Struct, frozen=True):
    """One target step of a scripted reply."""

    seconds: float = 0.0  # the clock moves by this before it
    drafted: int = 0
    accepted: int = 0

    @property
    def num_tokens(self) -> int:
        return self.accepted + 1


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """A whole reply."""

    steps: tuple[Step, ...]
    k: int = 3
    seconds_to_done: float = 0.0
    cached: int = 0
    with_token_ids: bool = True
    with_usage_in_chunks: bool = True
    with_metrics: bool = True
    merge: int = 1  # this many steps leave in one chunk

    @property
    def num_tokens(self) -> int:
        return sum(step.num_tokens for step in self.steps)

    def metrics(self) -> dict[str, dict[str, object]]:
        spec = [step for step in self.steps if step.drafted]
        accepted = sum(step.accepted for step in spec)
        drafted = sum(step.drafted for step in spec)
        emitted = sum(step.num_tokens for step in spec)
        return {
            "speculative_decoding": {
                "mean_acceptance_length": emitted / len(spec) if spec else 0.0,
                "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
                "acceptance_histogram": [
                    sum(step.accepted == length for step in spec) for length in range(self.k + 1)
                ],
                "num_spec_steps": len(spec),
                "num_accepted_draft_tokens": accepted,
                "num_draft_tokens": drafted,
                "num_spec_tokens": self.k,
            },
            "specserve": {
                "drafters": ["synthetic"] if spec else [],
                "drafted_per_position": at_each_position([step.drafted for step in spec]),
                "accepted_per_position": at_each_position([step.accepted for step in spec]),
                "queue_seconds": 0.0,
                "prefill_seconds": 0.0,
                "decode_seconds": 0.0,
                "preemptions": 0,
                "steps": len(self.steps),
            },
        }


def at_each_position(counts: Sequence[int]) -> list[int]:
    """How many of the counts reach each position; ends at the last that any reaches."""
    return [sum(count > place for count in counts) for place in range(max(counts, default=0))]


def geometric_steps(alpha_halves: int, k: int) -> tuple[Step, ...]:
    """Steps whose accepted runs have exactly the law of acceptance 1/alpha_halves per guess.

    Their mean length is (1 - a^(k+1)) / (1 - a) with a = 1/alpha_halves, without sampling error.
    """
    steps: list[Step] = []
    for accepted in range(k):
        num_runs = (alpha_halves - 1) * alpha_halves ** (k - 1 - accepted)
        steps += [Step(drafted=k, accepted=accepted)] * num_runs
    return (*steps, Step(drafted=k, accepted=k))


def usage_of(num_tokens: int, cached: int) -> dict[str, object]:
    return {
        "prompt_tokens": 11,
        "completion_tokens": num_tokens,
        "total_tokens": 11 + num_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def stream_of(script: Script, *, chat: bool) -> Iterable[tuple[float, bytes]]:
    """The events of a reply, each with the seconds that pass before it."""
    num_tokens = 0
    for start in range(0, len(script.steps), script.merge):
        steps = script.steps[start : start + script.merge]
        ids = list(range(num_tokens, num_tokens + sum(s.num_tokens for s in steps)))
        num_tokens += len(ids)
        text = "é " * len(ids)
        choice: dict[str, object] = {"index": 0, "finish_reason": None}
        choice |= {"delta": {"content": text}} if chat else {"text": text}
        if script.with_token_ids:
            choice["token_ids"] = ids
        usage = usage_of(num_tokens, script.cached) if script.with_usage_in_chunks else None
        yield sum(s.seconds for s in steps), event({"choices": [choice], "usage": usage})
    metrics = {"metrics": script.metrics()} if script.with_metrics else {}
    last: dict[str, object] = {"index": 0, "finish_reason": "length"}
    last |= {"delta": {}} if chat else {"text": ""}
    yield 0.0, event({"choices": [last], "usage": None} | metrics)
    yield 0.0, event({"choices": [], "usage": usage_of(num_tokens, script.cached)} | metrics)
    yield script.seconds_to_done, b"data: [DONE]\n\n"


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


class ScriptedServer:
    """Replies to request i with script i (the last one repeats) and counts as a server does."""

    def __init__(self, scripts: Sequence[Script], clock: StepClock | None = None) -> None:
        self.scripts = scripts
        self.clock = clock
        self.bodies: list[dict[str, object]] = []
        self.headers: list[dict[str, str]] = []
        self.counters = {"generated_tokens": 0, "spec_steps": 0, "spec_draft_tokens": 0}
        self.counters |= {"spec_accepted_tokens": 0, "spec_emitted_tokens": 0}
        self.num_foreign_tokens = 0  # what other clients are served during the run
        self.num_stale_scrapes = 0  # scrapes after a reply that do not show it yet
        self._stale = ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted"}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        if self._stale and self.num_stale_scrapes:
            self.num_stale_scrapes -= 1
            return web.Response(text=self._stale)
        lines = []
        for name, count in self.counters.items():
            full = f"specserve_{name}_total"
            label = '{drafter="synthetic"}' if "spec" in name else ""
            lines += [
                f"# HELP {full} of a test.",
                f"# TYPE {full} counter",
                f"{full}{label} {count}",
            ]
        lines.append('specserve_spec_steps_total{drafter="a \\"}{ strange one"} 0.0')
        self._stale = "\n".join(lines) + "\n"
        return web.Response(text=self._stale)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        script = self.scripts[min(len(self.bodies), len(self.scripts) - 1)]
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for seconds, data in stream_of(script, chat="chat" in request.path):
            num_reads = 0
            if self.clock is not None:
                self.clock.now += seconds
                num_reads = self.clock.num_reads
            if data == b"data: [DONE]\n\n":
                self._count(script)
            await response.write(data)
            if self.clock is not None:
                await self.clock.read_after(num_reads)
        return response

    def _count(self, script: Script) -> None:
        spec = [step for step in script.steps if step.drafted]
        counters = self.counters
        counters["generated_tokens"] += script.num_tokens + self.num_foreign_tokens
        counters["spec_steps"] += len(spec)
        counters["spec_draft_tokens"] += sum(step.drafted for step in spec)
        counters["spec_accepted_tokens"] += sum(step.accepted for step in spec)
        counters["spec_emitted_tokens"] += sum(step.num_tokens for step in spec)


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    """The address of an app that listens on a free port of the loopback interface."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


def app_with(complete: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.Application:
    """An app that lists a model and leaves each chat completion to `complete`."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", complete)
    return app


async def write_stream(request: web.Request, *parts: bytes) -> web.StreamResponse:
    """An event stream that is written in exactly these parts and then ends."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for part in parts:
        await response.write(part)
    return response

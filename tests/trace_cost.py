"""What tracing costs: `python -m tests.trace_cost` (not a test; a machine that does nothing else).

One server of the demo model serves 16 streams without a pause, and its tracing (every step, to an
OTLP collector on this machine: rotel) is switched on and off by turns inside the process, so that
nothing else differs. A turn is three gatherings of records, half a second each. Measured is what
begins with the third: what is recorded in one is delivered in the next, requests in that after it.
Printed are the means of the pairs' ratios of tokens/s, geometric and median, with bootstrap
intervals, the CPU time per step of each process that has a part in it, and what the hooks cost
where tracing is off.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec
import numpy as np
from aiohttp import web

from specserve.compose import build_engine
from specserve.options import ServeOptions
from specserve.serve import loop_factory, metrics_page
from specserve.server.app import create_app, create_runner
from specserve_observability.export import ExportSettings
from specserve_observability.metrics import Metrics
from specserve_observability.recorder import BoundedQueue, Recorder
from specserve_observability.records import HttpRecord, StepRecord
from specserve_observability.server_tracer import ServerTracer
from specserve_observability.tracing import Tracing, open_tracing
from tests.rotel_receiver import a_rotel
from tests.test_trace_exporter import exporters
from tests.trace_records import a_row, a_step

NUM_STREAMS = 16
WARM_SECONDS = 8.0
GATHERINGS = 3  # of a turn
Clock = Callable[[], float]


class Turn(msgspec.Struct, frozen=True):
    """One stretch of the running load. cpu: seconds of CPU time, by who took them"""

    traced: bool
    num_steps: int
    tokens_per_second: float
    step_seconds: float  # mean
    cpu: dict[str, float]


class SwitchedTracer(ServerTracer):
    """Drops what it is given while it is off."""

    def __init__(self, tracing: Tracing) -> None:
        assert tracing.server_tracer is not None
        super().__init__(tracing.recorder.metrics)
        self.ended = tracing.server_tracer.ended
        self.on = True

    def put(self, record: HttpRecord) -> None:
        if self.on:
            super().put(record)


# ---- the load, in a process of its own -----------------------------------------------------------


async def keep_streaming(url: str, num_tokens: int) -> None:
    """NUM_STREAMS at once for ever; lengths differ, so that they end at different times."""

    async def one(session: aiohttp.ClientSession, draw: random.Random) -> None:
        while True:
            length = draw.randint(num_tokens // 2, num_tokens * 3 // 2)
            prompt = f"{draw.randrange(10**6)}. Once upon a time"
            body = {"prompt": prompt, "max_tokens": length, "ignore_eos": True}
            more = {"stream": True, "temperature": 0}
            async with session.post(f"{url}/v1/completions", json=body | more) as reply:
                reply.raise_for_status()
                async for _ in reply.content.iter_any():
                    pass

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(one(session, random.Random(idx)) for idx in range(NUM_STREAMS)))


@contextlib.contextmanager
def a_load(url: str, num_tokens: int) -> Iterator[int]:
    """Its process id."""
    command = [sys.executable, "-m", __spec__.name, "--load", url, "--tokens", str(num_tokens)]
    process = subprocess.Popen(command)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


# ---- the server, in this process -----------------------------------------------------------------


@contextlib.asynccontextmanager
async def a_server(drafters: str, tracing: Tracing, tracer: ServerTracer) -> AsyncIterator[str]:
    """As `specserve serve` composes it; its address."""
    metrics = tracing.recorder.metrics
    options = ServeOptions(model="demo", drafters=drafters)
    built = build_engine(options, recorder=tracing.recorder, model_name="demo", say=print)
    app = create_app(
        built.engine,
        metrics_page=partial(metrics_page, built.engine, metrics, ""),
        feed=tracing.recorder.feed,
        http=metrics.http,
        tracer=tracer,
    )
    runner = create_runner(app)
    await built.engine.start()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield "http://{}:{}".format(*runner.addresses[0][:2])
    finally:
        await runner.cleanup()
        await built.engine.stop()


class Mark(NamedTuple):
    time: float
    cpu: dict[str, float]


class TurnTaking(BoundedQueue[StepRecord]):
    """The recorder's queue, which switches tracing each third time that it is emptied."""

    def __init__(self, switch: Callable[[bool], None], clocks: Mapping[str, Clock]) -> None:
        super().__init__(capacity=8192)
        self._switch = switch
        self._clocks = clocks
        self._order = pairs_of_turns()
        self.marks: list[Mark] = []
        self.states: list[bool] = []  # of each turn

    def take(self, at_most: int | None = None) -> list[StepRecord]:
        taken = super().take(at_most)
        if len(self.marks) % GATHERINGS == 0:
            self.states.append(next(self._order))
            self._switch(self.states[-1])
        cpu = {name: clock() for name, clock in self._clocks.items()}
        self.marks.append(Mark(time.time(), cpu))
        return taken


def pairs_of_turns() -> Iterator[bool]:
    """Each pair in an order of its own: on and off see the same drift."""
    draw = random.Random(0)
    while True:
        first = draw.random() < 0.5
        yield first
        yield not first


def turns_of(queue: TurnTaking, num_turns: int, steps: Sequence[StepRecord]) -> list[Turn]:
    ends = [step.commit_end for step in steps]
    emitted = [sum(row.num_emitted_tokens for row in step.rows) for step in steps]
    turns = []
    for turn_idx in range(num_turns):
        switched = turn_idx * GATHERINGS
        begin, end = queue.marks[switched + 2], queue.marks[switched + 4]
        first, last = bisect.bisect(ends, begin.time), bisect.bisect(ends, end.time)
        seconds = ends[last] - ends[first]
        cpu = {name: end.cpu[name] - begin.cpu[name] for name in begin.cpu}
        speed = sum(emitted[first + 1 : last + 1]) / seconds
        step = seconds / (last - first)
        turns.append(Turn(queue.states[turn_idx], last - first, speed, step, cpu))
    return turns


def cpu_clock(pid: int) -> Clock:
    """CPU seconds of a process, to the nanosecond (clock_getcpuclockid(3))."""
    return partial(time.clock_gettime, ~pid << 3 | 2)


def thread_clock(name: str) -> Clock:
    (ident,) = [one.ident for one in threading.enumerate() if one.name == name]
    assert ident is not None
    return partial(time.clock_gettime, time.pthread_getcpuclockid(ident))


async def measure(args: argparse.Namespace, folder: Path) -> list[Turn]:
    with contextlib.ExitStack() as stack:
        rotel = stack.enter_context(a_rotel(folder, tells=False))
        to_file = args.to == "file"
        settings = ExportSettings(
            otlp_endpoint=None if to_file else rotel.grpc if args.to == "grpc" else rotel.http,
            otlp_protocol="grpc" if args.to == "grpc" else "http/protobuf",
            trace_file=str(folder / "traces.jsonl") if to_file else None,
            steps_per_second=float("inf"),
            exporter=args.exporter,
        )
        tracing = open_tracing(settings, service_version="1")
        stack.callback(tracing.shutdown)
        clocks = {"receiver": cpu_clock(rotel.pid), "server": time.process_time}
        clocks["gathering thread"] = thread_clock("specserve-spans")
        for pid in exporters():
            clocks["side process"] = cpu_clock(pid)
        tracer = SwitchedTracer(tracing)

        def switch(on: bool) -> None:
            if not args.placebo:
                tracing.recorder.has_sink = tracer.on = on

        async with a_server(args.drafters, tracing, tracer) as url:
            with a_load(url, args.tokens) as pid:
                clocks["client"] = cpu_clock(pid)
                await asyncio.sleep(WARM_SECONDS)
                with tracing.recorder.feed.listening(1_000_000) as listener:
                    before = tracing.recorder.steps
                    tracing.recorder.steps = queue = TurnTaking(switch, clocks)
                    while len(queue.marks) < (args.turns + 1) * GATHERINGS:
                        await asyncio.sleep(1)
                    tracing.recorder.steps = before
                    steps = listener.take()
        lost = tracing.recorder.metrics
        print(f"{lost.num_spans_dropped} spans and {lost.num_records_dropped} records lost")
    return turns_of(queue, args.turns, steps)


# ---- what it says --------------------------------------------------------------------------------


def seconds_of_record_step(recorder: Recorder | Metrics) -> float:
    """Of one step of 16 rows; the least of many tries."""
    step = a_step(0, [a_row(idx) for idx in range(NUM_STREAMS)])
    record = recorder.add_step if isinstance(recorder, Metrics) else recorder.record_step
    tries = []
    for _ in range(50):
        began = time.perf_counter()
        for _ in range(100):
            record(step)
        tries.append((time.perf_counter() - began) / 100)
    return min(tries)


def with_interval(values: Sequence[float]) -> str:
    """The neighbours of a shared machine make some pairs say anything: the median bears them."""
    drawn = np.log(np.random.default_rng(0).choice(values, (4000, len(values))))
    found = []
    for name, mean in (("geometric mean", np.mean), ("median", np.median)):
        low, high = np.exp(np.quantile(mean(drawn, axis=1), (0.025, 0.975)))
        found.append(f"{name} {np.exp(mean(np.log(values))):.4f} (95 %: {low:.4f} to {high:.4f})")
    return ", ".join(found)


def report(turns: Sequence[Turn]) -> None:
    on = [turn for turn in turns if turn.traced]
    off = [turn for turn in turns if not turn.traced]
    assert all(a.traced != b.traced for a, b in zip(turns[::2], turns[1::2], strict=True))
    step = statistics.median(turn.step_seconds for turn in off)
    speeds = [a.tokens_per_second / b.tokens_per_second for a, b in zip(on, off, strict=True)]
    print(f"traced / plain, tokens/s: {with_interval(speeds)}, {len(speeds)} pairs")
    print(f"a plain step takes {step * 1e3:.1f} ms")
    for name in on[0].cpu:
        cost = [
            sum(turn.cpu[name] for turn in some) / sum(turn.num_steps for turn in some)
            for some in (on, off)
        ]
        print(f"CPU time per step: {name}: {cost[0] * 1e3:.3f} ms on, {cost[1] * 1e3:.3f} ms off")
    hooks = seconds_of_record_step(Recorder()) - seconds_of_record_step(Metrics())
    print(
        f"without tracing a step of {NUM_STREAMS} rows pays {hooks * 1e6:.2f} us for its hooks, "
        f"{hooks / step:.4%} of it"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=200, help="of 1.5 s, half of them traced")
    parser.add_argument("--tokens", type=int, default=128, help="of a stream, in the mean")
    parser.add_argument("--drafters", default="none", help="none has the shortest steps")
    parser.add_argument("--exporter", choices=("process", "thread"), default="process")
    parser.add_argument("--to", choices=("http", "grpc", "file"), default="http")
    parser.add_argument("--placebo", action="store_true", help="never off: what would be seen then")
    parser.add_argument("--json", type=Path, help="where the turns go")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.load:
        asyncio.run(keep_streaming(args.load, args.tokens))
        return 0
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with (
        tempfile.TemporaryDirectory() as text,
        asyncio.Runner(loop_factory=loop_factory()) as runner,
    ):
        turns = runner.run(measure(args, Path(text)))
    report(turns)
    if args.json:
        args.json.write_bytes(msgspec.json.encode(turns))
    return 0


if __name__ == "__main__":
    sys.exit(main())

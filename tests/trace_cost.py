"""What tracing costs: `python -m tests.trace_cost` (not a test; a machine that does nothing else).

Two servers of the demo model, one traced (every step, to an OTLP collector on this machine: rotel
where it is installed), take turns: each round is 16 streams at once. Printed are tokens/s of both,
the median of the rounds' ratios with its interval, and what the untraced one pays per step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp

from specserve_observability.export import ExportSettings
from specserve_observability.metrics import Metrics
from specserve_observability.recorder import Recorder
from specserve_observability.tracing import open_tracing
from tests.rotel_receiver import a_rotel
from tests.test_trace_exporter import exporters
from tests.trace_records import a_row, a_step

NUM_STREAMS = 16


@contextlib.contextmanager
def a_server(folder: Path, name: str, *options: str) -> Iterator[str]:
    """The command itself; its address."""
    log = folder / f"{name}.log"
    command = [sys.executable, "-m", "specserve", "serve", "--model", "demo", "--port", "0"]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--drafters", "none", *options], stdout=out, stderr=subprocess.STDOUT
        )
    try:
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield found.group(0)
    finally:
        process.terminate()
        process.wait()


async def tokens_per_second(url: str, num_tokens: int) -> float:
    async def stream(session: aiohttp.ClientSession, idx: int) -> int:
        body = {"prompt": f"{idx}. Once", "max_tokens": num_tokens, "ignore_eos": True}
        more = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        async with session.post(f"{url}/v1/completions", json=body | more) as reply:
            text = await reply.text()
        (count,) = re.findall(r'"completion_tokens":(\d+)', text)
        return int(count)

    began = time.perf_counter()
    async with aiohttp.ClientSession() as session:
        counts = await asyncio.gather(*(stream(session, idx) for idx in range(NUM_STREAMS)))
    return sum(counts) / (time.perf_counter() - began)


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


def exporter_seconds_per_step(folder: Path, num_steps: int = 300) -> float:
    """CPU time that the side process takes for a step of 16 rows, delivery included."""
    with a_rotel(folder) as rotel:
        settings = ExportSettings(otlp_endpoint=rotel.http, steps_per_second=1e9)
        tracing = open_tracing(settings, service_version="1")
        (pid,) = exporters()
        time.sleep(2)  # it starts
        began = _cpu_seconds(pid)
        rows = [a_row(idx, drafted=3, accepted=2) for idx in range(NUM_STREAMS)]
        for idx in range(num_steps):
            tracing.recorder.record_step(a_step(idx, rows))
            time.sleep(0.01)
        time.sleep(2)  # it delivers
        taken = _cpu_seconds(pid) - began
        tracing.shutdown()
    return taken / num_steps


def _cpu_seconds(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48, help="of each stream")
    parser.add_argument("--exporter", choices=("process", "thread"), default="process")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text, contextlib.ExitStack() as stack:
        folder = Path(text)
        rotel = stack.enter_context(a_rotel(folder))
        plain = stack.enter_context(a_server(folder, "plain"))
        options = ["--otlp-endpoint", rotel.http, "--trace-steps-per-second", "inf"]
        options += ["--trace-exporter", args.exporter]
        traced = stack.enter_context(a_server(folder, "traced", *options))
        ratios = asyncio.run(_rounds(plain, traced, args.rounds, args.tokens))
    with tempfile.TemporaryDirectory() as text:
        taken = exporter_seconds_per_step(Path(text))
    ratios.sort()
    tail = max(0, round(len(ratios) / 2 - 0.98 * len(ratios) ** 0.5))  # a sign test's 95 %
    print(
        f"traced / plain: median {statistics.median(ratios):.4f}, 95 % of the median within "
        f"{ratios[tail]:.4f} to {ratios[-1 - tail]:.4f}, {len(ratios)} rounds"
    )
    print(
        f"the side process takes {taken * 1e3:.2f} ms of CPU time for a step of {NUM_STREAMS} rows"
    )
    off = seconds_of_record_step(Recorder()) - seconds_of_record_step(Metrics())
    print(f"without tracing a step of {NUM_STREAMS} rows pays {off * 1e6:.2f} us for its hooks")
    return 0


async def _rounds(plain: str, traced: str, num_rounds: int, num_tokens: int) -> list[float]:
    for url in (plain, traced):
        await tokens_per_second(url, num_tokens)
    ratios = []
    for idx in range(num_rounds):
        order = (plain, traced) if idx % 2 else (traced, plain)
        speeds = {url: await tokens_per_second(url, num_tokens) for url in order}
        ratios.append(speeds[traced] / speeds[plain])
        print(f"round {idx}: {speeds[plain]:.0f} plain, {speeds[traced]:.0f} traced", flush=True)
    return ratios


if __name__ == "__main__":
    sys.exit(main())

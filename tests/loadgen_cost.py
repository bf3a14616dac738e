"""What the load generator itself costs: events per second of one core, and latency that it adds.

    python -m tests.loadgen_cost          # wants a machine of two cores on which nothing else runs

A sink in C, on a core of its own, writes prepared bytes to sockets: first as fast as they are
taken, then one event per stream each PERIOD, stamped with the time of its write. The client reads
it as it reads any server; in turns with it a loop of bare sockets reads the same, and what the
client has more is what it adds. (A sink in Python, tried before, was late itself by 2 to 5 ms at
p99 by its own timers, and that fell on whoever read.)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import selectors
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from specserve_loadgen.prompts import load_prompts
from specserve_loadgen.run import run_load
from specserve_loadgen.settings import ClosedLoop, Settings
from specserve_loadgen.stats import distribution

NUM_STREAMS = 64
NUM_EVENTS = 2500  # per stream, as fast as they are taken
NUM_ROUNDS = 4
NUM_PACED = 300  # per stream, one each PERIOD
PERIOD = 0.02  # seconds: 3,200 events/s in all
STAMP = re.compile(rb'"token_ids":\[(\d+)\]')
# As long as a chat chunk of a real server.
EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef01234567","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"demo","choices":[{"index":0,"delta":{"content":" word"},'
    b'"logprobs":null,"finish_reason":null,"token_ids":[STAMP]}],"usage":{"prompt_tokens":9,'
    b'"completion_tokens":1,"total_tokens":10}}\n\n'
)
DONE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\ndata: [DONE]\n\n'


# ---- the sink ----------------------------------------------------------------------------------


def built_sink(folder: Path) -> Path:
    """The server in loadgen_sink.c, compiled."""
    program = folder / "sink"
    source = Path(__file__).with_name("loadgen_sink.c")
    subprocess.run(["cc", "-O2", "-D_GNU_SOURCE", "-o", program, source], check=True)
    return program


@contextlib.contextmanager
def serving(
    program: Path, num_events: int, period: float = 0.0, spread: float = 0.0
) -> Iterator[int]:
    """Its port. period: seconds between the events of a stream, 0: as fast as they are taken;
    spread: seconds over which the events of all streams are spread, 0: all at once"""
    before, after = EVENT.split(b"STAMP")
    numbers = NUM_STREAMS, num_events, round(period * 1e6), round(spread * 1e6)
    arguments = [*map(str, numbers), before, after, DONE]
    with subprocess.Popen(
        [program, *arguments],
        stdout=subprocess.PIPE,
        preexec_fn=lambda: os.sched_setaffinity(0, {1}),
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


# ---- the readers -------------------------------------------------------------------------------


def client(port: int) -> tuple[int, float, float, list[float]]:
    """(events, wall seconds, CPU seconds, seconds from each event's write to its record)"""
    settings = Settings(
        url=f"http://127.0.0.1:{port}",
        load=ClosedLoop(NUM_STREAMS),
        num_requests=NUM_STREAMS,
        keep_output=True,
    )
    prompts = load_prompts(None)
    wall, cpu = time.perf_counter(), time.process_time()
    result = asyncio.run(run_load(settings, prompts))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    latencies = []
    for record in result.records:
        assert record.succeeded, record.failure
        assert record.output is not None
        assert record.output.token_ids is not None
        stamps = record.output.token_ids
        for chunk, stamp in zip(record.chunks, stamps, strict=True):
            latencies.append(result.clock_zero + chunk.seconds - stamp / 1e6)
    return len(latencies), wall, cpu, latencies


def bare_sockets(port: int) -> list[float]:
    """Seconds from each event's write to the return of the read that brought it."""
    selector = selectors.DefaultSelector()
    for _ in range(NUM_STREAMS):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(b"POST / HTTP/1.1\r\n\r\n")
        selector.register(connection, selectors.EVENT_READ)
    latencies = []
    while selector.get_map():
        for key, _ in selector.select():
            reader = key.fileobj
            assert isinstance(reader, socket.socket)
            data = reader.recv(1 << 16)
            now = time.perf_counter()
            latencies += [now - int(stamp) / 1e6 for stamp in STAMP.findall(data)]
            if not data:
                selector.unregister(reader)
                reader.close()
    return latencies


def shown(name: str, seconds: list[float]) -> str:
    seen = distribution(seconds)
    assert seen is not None
    cells = "  ".join(f"{q} {getattr(seen, q) * 1e3:.3f}" for q in ("p50", "p90", "p99"))
    return f"  {name:14}{cells}  worst {seen.max * 1e3:.1f}  n {seen.count}"


def p99(seconds: list[float]) -> float:
    seen = distribution(seconds)
    assert seen is not None
    return seen.p99


def added_latency(sink: Path, spread: float) -> None:
    bare: list[float] = []
    ours: list[float] = []
    added = []
    for _ in range(NUM_ROUNDS):  # in turns: what the machine does meets both
        with serving(sink, NUM_PACED, PERIOD, spread) as port:
            alone = bare_sockets(port)
        with serving(sink, NUM_PACED, PERIOD, spread) as port:
            read = client(port)[3]
        added.append((p99(read) - p99(alone)) * 1e3)
        bare, ours = bare + alone, ours + read
    print(shown("bare sockets", bare))
    print(shown("client", ours))
    print("  added at p99, by round: " + "  ".join(f"{one:.3f}" for one in added))
    print(f"  added at p99, all rounds: {(p99(ours) - p99(bare)) * 1e3:.3f}", flush=True)


def main() -> None:
    os.sched_setaffinity(0, {0})
    with tempfile.TemporaryDirectory() as folder:
        sink = built_sink(Path(folder))
        for _ in range(NUM_ROUNDS):
            with serving(sink, NUM_EVENTS) as port:
                count, wall, cpu, _ = client(port)
            print(f"{count / wall:,.0f} events/s on one core, {count / cpu:,.0f} per CPU second")
        print(f"{NUM_STREAMS} streams, an event each {PERIOD * 1e3:g} ms; write to read, ms")
        print("all streams at once, as the steps of a server end:")
        added_latency(sink, 0.0)
        print("evenly spread:")
        added_latency(sink, PERIOD)


if __name__ == "__main__":
    main()

"""What the load generator itself costs: events per second of one core, and latency that it adds.

    python -m tests.loadgen_cost          # wants a machine of two cores on which nothing else runs

A sink in a process and on a core of its own writes prepared bytes to sockets: first as fast as they
are taken, then one event per stream each PERIOD, stamped with the time of its write. The client
reads it as it reads any server; beside it a loop of bare sockets reads the same, and what the
client has more is what it adds.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import selectors
import socket
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

from specserve_loadgen.prompts import load_prompts
from specserve_loadgen.run import run_load
from specserve_loadgen.settings import ClosedLoop, Settings
from specserve_loadgen.stats import distribution

T = TypeVar("T")

NUM_STREAMS = 64
NUM_EVENTS = 2500  # per stream, as fast as they are taken
NUM_PACED = 300  # per stream, one each PERIOD
PERIOD = 0.02  # seconds: 3,200 events/s in all
STAMP = re.compile(rb'"token_ids":\[(\d+)\]')
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
DONE = b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1}}\n\ndata: [DONE]\n\n'


def microseconds() -> int:
    """On the clock that all processes of this machine share."""
    return round(time.perf_counter() * 1e6)


def event(stamp: int) -> bytes:
    """As long as a chat chunk of a real server."""
    return (
        b'data: {"id":"chatcmpl-0123456789abcdef01234567","object":"chat.completion.chunk",'
        b'"created":1700000000,"model":"demo","choices":[{"index":0,"delta":{"content":" word"},'
        b'"logprobs":null,"finish_reason":null,"token_ids":[%d]}],"usage":{"prompt_tokens":9,'
        b'"completion_tokens":1,"total_tokens":10}}\n\n' % stamp
    )


# ---- the sink ----------------------------------------------------------------------------------


def sink(ports: Connection, is_paced: bool) -> None:
    os.sched_setaffinity(0, {1})
    asyncio.run(_serve(ports, is_paced))


async def _serve(ports: Connection, is_paced: bool) -> None:
    num_open, all_open = 0, asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_open
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"POST"):
            num_open += 1
            place = num_open
            if num_open == NUM_STREAMS:
                all_open.set()
            writer.write(HEAD)
            await all_open.wait()
            await (_paced(writer, place) if is_paced else _full(writer))
            writer.write(DONE)
        else:
            body = b'{"data":[{"id":"demo"}]}'
            writer.write(
                b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 24\r\n\r\n" + body
            )
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    ports.send(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def _full(writer: asyncio.StreamWriter) -> None:
    data = event(microseconds())
    for _ in range(NUM_EVENTS):
        writer.write(data)
        await writer.drain()


async def _paced(writer: asyncio.StreamWriter, place: int) -> None:
    zero = time.perf_counter() + PERIOD * place / NUM_STREAMS
    for idx in range(NUM_PACED):
        await asyncio.sleep(max(0.0, zero + idx * PERIOD - time.perf_counter()))
        writer.write(event(microseconds()))


def with_sink(measure: Callable[[int], T], *, is_paced: bool) -> T:
    receiving, sending = multiprocessing.Pipe()
    process = multiprocessing.Process(target=sink, args=(sending, is_paced), daemon=True)
    process.start()
    try:
        return measure(receiving.recv())
    finally:
        process.kill()
        process.join()


# ---- the readers -------------------------------------------------------------------------------


def client(port: int) -> tuple[int, float, float, list[float]]:
    """(events, wall seconds, CPU seconds, seconds from each event's write to its record)"""
    first: list[float] = []

    def clock() -> float:
        now = time.perf_counter()
        if not first:
            first.append(now)  # the run's zero: its first reading
        return now

    settings = Settings(
        url=f"http://127.0.0.1:{port}",
        load=ClosedLoop(NUM_STREAMS),
        num_requests=NUM_STREAMS,
        keep_output=True,
    )
    prompts = load_prompts(None)
    wall, cpu = time.perf_counter(), time.process_time()
    result = asyncio.run(run_load(settings, prompts, clock=clock))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    latencies = []
    for record in result.records:
        assert record.succeeded, record.failure
        assert record.output is not None
        assert record.output.token_ids is not None
        stamps = record.output.token_ids
        for chunk, stamp in zip(record.chunks, stamps, strict=True):
            latencies.append(first[0] + chunk.seconds - stamp / 1e6)
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


def main() -> None:
    os.sched_setaffinity(0, {0})
    num_events, wall, cpu, _ = with_sink(client, is_paced=False)
    print(f"{num_events} events in {wall:.2f} s: {num_events / wall:,.0f} events/s on one core")
    print(f"{num_events / cpu:,.0f} events per second of CPU time")
    bare = distribution(with_sink(bare_sockets, is_paced=True))
    ours = distribution(with_sink(client, is_paced=True)[3])
    assert bare is not None
    assert ours is not None
    print(f"{NUM_STREAMS} streams, an event each {PERIOD * 1e3:g} ms; write to read, ms:")
    for name, seen in (("bare sockets", bare), ("client", ours)):
        cells = "  ".join(f"{q} {getattr(seen, q) * 1e3:.3f}" for q in ("p50", "p90", "p99"))
        print(f"  {name:14}{cells}  n {seen.count}")
    print(f"  added at p99: {(ours.p99 - bare.p99) * 1e3:.3f} ms")


if __name__ == "__main__":
    main()

"""From a trace alone one can tell what a request waited for.

A request is delayed on purpose, in one place after the other, for longer than all else takes; what
its spans say is all that the answer is made of.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from specserve.config import EngineConfig
from specserve_observability.records import RequestRecord, StepRecord
from specserve_observability.tracing import Tracing
from tests.engines import ListRecorder
from tests.http_server import CONFIG, Pace, Server, a_server
from tests.otlp_receiver import attributes_of
from tests.raw_http import Reply, connect
from tests.scripted import says
from tests.trace_reading import FileTracing, Trace

TRACE_ID = "d" * 32
DELAYED = {"traceparent": f"00-{TRACE_ID}-{'e' * 16}-01"}
DELAY = 1.0  # seconds
MANY_STEPS = 100_000
QUEUED_FOR = {
    "admission": "admission",
    "kv_capacity": "KV capacity",
    "token_budget": "prefill behind others",
}


def what_delayed(trace: Trace) -> str:
    """Where most of the time went."""
    seconds: dict[str, float] = {}
    for span in trace.spans:
        if span.trace_id.hex() != TRACE_ID:
            continue
        said = attributes_of(span.attributes)
        lasted = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        if span.name == "tokenize":
            seconds["tokenize"] = lasted
        elif span.name == "queue":
            seconds[QUEUED_FOR[str(said["specserve.queue.reason"])]] = lasted
        elif span.name == "stream":
            seconds["slow client"] = float(str(said["specserve.stream.blocked"]))
    assert {"tokenize", "slow client"} < seconds.keys()
    return max(seconds, key=seconds.__getitem__)


class Tee(ListRecorder):
    """Keeps every record, and hands it on to tracing."""

    def __init__(self, tracing: Tracing) -> None:
        super().__init__()
        self._recorder = tracing.recorder

    def record_step(self, record: StepRecord) -> None:
        super().record_step(record)
        self._recorder.record_step(record)

    def record_request(self, record: RequestRecord) -> None:
        super().record_request(record)
        self._recorder.record_request(record)


Delay = Callable[[Server, Pace], Awaitable[None]]


async def ask_delayed(server: Server, prompt: str = "x:") -> Reply:
    body = {"prompt": prompt, "temperature": 0, "stream": True, "max_tokens": 3}
    reply = await server.post("/v1/completions", {**body, "ignore_eos": True}, headers=DELAYED)
    assert reply.status == 200
    return reply


async def in_tokenization(server: Server, pace: Pace) -> None:
    """Both threads for text have something else to do."""
    pace.allow(MANY_STEPS)
    free = threading.Event()
    busy = [asyncio.create_task(server.engine.run_off_loop(free.wait)) for _ in range(2)]
    asked = asyncio.create_task(ask_delayed(server))
    await asyncio.sleep(DELAY)
    free.set()
    await asyncio.gather(asked, *busy)


async def behind(
    server: Server, pace: Pace, ahead: list[dict[str, object]], prompt: str = "x:"
) -> None:
    """Some run, and the delayed one waits; the step after the plan that left it out is held up."""
    asked = [asyncio.create_task(server.complete(ignore_eos=True, **one)) for one in ahead]
    while (now := server.engine.snapshot()).num_running + now.num_waiting < len(ahead):
        await asyncio.sleep(0.002)
    pace.allow()
    await server.has(running=len(ahead))
    asked.append(asyncio.create_task(ask_delayed(server, prompt)))
    await server.has(running=len(ahead), waiting=1)
    pace.allow()
    await asyncio.sleep(DELAY)
    pace.allow(MANY_STEPS)
    await asyncio.gather(*asked)


async def in_admission(server: Server, pace: Pace) -> None:
    """Four run, and no more may."""
    await behind(server, pace, [{"max_tokens": 10}] * 4)


async def by_kv_capacity(server: Server, pace: Pace) -> None:
    """One that runs has nearly all blocks of the pool."""
    await behind(server, pace, [{"prompt": "z" * 185 + ":", "max_tokens": 5}], "x" * 30 + ":")


async def by_prompts_ahead(server: Server, pace: Pace) -> None:
    """A long prompt takes each step's whole token budget."""
    await behind(server, pace, [{"prompt": "y" * 150 + ":", "max_tokens": 1}])


async def by_its_client(server: Server, pace: Pace) -> None:
    """It does not read while the reply grows beyond what socket buffers hold."""
    pace.allow(MANY_STEPS)
    body = {"prompt": "x:", "temperature": 0, "stream": True, "max_tokens": 200, "n": 4}
    async with connect(server.port, receive_buffer=2048) as connection:
        more = {"ignore_eos": True, "speculation": {"drafter": "none"}}
        await connection.request("POST", "/v1/completions", {**body, **more}, headers=DELAYED)
        while len(server.recorder.requests) < 4:
            await asyncio.sleep(0.01)
        await asyncio.sleep(DELAY)
        assert (await connection.read_reply()).events[-1] == "[DONE]"


SMALL = msgspec.structs.replace(CONFIG, max_prefill_chunk=16, max_num_batched_tokens=16)


@pytest.mark.parametrize(
    ("answer", "delay", "config"),
    [
        ("tokenize", in_tokenization, CONFIG),
        ("admission", in_admission, msgspec.structs.replace(CONFIG, max_num_seqs=4)),
        (
            "KV capacity",
            by_kv_capacity,
            msgspec.structs.replace(CONFIG, num_blocks=50, max_model_len=200),
        ),
        ("prefill behind others", by_prompts_ahead, SMALL),
        ("slow client", by_its_client, CONFIG),
    ],
)
async def test_a_trace_alone_tells_what_a_request_waited_for(
    tmp_path: Path, answer: str, delay: Delay, config: EngineConfig
) -> None:
    to_file, pace = FileTracing(tmp_path / "traces.jsonl"), Pace()
    async with a_server(
        says("abcdefghij " * 30, then=None),
        config=config,
        tracer=to_file.tracing.server_tracer,
        recorder=Tee(to_file.tracing),
        on_forward=pace,
        send_buffer=4096,
    ) as server:
        await delay(server, pace)
        pace.allow(MANY_STEPS)
    trace = await asyncio.to_thread(to_file.finish)
    assert what_delayed(trace) == answer

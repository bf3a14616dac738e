"""GET /specserve/events: sums that agree with the records, and nothing of anybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any  # decoded JSON

import pytest

from specserve.server.keys import KeyRing
from specserve.server.state import ServerSettings
from specserve_observability.recorder import StepFeed
from specserve_observability.records import RowRecord, StepRecord
from tests.http_server import Pace, Server, a_server
from tests.raw_http import Connection, ask, connect, strict_json
from tests.scripted import says

pytestmark = pytest.mark.timeout(60)

PATH = "/specserve/events"
FAST = ServerSettings(event_seconds=0.01, idle_event_seconds=0.05)
SECRET = "a text that is nobody else's business"


async def windows(connection: Connection) -> AsyncIterator[Any]:
    """Every event of a stream whose head has been read; ends where the stream does."""
    while block := await connection.read_chunk():
        name, data = block.decode().removesuffix("\n\n").split("\n")
        assert name == "event: window"
        yield strict_json(data.removeprefix("data: ").encode())


async def listen(server: Server, connection: Connection, **headers: str) -> AsyncIterator[Any]:
    await connection.request("GET", PATH, headers=headers)
    status, head = await connection.read_head()
    assert status == 200
    assert head["content-type"].startswith("text/event-stream")
    return windows(connection)


async def until_idle(stream: AsyncIterator[Any]) -> list[Any]:
    """The windows with work in them, up to the first without."""
    seen = []
    async for window in stream:
        if not window["steps"] and seen:
            return seen
        if window["steps"]:
            seen.append(window)
    raise AssertionError("the stream ended")


@pytest.mark.parametrize("drafter", ["part", "none"])
async def test_the_sums_are_those_of_the_steps_records(drafter: str) -> None:
    async with a_server(says(SECRET), settings=FAST) as server, connect(server.port) as one:
        stream = await listen(server, one)
        first = await anext(stream)
        assert (first["steps"], first["running"], first["seconds"]) == (0, 0, 0)
        assert first["blocks_free"] == server.engine.snapshot().blocks_total
        speculation = {"drafter": drafter, "max_draft_tokens": 3}
        await asyncio.gather(*(server.chat(speculation=speculation) for _ in range(3)))
        seen = await until_idle(stream)
        rows = [row for step in server.recorder.steps for row in step.rows]

    def total(name: str) -> int:
        return sum(window[name] for window in seen)

    assert total("steps") == len(server.recorder.steps)
    assert total("tokens") == sum(row.num_emitted_tokens for row in rows)
    assert total("prefill_tokens") == sum(row.num_tokens for row in rows if row.is_prefill)
    assert total("dropped") == 0
    drafted = sum(row.num_draft_tokens for row in rows)
    accepted = sum(row.num_accepted_tokens for row in rows)
    assert sum(sum(window["drafted_per_position"]) for window in seen) == drafted
    assert sum(sum(window["accepted_per_position"]) for window in seen) == accepted
    named = [one for window in seen for one in window["drafters"]]
    assert {one["drafter"] for one in named} == {drafter} - {"none"}
    assert sum(one["drafted"] for one in named) == drafted
    by_k = [sum(w["rows_by_k"][k] for w in seen if len(w["rows_by_k"]) > k) for k in range(4)]
    assert sum(by_k) == sum(1 for row in rows if not row.is_prefill)
    assert sum(k * count for k, count in enumerate(by_k)) == drafted
    for window in seen:
        assert all(value >= 0 for value in window["phase_seconds"].values())
        assert window["seconds"] > 0


async def test_a_window_says_what_runs_and_waits_now() -> None:
    pace = Pace()
    async with (
        a_server(says(SECRET), settings=FAST, on_forward=pace) as server,
        connect(server.port) as one,
    ):
        stream = await listen(server, one)
        asked = [asyncio.create_task(server.chat()) for _ in range(2)]
        try:
            await asyncio.sleep(0.5)
            pace.allow(2)  # the second may have come when a step with the first had begun
            await server.has(running=2)
            async with asyncio.timeout(60):
                while (window := await anext(stream))["running"] != 2:
                    pass
            assert (window["waiting"], window["engine_up"]) == (0, True)
            assert window["blocks_live"] > 0
        finally:
            pace.allow(1000)  # a server whose step waits for ever cannot be closed
        await asyncio.gather(*asked)


async def test_no_text_and_no_name_of_anybody_is_in_an_event() -> None:
    async with a_server(says(SECRET), settings=FAST) as server, connect(server.port) as one:
        stream = await listen(server, one)
        await server.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "say"}], "temperature": 0},
            {"x-request-id": "the-id-of-somebody"},
        )
        seen = await until_idle(stream)
        ids = {row.request_id for step in server.recorder.steps for row in step.rows}
    text = str(seen)
    assert len(ids) == 1
    for secret in (*ids, "the-id-of-somebody", "business", "token_ids", "traceparent"):
        assert secret not in text
    strings = {value for window in seen for value in window.values() if isinstance(value, str)}
    assert strings == {"window"}


async def test_keys_are_asked_for() -> None:
    key = "k-0123456789abcdef"
    keyed = ServerSettings(keys=KeyRing([key]), event_seconds=0.01)
    async with a_server(says("a"), settings=keyed) as server, connect(server.port) as one:
        assert (await ask(server.port, "GET", PATH)).status == 401
        bad = await ask(server.port, "GET", PATH, headers={"authorization": f"Bearer {key}x"})
        assert bad.status == 401
        stream = await listen(server, one, authorization=f"Bearer {key}")
        assert (await anext(stream))["running"] == 0


async def test_too_many_listeners_are_refused_until_one_leaves() -> None:
    settings = ServerSettings(max_event_listeners=1, event_seconds=0.01, idle_event_seconds=0.01)
    async with a_server(says("a"), settings=settings) as server:
        async with connect(server.port) as one:
            await anext(await listen(server, one))
            refused = await server.get(PATH)
            assert (refused.status, refused.error["code"]) == (429, "too_many_listeners")
        while server.recorder.feed.num_listeners:  # noticed at the next write
            await asyncio.sleep(0.01)
        async with connect(server.port) as one:
            await anext(await listen(server, one))


async def test_a_shutdown_waits_for_no_listener() -> None:
    async with a_server(says("a"), settings=FAST) as server, connect(server.port) as one:
        stream = await listen(server, one)
        await server.runner.cleanup()
        assert [window["steps"] async for window in stream]  # ends, by the end of the chunks


async def test_head_is_answered_and_ends() -> None:
    async with a_server(says("a")) as server, connect(server.port) as one:
        await one.request("HEAD", PATH, headers={"connection": "close"})
        status, _ = await one.read_head()
        assert status == 200
        assert await one.is_closed()
        assert server.recorder.feed.num_listeners == 0


def a_step(step_idx: int) -> StepRecord:
    row = RowRecord("r", None, "none", 1, 0, 0, 1)
    zeros = dict.fromkeys(
        ("plan_start", "plan_end", "draft_start", "forward_start", "verify_start"), 0.0
    )
    counts = dict.fromkeys(
        ("num_running", "num_waiting", "blocks_free", "blocks_cached", "blocks_live"), 0
    )
    return StepRecord(
        step_idx=step_idx,
        verify_end=0.0,
        commit_end=0.0,
        rows=(row,),
        token_budget=1,
        num_preempted=0,
        **zeros,
        **counts,
    )


def test_a_slow_listener_loses_steps_is_told_and_takes_none_from_others() -> None:
    feed = StepFeed()
    feed.put(a_step(0))  # nobody listens
    with feed.listening(4) as slow, feed.listening(100) as fast:
        for step_idx in range(1, 11):
            feed.put(a_step(step_idx))
            assert [step.step_idx for step in fast.take()] == [step_idx]
        assert [step.step_idx for step in slow.take()] == [1, 2, 3, 4]
        assert (slow.num_dropped, fast.num_dropped) == (6, 0)
        feed.put(a_step(11))
        for listener in (slow, fast):
            assert [step.step_idx for step in listener.take()] == [11]
    feed.put(a_step(12))
    assert (slow.take(), fast.take(), feed.num_listeners) == ([], [], 0)

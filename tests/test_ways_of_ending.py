"""Replies to public bug reports, each asked in every way (tests/ways.py); README.md has the table.

Here: requests that are refused, left, crowded out or cut by a shutdown, whoever guesses.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import msgspec
import pytest

from specserve.server.app import drain
from specserve.server.state import ServerSettings
from tests.http_server import CONFIG, Pace, Server
from tests.raw_http import Connection, Reply, connect
from tests.scripted import END, VOCAB_SIZE, says
from tests.test_server_endings import until_live
from tests.ways import Way, a_scripted_server, told

pytestmark = pytest.mark.timeout(120)

V = VOCAB_SIZE
LETTERS = "abcdefghij" * 30

# ---- refused ---------------------------------------------------------------------------------

REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "logit_bias": (
        [{"logit_bias": bias} for bias in ({"-1": 1}, {str(V): 1}, {"abc": 1}, {"5": 1e9})],
        "logit_bias",
    ),
    "empty prompt": ([{"prompt": prompt} for prompt in ("", [], [[]], [""])], "prompt"),
    "overflow": (
        [{"prompt": [1] * 257}, {"prompt": [1] * 256}, {"prompt": "a" * 300}],
        "prompt",
    ),
    "overflow by max_tokens": ([{"prompt": [1] * 200, "max_tokens": 57}], "max_tokens"),
    "negative": ([{"max_tokens": value} for value in (0, -5, -(10**12))], "max_tokens"),
    "penalty": ([{"presence_penalty": value} for value in (-5, 2.1, 1e308)], "presence_penalty"),
    "guesses": (
        [{"speculation": {"max_draft_tokens": value}} for value in (-1, 9, 10**12)],
        "speculation.max_draft_tokens",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
async def test_a_refused_request_harms_nobody(way: Way, kind: str) -> None:
    bodies, param = REFUSED[kind]
    async with a_scripted_server(says("hello")) as server:
        for body in bodies:
            reply = await way.ask(server, **body)
            assert (reply.status, reply.error["param"]) == (400, param), (body, reply)
            if kind.startswith("overflow"):
                assert reply.error["code"] == "context_length_exceeded"
                start = "This model's maximum context length is 256 tokens. However, "
                assert reply.error["message"].startswith(start)
        assert (await way.hear(server, max_tokens=9)).text == "hello"


async def test_numbers_that_are_none_are_refused(way: Way) -> None:
    fields = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "seed")
    async with a_scripted_server(says("hello")) as server:
        for field in fields:
            for literal in ("NaN", "Infinity", "-Infinity", "1e400", "-1e308"):
                drafter, stream = way.drafter, str(way.stream).lower()
                raw = (
                    f'{{"prompt": "say:", "stream": {stream}, "{field}": {literal}, '
                    f'"speculation": {{"drafter": "{drafter}"}}}}'
                )
                reply = await server.post("/v1/completions", raw.encode())
                assert reply.status == 400, raw
        assert (await way.hear(server, max_tokens=9)).text == "hello"


async def test_what_never_fits_the_pool_does_not_wait_for_it(way: Way) -> None:
    small = msgspec.structs.replace(CONFIG, block_size=16, num_blocks=8)
    async with a_scripted_server(says("hello"), config=small) as server:
        for body in ({"prompt": [1] * 200}, {"prompt": [1] * 100, "max_tokens": 29}, {"n": 2}):
            for k in (1, 8):
                reply = await way.ask(server, k=k, **{"max_tokens": 1, **body})
                assert (reply.status == 200) == ("n" in body)
        assert (await way.hear(server, max_tokens=9)).text == "hello"


UNFOLLOWABLE: dict[str, dict[str, Any]] = {
    "an end that may not come": {"allowed_token_ids": [END], "min_tokens": 3},
    "one word, and not that": {"allowed_token_ids": [97], "bad_words": ["a"]},
    "a grammar of other letters": {
        "allowed_token_ids": [*b"ABC"],
        "structured_outputs": {"regex": "[a-z]{3}"},
    },
}


@pytest.mark.parametrize("kind", UNFOLLOWABLE)
async def test_what_cannot_be_is_the_clients_fault_and_not_tried_again(way: Way, kind: str) -> None:
    """Seen only once the reply is made. A 500 would be retried by every client, in vain."""
    async with a_scripted_server(says("abc")) as server:
        failed, fine = await asyncio.gather(
            way.ask(server, **UNFOLLOWABLE[kind]), way.hear(server, max_tokens=9)
        )
        if way.stream:
            [last] = failed.events
            error = last["error"]
        else:
            assert failed.status == 400
            error = failed.error
        assert (error["type"], error["code"]) == ("invalid_request_error", "unfollowable")
        assert fine.text == "abc"


# ---- left --------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["queued", "prefill", "decode"])
async def test_who_leaves_is_computed_for_two_more_steps_at_most(way: Way, when: str) -> None:
    pace = Pace()
    config = msgspec.structs.replace(CONFIG, max_num_seqs=1)
    async with a_scripted_server(says("ab", then=None), config=config, on_forward=pace) as server:
        async with connect(server.port) as first, connect(server.port) as leaver:
            if when == "queued":
                await way.start(first, max_tokens=2, k=0)
                await server.has(running=1)
            prompt = [1] * 190 if when == "prefill" else "say:"
            await way.start(leaver, prompt=prompt, max_tokens=60)
            await server.has(running=1, waiting=int(when == "queued"))
            if when != "queued":
                pace.allow(3)
            if when == "decode" and way.stream:
                await leaver.read_head()
                await leaver.read_chunk()
            leaver.reset()
            if when == "queued":
                pace.allow(2)  # what the first takes, and no more
                assert told(await first.read_reply()).text == "ab"
        assert await pace.steps_until_idle(server) <= 5  # those that were given, and two


async def test_leaving_just_as_the_reply_ends_harms_nobody(way: Way) -> None:
    luck = random.Random(7)

    async def visit(server: Server) -> None:
        async with connect(server.port) as connection:
            await way.start(connection, max_tokens=2)
            await asyncio.sleep(luck.uniform(0, 0.01))
            connection.reset()

    async with a_scripted_server(says("hello")) as server:
        for _ in range(7):
            await asyncio.gather(*(visit(server) for _ in range(10)))
        await server.is_idle()
        assert (await way.hear(server, max_tokens=9)).text == "hello"


# ---- crowded -------------------------------------------------------------------------------------


async def test_two_that_call_themselves_the_same_are_two(way: Way) -> None:
    pace = Pace()
    async with a_scripted_server(says("hello"), on_forward=pace) as server:
        headers = {"x-request-id": "mine.1"}
        body = way.body(max_tokens=9)
        both = [
            asyncio.create_task(server.post("/v1/completions", body, headers)) for _ in range(2)
        ]
        await until_live(server, 2)
        pace.allow(100)
        replies = await asyncio.gather(*both)
    assert [told(reply).text for reply in replies] == ["hello"] * 2
    assert [reply.headers["x-request-id"] for reply in replies] == ["mine.1"] * 2
    assert len({_id(reply) for reply in replies}) == 2


def _id(reply: Reply) -> str:
    first: dict[str, Any] = reply.events[0] if b"data: " in reply.body else reply.json()
    return str(first["id"])


async def test_of_too_many_the_rest_are_told_to_come_again_and_the_taken_are_served(
    way: Way,
) -> None:
    pace = Pace()
    config = msgspec.structs.replace(CONFIG, max_num_seqs=1, max_waiting=2)
    async with a_scripted_server(says("hello"), config=config, on_forward=pace) as server:
        asked = [asyncio.create_task(way.ask(server, max_tokens=9))]
        await server.has(running=1)
        asked += [asyncio.create_task(way.ask(server, max_tokens=9)) for _ in range(19)]
        while sum(task.done() for task in asked) < 17:
            await asyncio.sleep(0.002)
        pace.allow(200)
        replies = await asyncio.gather(*asked)
    refused = [reply for reply in replies if reply.status != 200]
    assert len(refused) == 17
    for reply in refused:
        assert (reply.status, reply.error["code"]) == (429, "queue_full")
        assert int(reply.headers["retry-after"]) >= 1
    assert {told(reply).text for reply in replies if reply.status == 200} == {"hello"}


async def test_a_reader_that_is_slow_gets_all_of_it_and_holds_up_nobody(way: Way) -> None:
    async with (
        a_scripted_server(says(LETTERS, then=None), send_buffer=4096) as server,
        connect(server.port, receive_buffer=4096) as slow,
    ):
        wide = {"max_tokens": 240, "logprobs": 5}
        await way.start(slow, **wide)
        await server.has(running=1)
        assert (await way.hear(server, max_tokens=10)).text == LETTERS[:10]
        await server.is_idle()  # all of it is made, though nobody reads
        said = told(await slow.read_reply())
    assert said.text == LETTERS[:240]
    assert len(said.logprobs) == 240


# ---- cut -----------------------------------------------------------------------------------------


async def test_at_shutdown_eight_that_run_come_to_their_end(way: Way) -> None:
    pace = Pace()
    async with a_scripted_server(says("hello"), on_forward=pace) as server:
        live = [asyncio.create_task(way.hear(server, max_tokens=9)) for _ in range(8)]
        await until_live(server, 8)
        draining = asyncio.create_task(drain(server.app))
        await asyncio.sleep(0)
        for reply in (await server.get("/ready"), await way.ask(server)):
            assert (reply.status, reply.error["code"]) == (503, "server_stopping")
        pace.allow(200)
        assert [said.text for said in await asyncio.gather(*live)] == ["hello"] * 8
        await draining


async def test_what_outlasts_the_shutdown_is_told(way: Way) -> None:
    pace = Pace()
    settings = ServerSettings(drain_seconds=0.1)
    async with a_scripted_server(
        says("x", then=None), settings=settings, on_forward=pace
    ) as server:
        async with connect(server.port) as connection:
            await way.start(connection, max_tokens=200)
            await server.has(running=1)
            pace.allow(2)
            await drain(server.app)
            assert (await _error(connection))["code"] == "server_stopping"
        assert await pace.steps_until_idle(server) <= 4


async def _error(connection: Connection) -> dict[str, Any]:
    reply = await connection.read_reply()
    assert b"[DONE]" not in reply.body
    last: dict[str, Any] = reply.events[-1] if reply.status == 200 else reply.json()
    error: dict[str, Any] = last["error"]
    return error

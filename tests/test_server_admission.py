"""A full queue says so in a way that clients retry, and counts tokens as well as requests."""

from __future__ import annotations

import msgspec
import pytest

from specserve.server.state import ServerSettings
from tests.http_server import CONFIG, Pace, Server, a_server
from tests.raw_http import Connection, connect
from tests.scripted import says

pytestmark = pytest.mark.timeout(60)

SETTINGS = ServerSettings(max_waiting_tokens=100)


async def ask(connection: Connection, *, prompt_tokens: int, stream: bool = True) -> None:
    body = {"prompt": [1] * prompt_tokens, "max_tokens": 9, "temperature": 0, "stream": stream}
    await connection.request("POST", "/v1/completions", body)


async def rest(connection: Connection) -> bytes:
    body = b""
    while chunk := await connection.read_chunk():
        body += chunk
    return body


async def is_full(server: Server, *, prompt_tokens: int, waiting: int) -> None:
    refused = await server.complete(prompt=[1] * prompt_tokens)
    assert (refused.status, refused.error["code"]) == (429, "queue_full")
    assert refused.error["type"] == "rate_limit_error"
    assert refused.headers["retry-after"] == "1"
    assert (
        f"{waiting} prompt tokens wait already and this request has {prompt_tokens}"
        in (refused.error["message"])
    )


async def test_prompts_wait_up_to_so_many_tokens_and_leave_room_as_they_begin() -> None:
    pace = Pace()
    async with (
        a_server(says("hello"), settings=SETTINGS, on_forward=pace) as server,
        connect(server.port) as long,
        connect(server.port) as short,
    ):
        await ask(long, prompt_tokens=60)
        await long.read_head()
        await is_full(server, prompt_tokens=41, waiting=60)
        await ask(short, prompt_tokens=40)
        await short.read_head()
        await is_full(server, prompt_tokens=1, waiting=100)
        pace.allow(1000)
        for connection in (long, short):
            assert (await rest(connection)).endswith(b"data: [DONE]\n\n")
        assert (await server.complete(prompt=[1] * 100)).status == 200


async def test_a_request_that_runs_does_not_wait() -> None:
    pace = Pace()
    async with (
        a_server(says("x", then=None), settings=SETTINGS, on_forward=pace) as server,
        connect(server.port) as running,
    ):
        await ask(running, prompt_tokens=90)
        await running.read_head()
        pace.allow(7)  # chunks of 16, the last of which samples
        await running.read_chunk()
        async with connect(server.port) as other:
            await ask(other, prompt_tokens=100)
            assert (await other.read_head())[0] == 200
        pace.allow(1000)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_takes_its_tokens_along(stream: bool) -> None:
    pace = Pace()
    async with a_server(says("hello"), settings=SETTINGS, on_forward=pace) as server:
        for _ in range(3):
            async with connect(server.port) as leaving:
                await ask(leaving, prompt_tokens=100, stream=stream)
                while server.num_live == 0:
                    await server.get("/health")
                await is_full(server, prompt_tokens=1, waiting=100)
            pace.allow(10)
            await server.is_idle()
            pace.take_back()  # else the next request may be done before anybody has seen it
        pace.allow(1000)
        assert (await server.complete(prompt=[1] * 100)).status == 200


async def test_a_request_that_the_engine_refuses_leaves_no_tokens_behind() -> None:
    pace = Pace()
    config = msgspec.structs.replace(CONFIG, max_num_seqs=1, max_waiting=2)
    async with (
        a_server(says("hello"), config=config, settings=SETTINGS, on_forward=pace) as server,
        connect(server.port) as running,
        connect(server.port) as waiting,
    ):
        await ask(running, prompt_tokens=1)
        await server.has(running=1)
        await ask(waiting, prompt_tokens=1)
        await server.has(running=1, waiting=1)
        # The second of these two prompts is one too many for --max-waiting.
        refused = await server.complete(prompt=[[1] * 40] * 2)
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert "requests wait already" in refused.error["message"]
        pace.allow(1000)
        for connection in (running, waiting):
            assert (await connection.read_reply()).status == 200
        assert (await server.complete(prompt=[1] * 100)).status == 200


async def test_what_could_never_wait_is_refused_for_good() -> None:
    async with a_server(says("hello"), settings=SETTINGS) as server:
        for body, param in (
            ({"prompt": [1] * 101}, "prompt"),
            ({"prompt": [[1] * 51] * 2}, "prompt"),
            ({"prompt": [1] * 51, "n": 2}, "n"),
        ):
            refused = await server.complete(**body)
            assert (refused.status, refused.error["param"]) == (400, param)
            assert "queues at most 100" in refused.error["message"]
        chat = await server.chat(messages=[{"role": "user", "content": "x" * 100}])
        assert (chat.status, chat.error["param"]) == (400, "messages")

"""How replies end when something goes wrong: faults, clients that leave or stall, shutdown."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from specserve.server.app import drain
from specserve.server.state import ServerSettings
from specserve_observability.metrics import Metrics
from specserve_observability.server_tracer import ServerTracer
from tests.http_server import CONFIG, Pace, Server, a_server
from tests.raw_http import Connection, Reply, connect, parse_events
from tests.scripted import BROKEN, by_first_letter, says

pytestmark = pytest.mark.timeout(60)


async def until_live(server: Server, num_requests: int) -> None:
    while (now := server.engine.snapshot()).num_running + now.num_waiting < num_requests:
        await asyncio.sleep(0.002)


async def start(connection: Connection, **body: object) -> None:
    await connection.request(
        "POST", "/v1/completions", {"prompt": "say:", "temperature": 0, "max_tokens": 200, **body}
    )


def check_error_ending(reply: Reply, code: str) -> str:
    """Text of a 200 stream that ended in one error event; nothing may follow or claim a finish."""
    assert reply.status == 200
    *chunks, last = reply.events
    assert list(last) == ["error"]
    assert sorted(last["error"]) == ["code", "message", "param", "type"]
    assert (last["error"]["code"], last["error"]["type"]) == (code, "server_error")
    assert b"[DONE]" not in reply.body
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


# ---- faults ----------------------------------------------------------------------------------


async def test_a_request_that_fails_mid_stream_says_so_and_the_others_go_on() -> None:
    script = by_first_letter({"b": says("12345", then=BROKEN), "g": says("good", then=None)})
    async with (
        a_server(script) as server,
        connect(server.port) as bad,
        connect(server.port) as good,
    ):
        await start(bad, prompt="b:", stream=True)
        await start(good, prompt="g:", stream=True)
        assert check_error_ending(await bad.read_reply(), "engine_error") == "12345"
        assert await bad.is_closed()
        reply = await good.read_reply()
        assert reply.events[-1] == "[DONE]"
        assert "".join(event["choices"][0]["text"] for event in reply.events[:-1]) == "good" * 50
        whole = await server.complete(prompt="b:")
        assert (whole.status, whole.error["code"]) == (500, "engine_error")
        one_of_two = await server.complete(prompt=["g:", "b:"])
        assert one_of_two.status == 500
        assert (await server.get("/health")).status == 200


class _FailingStep:
    """An on_forward whose step number `at` fails with a message that must not leave as it is."""

    def __init__(self, at: int) -> None:
        self._steps_left = at

    def __call__(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise RuntimeError("cannot map /srv/secret/model.bin at 0x7f00deadbeef\nmore")


async def test_a_dead_engine_ends_every_stream_and_health_says_why() -> None:
    async with (
        a_server(says("x", then=None), on_forward=_FailingStep(5), dies=True) as server,
        connect(server.port) as one,
        connect(server.port) as two,
    ):
        await start(one, stream=True)
        await start(two, stream=True)
        for connection in (one, two):
            check_error_ending(await connection.read_reply(), "engine_error")
        for path in ("/health", "/ready"):
            reply = await server.get(path)
            assert (reply.status, reply.error["code"]) == (503, "engine_dead")
            assert "cannot map <path> at <address>" in reply.error["message"]
        refused = await server.complete()
        assert (refused.status, refused.error["code"]) == (503, "engine_dead")
        assert "secret" not in refused.body.decode()
        assert (await server.get("/v1/models")).status == 200


# ---- clients that leave ----------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("way", ["reset", "close"])
async def test_a_client_that_leaves_during_generation_stops_it(stream: bool, way: str) -> None:
    pace = Pace()
    async with (
        a_server(says("x", then=None), on_forward=pace) as server,
        connect(server.port) as connection,
    ):
        await start(connection, stream=stream)
        await until_live(server, 1)
        pace.allow(3)
        if stream:
            await connection.read_head()
            await connection.read_chunk()
        if way == "reset":
            connection.reset()
        else:
            connection.writer.close()
        assert await pace.steps_until_idle(server) <= 5  # 3 were given, then at most 2


async def test_a_client_that_leaves_during_its_prefill_stops_it() -> None:
    pace = Pace()
    async with a_server(says("x", then=None), on_forward=pace) as server:
        async with connect(server.port) as connection:
            await start(connection, prompt=[1] * 200, max_tokens=5, stream=True)  # 13 chunks of 16
            await connection.read_head()
            pace.allow(2)
        assert await pace.steps_until_idle(server) <= 4


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_the_queue_is_forgotten_and_the_others_served(
    stream: bool,
) -> None:
    pace = Pace()
    config = msgspec.structs.replace(CONFIG, max_num_seqs=1)
    async with (
        a_server(says("hello"), config=config, on_forward=pace) as server,
        connect(server.port) as first,
    ):
        await start(first)
        await until_live(server, 1)
        async with connect(server.port) as waiting:
            await start(waiting, stream=stream, n=4)
            await until_live(server, 5)
        pace.allow(10)  # what the first takes, and no more
        assert (await first.read_reply()).json()["choices"][0]["text"] == "hello"
        await server.is_idle()


async def test_an_abort_that_races_with_the_finish_harms_nobody() -> None:
    rng = random.Random(7)

    async def leave_at_random(server: Server, stream: bool) -> None:
        async with connect(server.port) as connection:
            await start(connection, max_tokens=2, stream=stream)
            await asyncio.sleep(rng.uniform(0, 0.005))
            connection.reset()

    async with a_server(says("hello")) as server:
        for _ in range(25):
            await asyncio.gather(*(leave_at_random(server, at % 2 == 0) for at in range(10)))
        await server.is_idle()
        assert (await server.complete()).json()["choices"][0]["text"] == "hello"


# ---- clients that stall ----------------------------------------------------------------------

# Wide events: some 2 kB per token, far more than all the buffers on the way.
WIDE = {
    "messages": [{"role": "user", "content": "say"}],
    "temperature": 0,
    "logprobs": True,
    "top_logprobs": 20,
    "max_tokens": 240,
    "stream": True,
}
TEXT = "abcdefghij" * 24


async def test_a_slow_reader_gets_everything_later_and_holds_nobody_up() -> None:
    async with (
        a_server(says(TEXT, then=None), send_buffer=4096) as server,
        connect(server.port, receive_buffer=4096) as slow,
    ):
        await slow.request("POST", "/v1/chat/completions", WIDE)
        await until_live(server, 1)
        other = await server.chat(max_tokens=10)
        assert other.json()["choices"][0]["message"]["content"] == TEXT[:10]
        await server.is_idle()  # all 240 tokens are made, though nobody reads them
        reply = await slow.read_reply()
    *chunks, done = reply.events
    assert done == "[DONE]"
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(deltas) == TEXT
    assert len(deltas) < 240  # what waited was merged
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert sum(len(one["content"]) for one in logprobs if one) == 240


async def test_a_client_that_never_reads_is_cut_off() -> None:
    settings = ServerSettings(write_seconds=0.1)
    async with (
        a_server(says(TEXT, then=None), settings=settings, send_buffer=4096) as server,
        connect(server.port, receive_buffer=4096) as stalled,
    ):
        await stalled.request("POST", "/v1/chat/completions", WIDE)
        await until_live(server, 1)
        await server.is_idle()
        await asyncio.sleep(0.3)
        # By now the connection is reset: what is in flight may be read, the rest never comes.
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await stalled.read_reply()


# ---- shutdown --------------------------------------------------------------------------------


async def test_while_draining_live_streams_end_and_new_requests_are_sent_elsewhere() -> None:
    pace = Pace()
    async with (
        a_server(says("hello"), on_forward=pace) as server,
        connect(server.port) as live,
    ):
        await start(live, stream=True)
        await live.read_head()
        draining = asyncio.create_task(drain(server.app))
        await asyncio.sleep(0)
        for reply in (await server.get("/ready"), await server.complete(), await server.chat()):
            assert (reply.status, reply.error["code"]) == (503, "server_stopping")
            assert int(reply.headers["retry-after"]) >= 1
        assert (await server.get("/health")).status == 200
        pace.allow(100)
        raw = b""
        while chunk := await live.read_chunk():
            raw += chunk
        await draining
    assert parse_events(raw)[-1] == "[DONE]"


async def test_at_the_deadline_live_replies_are_told_that_they_were_cut() -> None:
    pace = Pace()
    settings = ServerSettings(drain_seconds=0.1)
    async with (
        a_server(says("x", then=None), on_forward=pace, settings=settings) as server,
        connect(server.port) as stream,
        connect(server.port) as whole,
    ):
        await start(stream, stream=True)
        await start(whole)
        await until_live(server, 2)
        pace.allow(2)
        await drain(server.app)
        check_error_ending(await stream.read_reply(), "server_stopping")
        assert await stream.is_closed()
        reply = await whole.read_reply()
        assert (reply.status, reply.error["code"]) == (503, "server_stopping")
        assert await pace.steps_until_idle(server) <= 2


# ---- traces ----------------------------------------------------------------------------------


async def test_each_request_has_one_span_that_ends_once_with_what_became_of_it() -> None:
    tracer = ServerTracer(Metrics())
    script = by_first_letter({"b": says("1", then=BROKEN), "s": says("hello")})
    async with a_server(script, tracer=tracer) as server:
        reply = await server.complete(speculation={"drafter": "oracle"})
        await server.complete(prompt="b:", stream=True)
        await server.complete(n=0)
        await server.get("/v1//models")
        await server.get("/a/path/nobody/knows")
    ended = tracer.ended.take()
    assert [(span.route, span.status) for span in ended] == [
        ("/v1/completions", 200),
        ("/v1/completions", 500),
        ("/v1/completions", 400),
        ("/v1/models", 200),
        ("unmatched", 404),
    ]
    good, broken, refused, *_ = ended
    assert [child.name for child in good.children] == ["tokenize"]
    assert [child.name for child in broken.children] == ["tokenize", "stream"]
    assert reply.headers["traceparent"] == good.context
    assert good.attributes["http.response.header.x-request-id"] == [reply.headers["x-request-id"]]
    assert good.operation is not None
    said = good.operation.attributes
    assert said["gen_ai.usage.output_tokens"] == 6
    assert said["gen_ai.response.finish_reasons"] == ["stop"]
    records = {record.num_output_tokens: record for record in server.recorder.requests}
    assert records[6].traceparent == good.operation.context
    assert records[6].num_accepted_draft_tokens == said["specserve.spec.accepted_tokens"]
    assert refused.operation is None


async def test_a_client_that_left_is_on_its_span() -> None:
    tracer, pace = ServerTracer(Metrics()), Pace()
    async with a_server(says("hello"), tracer=tracer, on_forward=pace) as server:
        async with connect(server.port) as connection:
            await start(connection)
            await until_live(server, 1)
        await pace.steps_until_idle(server)
    (ended,) = tracer.ended.take()
    assert ended.status == 499
    assert ended.attributes["specserve.client.disconnected"] is True


async def test_without_a_tracer_a_valid_traceparent_reaches_the_engine_and_others_do_not() -> None:
    valid = f"00-{'1' * 32}-{'2' * 16}-01"
    body = {"prompt": "say:", "temperature": 0}
    async with a_server(says("hello")) as server:
        for sent in (valid, "00-junk", ""):
            await server.post("/v1/completions", body, {"traceparent": sent})
    assert [record.traceparent for record in server.recorder.requests] == [valid, None, None]

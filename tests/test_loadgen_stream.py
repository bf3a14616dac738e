"""What the load generator's client survives, and what it counts as which failure."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from specserve_loadgen.prompts import Message, Prompt
from specserve_loadgen.records import RequestRecord
from specserve_loadgen.run import run_load
from specserve_loadgen.settings import Settings
from specserve_loadgen.sse import SseEvent, SseParser
from tests.loadgen_server import app_with, event, serving, write_stream

TRICKY = (
    b"\xef\xbb\xbf: comment\r\n\r\ndata: one\r\ndata: more\r\n\r\n"
    b"event: ping\n\ndata\n\ndata:\n\nretry: 1000\n\n"
    b"event: error\rdata: two\r\rid: 7\ndata:  \xf0\x9f\xa6\x9c\xe2\x80\xa8\xc2\x85\n\r\n"
    b"data: [DONE]\n\ndata: not finished\n"
)
TRICKY_EVENTS = [
    SseEvent("", b"one\nmore"),
    SseEvent("", b""),
    SseEvent("", b""),
    SseEvent("error", b"two"),
    SseEvent("", " 🦜\u2028\u0085".encode()),
    SseEvent("", b"[DONE]"),
]


def parsed(*reads: bytes) -> list[SseEvent]:
    parser = SseParser()
    return [found for read in reads for found in parser.feed(read)]


def readable_parse(stream: bytes) -> list[SseEvent]:
    """The standard's algorithm on the whole stream at once."""
    events, data, name = [], [], ""
    *lines, _ = re.split(rb"\r\n|\r|\n", stream.removeprefix(b"\xef\xbb\xbf"))
    for line in lines:
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if not line:
            if data:
                events.append(SseEvent(name, b"\n".join(data)))
            data, name = [], ""
        elif field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode(errors="replace")
    return events


def test_every_kind_of_line_and_line_end_is_understood() -> None:
    assert parsed(TRICKY) == TRICKY_EVENTS == readable_parse(TRICKY)


def test_a_stream_may_be_cut_at_any_byte() -> None:
    for cut in range(len(TRICKY) + 1):
        assert parsed(TRICKY[:cut], TRICKY[cut:]) == TRICKY_EVENTS
    assert parsed(*(TRICKY[idx : idx + 1] for idx in range(len(TRICKY)))) == TRICKY_EVENTS


LINES = st.sampled_from(
    [
        b"data: a",
        b"data",
        b"data:",
        b"data: \xc3\xa9",
        b": c",
        b"event: e",
        b"id: 1",
        b"x",
        b"",
        b"",
    ]
)
ENDS = st.sampled_from([b"\n", b"\r", b"\r\n"])


@given(st.data(), st.lists(st.tuples(LINES, ENDS), max_size=30), st.booleans())
def test_any_cutting_of_any_stream_gives_the_readable_parsers_events(
    data: st.DataObject, lines: list[tuple[bytes, bytes]], with_mark: bool
) -> None:
    stream = b"\xef\xbb\xbf" * with_mark + b"".join(line + end for line, end in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    reads = [stream[a:b] for a, b in pairwise([0, *cuts, len(stream)])]
    assert parsed(*reads) == readable_parse(stream)


# ---- over real sockets -------------------------------------------------------------------------

PROMPT = Prompt(prompt_id="1", category="chat", messages=(Message("user", "hello"),))
Complete = Callable[[web.Request], Awaitable[web.StreamResponse]]


def text_chunk(text: str, *ids: int) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, "token_ids": ids}
    return event({"id": "x", "choices": [choice], "usage": None, "extra": {"a": [1]}})


ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]})
FINISH = event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
USAGE = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
DONE = b"data: [DONE]\n\n"
WHOLE = (ROLE, text_chunk("He", 1), text_chunk("llo 🦜", 2, 3), FINISH, USAGE, DONE)


async def one_reply(complete: Complete, **changes: object) -> RequestRecord:
    async with serving(app_with(complete)) as url:
        settings = Settings(url=url, num_requests=1, **changes)  # type: ignore[arg-type]  # by name
        result = await run_load(settings, [PROMPT])
    (record,) = result.records
    return record


def split_every_byte(parts: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return tuple(bytes([byte]) for byte in b"".join(parts))


HARMLESS = {
    "canonical": WHOLE,
    "comments": (b": ping\n\n", WHOLE[0], b": ping\n", *WHOLE[1:]),
    "crlf": tuple(part.replace(b"\n", b"\r\n") for part in WHOLE),
    "byte by byte": split_every_byte(WHOLE),
    "all at once": (b"".join(WHOLE),),
    "event without data": (b"event: ping\n\n", *WHOLE),
    "empty data": (b"data:\n\n", *WHOLE),
    "retry": (b"retry: 1000\n\n", *WHOLE),
    "choices null": (event({"choices": None}), *WHOLE),
    "raw U+2028": (WHOLE[0], text_chunk("\u2028\u0085", 1), text_chunk("x", 2, 3), *WHOLE[3:]),
    "events after DONE": (*WHOLE, text_chunk("late", 9, 9)),
}


@pytest.mark.parametrize("name", HARMLESS)
async def test_a_stream_of_any_legal_shape_is_measured_alike(name: str) -> None:
    async def complete(request: web.Request) -> web.StreamResponse:
        return await write_stream(request, *HARMLESS[name])

    record = await one_reply(complete)
    assert record.failure is None
    assert [chunk.num_tokens for chunk in record.chunks] == [1, 2]
    assert (record.num_output_tokens, record.num_prompt_tokens) == (3, 5)
    assert record.finish_reason == "stop"


async def test_a_body_that_stays_open_after_done_does_not_hold_the_client() -> None:
    released = asyncio.Event()

    async def complete(request: web.Request) -> web.StreamResponse:
        response = await write_stream(request, *WHOLE)
        await released.wait()
        return response

    record = await one_reply(complete)
    released.set()
    assert record.failure is None


async def test_the_next_request_reuses_a_connection_whose_body_ends_a_little_after_done() -> None:
    peers = set()

    async def complete(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        response = await write_stream(request, *WHOLE)
        await asyncio.sleep(0.01)
        return response

    async with serving(app_with(complete)) as url:
        await run_load(Settings(url=url, num_requests=3), [PROMPT])
    assert len(peers) == 1


def json_error(status: int, body: object, **headers: str) -> Complete:
    async def complete(request: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status, headers=headers)

    return complete


def streamed(*parts: bytes) -> Complete:
    async def complete(request: web.Request) -> web.StreamResponse:
        return await write_stream(request, *parts)

    return complete


async def reset(request: web.Request) -> web.StreamResponse:
    response = await write_stream(request, *WHOLE[:2])
    assert request.transport is not None
    request.transport.abort()
    return response


async def silence(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


async def plain_500(request: web.Request) -> web.StreamResponse:
    return web.Response(status=500, text="it broke")


OVERLONG = {"error": {"message": "prompt too long", "type": "invalid", "code": "context_length"}}
FAILURES: dict[str, tuple[Complete, str, str]] = {
    "error body": (json_error(400, OVERLONG), "http_400", "prompt too long (context_length)"),
    "unwrapped error": (json_error(404, {"message": "no such model"}), "http_404", "no such model"),
    "detail": (json_error(422, {"detail": "bad"}), "http_422", "bad"),
    "plain text": (plain_500, "http_500", "it broke"),
    "error event": (streamed(*WHOLE[:2], event(OVERLONG)), "stream_error", "prompt too long"),
    "error text": (streamed(*WHOLE[:2], event({"error": "dead"})), "stream_error", "dead"),
    "named error": (
        streamed(ROLE, b'event: error\ndata: {"message":"named"}\n\n'),
        "stream_error",
        "named",
    ),
    "end without DONE": (streamed(*WHOLE[:-1]), "truncated", "[DONE]"),
    "end inside an event": (streamed(*WHOLE[:-1], DONE[:8]), "truncated", "[DONE]"),
    "reset": (reset, "connection_lost", ""),
    "bad JSON": (streamed(ROLE, b'data: {"choices": [}\n\n'), "malformed", '{"choices": [}'),
    "deep JSON": (streamed(b'data: {"a":' + b"[" * 50_000 + b"\n\n"), "malformed", "recursion"),
    "not UTF-8": (streamed(b'data: {"choices":[{"text":"\xff"}]}\n\n'), "malformed", ""),
    "not a stream": (json_error(200, {"choices": []}), "not_a_stream", "application/json"),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_failure_is_counted_by_kind_with_the_servers_words(name: str) -> None:
    complete, kind, words = FAILURES[name]
    failure = (await one_reply(complete)).failure
    assert failure is not None
    assert failure.kind == kind
    assert words in failure.message


async def test_a_busy_server_is_asked_once_and_its_retry_after_is_kept() -> None:
    num_hits = 0

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal num_hits
        num_hits += 1
        return web.json_response(OVERLONG, status=429, headers={"Retry-After": "7"})

    failure = (await one_reply(complete)).failure
    assert failure is not None
    assert (failure.kind, failure.retry_after, num_hits) == ("http_429", "7", 1)


@pytest.mark.parametrize(("num_drops", "kind"), [(1, None), (2, "connection_lost")])
async def test_a_connection_closed_before_any_answer_is_tried_once_more(
    num_drops: int, kind: str | None
) -> None:
    num_hits = 0

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal num_hits
        num_hits += 1
        if num_hits <= num_drops:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return await write_stream(request, *WHOLE)

    failure = (await one_reply(complete)).failure
    assert (None if failure is None else failure.kind, num_hits) == (kind, 2)


async def test_a_silent_server_is_given_up_after_the_limit() -> None:
    failure = (await one_reply(silence, request_timeout=0.05)).failure
    assert failure is not None
    assert (failure.kind, "0.05 s" in failure.message) == ("timeout", True)


async def test_tokens_received_before_a_failure_are_known_as_lost() -> None:
    record = await one_reply(streamed(*WHOLE[:3]))
    assert (record.failure is not None, record.num_output_tokens) == (True, 3)

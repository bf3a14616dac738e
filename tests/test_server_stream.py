"""Streams over real sockets, read byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import chain
from typing import Any

import msgspec
import pytest

from specserve.server.state import ServerSettings
from tests.http_server import Pace, Server, a_server
from tests.raw_http import connect
from tests.scripted import says

pytestmark = pytest.mark.timeout(60)

EMOJI = "a🎉你👩‍🚀é"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "say"}], "temperature": 0}


def texts(events: list[Any], index: int = 0) -> list[str]:
    """Each event's text of one choice, completions and chat alike."""
    return [
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for event in events
        if event != "[DONE]"
        for choice in event["choices"]
        if choice["index"] == index
    ]


def finishes(events: list[Any], index: int = 0) -> list[str]:
    return [
        choice["finish_reason"]
        for event in events
        if event != "[DONE]"
        for choice in event["choices"]
        if choice["index"] == index and choice["finish_reason"] is not None
    ]


def joined(lists: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(lists))


async def test_headers_suit_proxies_and_every_event_has_the_same_identity() -> None:
    async with a_server(says("hello")) as server:
        reply = await server.chat(stream=True)
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert "content-length" not in reply.headers
    assert "content-encoding" not in reply.headers
    *chunks, done = reply.events
    assert done == "[DONE]"
    assert len({(c["id"], c["created"], c["object"], c["model"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"


async def test_the_role_comes_with_the_first_token_and_the_finish_chunk_has_no_text() -> None:
    async with a_server(says("hello")) as server:
        events = (await server.chat(stream=True)).events[:-1]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": "h"}
    assert all("role" not in delta for delta in deltas[1:])
    assert deltas[-1] == {}
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 5 + ["stop"]


async def test_a_reply_of_no_text_still_has_a_role_and_a_finish() -> None:
    async with a_server(says("")) as server:
        events = (await server.chat(stream=True)).events
        whole = (await server.chat()).json()
    assert [event["choices"][0]["delta"] for event in events[:-1]] == [
        {"role": "assistant", "content": ""},
        {},
    ]
    assert whole["choices"][0]["message"]["content"] == ""
    assert whole["usage"]["completion_tokens"] == 1  # END counts


async def test_the_last_completions_chunk_has_text_and_finish_reason_together() -> None:
    async with a_server(says("abc")) as server:
        events = (await server.complete(stream=True, max_tokens=3)).events
    choices = [event["choices"][0] for event in events[:-1]]
    assert [choice["text"] for choice in choices] == ["a", "b", "c"]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"]


@pytest.mark.parametrize("drafter", ["none", "oracle", "anti", "part"])
@pytest.mark.parametrize("k", [1, 3, 5])
async def test_characters_split_over_tokens_never_show_a_replacement(drafter: str, k: int) -> None:
    async with a_server(says(EMOJI)) as server:
        options = {"speculation": {"drafter": drafter, "max_draft_tokens": k}}
        for max_tokens in range(1, len(EMOJI.encode()) + 2):
            body = {**options, "max_tokens": max_tokens}
            streamed = await server.chat(stream=True, **body)
            whole = (await server.chat(**body)).json()["choices"][0]
            assert "\ufffd" not in streamed.body.decode()
            assert "".join(texts(streamed.events)) == whole["message"]["content"]
            assert finishes(streamed.events) == [whole["finish_reason"]]
            assert EMOJI.startswith(whole["message"]["content"])


async def test_every_stream_ends_with_exactly_one_done_and_then_the_end() -> None:
    async with a_server(says("hello", then=None)) as server:

        async def one(at: int) -> None:
            reply = await server.complete(stream=True, max_tokens=1 + at % 5)
            assert reply.body.endswith(b"\n\ndata: [DONE]\n\n")
            assert reply.body.count(b"[DONE]") == 1
            assert len("".join(texts(reply.events))) == 1 + at % 5

        for first in range(0, 96, 16):
            await asyncio.gather(*(one(first + i) for i in range(16)))


async def test_a_connection_is_kept_for_the_next_request_after_a_stream() -> None:
    async with a_server(says("hello")) as server, connect(server.port) as connection:
        for _ in range(3):
            body = {"prompt": "say:", "stream": True}
            await connection.request("POST", "/v1/completions", body)
            assert (await connection.read_reply()).events[-1] == "[DONE]"


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with a_server(says("hello")) as server, connect(server.port) as connection:
        for max_tokens in (3, 1, 2):
            body = {"prompt": "say:", "max_tokens": max_tokens}
            await connection.request("POST", "/v1/completions", body)
        replies = [(await connection.read_reply()).json() for _ in range(3)]
    assert [reply["choices"][0]["text"] for reply in replies] == ["hel", "h", "he"]


async def test_while_nothing_happens_only_comments_leave_and_never_inside_an_event() -> None:
    pace = Pace()
    settings = ServerSettings(keep_alive_seconds=0.03)
    async with (
        a_server(says("hello"), on_forward=pace, settings=settings) as server,
        connect(server.port) as connection,
    ):
        await connection.request("POST", "/v1/chat/completions", {**CHAT, "stream": True})
        status, _ = await connection.read_head()  # before any step has run
        assert status == 200
        assert [await connection.read_chunk() for _ in range(3)] == [b": keep-alive\n\n"] * 3
        pace.allow(100)
        rest = b""
        while chunk := await connection.read_chunk():
            rest += chunk
            assert chunk.endswith(b"\n\n")  # each write is whole events
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_a_burst_of_accepted_tokens_arrives_as_whole_events() -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    async with a_server(says(text)) as server, connect(server.port) as connection:
        body = {**CHAT, "stream": True, "speculation": {"drafter": "oracle", "max_draft_tokens": 8}}
        await connection.request("POST", "/v1/chat/completions", body)
        await connection.read_head()
        raw = b""
        while chunk := await connection.read_chunk():
            assert chunk.startswith(b"data: ")
            assert chunk.endswith(b"\n\n")
            raw += chunk
    bursts = [line for line in raw.split(b"\n\n") if b'"content"' in line]
    assert len(bursts) <= 1 + len(text) // 9 + 1


USAGE = {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
@pytest.mark.parametrize("n", [1, 3])
async def test_one_usage_chunk_comes_just_before_done_only_when_asked(
    endpoint: str, n: int
) -> None:
    async with a_server(says("hello")) as server:
        ask = getattr(server, endpoint)
        asked = {"include_usage": True}
        with_usage = (await ask(stream=True, stream_options=asked, n=n, max_tokens=5)).events
        for options in (None, {"include_usage": False}, {}):
            without = (await ask(stream=True, stream_options=options, n=n, max_tokens=5)).events
            assert all(event["choices"] and "usage" not in event for event in without[:-1])
        whole = (await ask(n=n, max_tokens=5)).json()
    *chunks, usage_chunk, done = with_usage
    assert done == "[DONE]"
    assert usage_chunk["choices"] == []
    assert all(event["choices"] and event["usage"] is None for event in chunks)
    counts = {key: usage_chunk["usage"][key] for key in USAGE}
    assert counts == {key: whole["usage"][key] for key in USAGE}
    assert counts["completion_tokens"] == 5 * n
    assert usage_chunk["metrics"]["speculative_decoding"]


async def test_continuous_usage_counts_tokens_on_every_chunk() -> None:
    async with a_server(says("hello")) as server:
        options = {"include_usage": True, "continuous_usage_stats": True}
        events = (await server.complete(stream=True, stream_options=options, max_tokens=5)).events
    counts = [event["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == [1, 2, 3, 4, 5, 5]


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
async def test_n_and_several_prompts_make_choices_with_their_own_texts(endpoint: str) -> None:
    async with a_server(says("hello")) as server:
        ask = getattr(server, endpoint)
        events = (await ask(stream=True, n=3, max_tokens=9)).events
        for index in range(3):
            assert "".join(texts(events, index)) == "hello"
            assert finishes(events, index) == ["stop"]
        metrics = [event for event in events[:-1] if "metrics" in event]
        assert len(metrics) == 1
        assert metrics[0]["metrics"]["specserve"]["steps"] == 18
        whole = await server.complete(prompt=["a:", "b:"], n=2, max_tokens=9)
    assert [choice["index"] for choice in whole.json()["choices"]] == [0, 1, 2, 3]
    assert whole.json()["usage"]["prompt_tokens"] == 4


async def test_the_metrics_of_a_stream_are_those_of_the_whole_reply_and_come_once() -> None:
    """aiperf takes none where several chunks carry them."""
    body = {"speculation": {"drafter": "part", "max_draft_tokens": 4, "detailed": True}}
    async with a_server(says("abcdefghijkl")) as server:
        whole = (await server.chat(**body)).json()["metrics"]["speculative_decoding"]
        stream = (
            await server.chat(stream=True, stream_options={"include_usage": True}, **body)
        ).events
        plain = (await server.chat(stream=True, **body)).events
        brief = (await server.chat(speculation={"drafter": "part"})).json()["metrics"]
    assert stream[-2]["metrics"]["speculative_decoding"] == whole
    assert plain[-2]["metrics"]["speculative_decoding"] == whole
    for events in (stream, plain):
        assert sum("metrics" in event for event in events[:-1]) == 1
    assert whole["num_spec_tokens"] == 4
    assert len(whole["acceptance_histogram"]) == 5
    assert sum(whole["per_step_accepted"]) == whole["num_accepted_draft_tokens"] > 0
    assert "per_step_accepted" not in brief["speculative_decoding"]


@pytest.mark.parametrize("drafter", ["none", "oracle", "anti"])
@pytest.mark.parametrize("stop", ["DEF", ["XYZ", "GHI"], "EF"])
async def test_no_character_of_a_stop_string_is_ever_sent(drafter: str, stop: object) -> None:
    async with a_server(says("ABCDEXDEFGHIJ")) as server:
        body = {"stop": stop, "max_tokens": 13, "speculation": {"drafter": drafter}}
        events = (await server.complete(stream=True, **body)).events
        kept = (await server.complete(include_stop_str_in_output=True, **body)).json()
        whole = (await server.complete(**body)).json()["choices"][0]
    expected = {"DEF": "ABCDEX", "EF": "ABCDEXD"}.get(str(stop), "ABCDEXDEF")
    assert "".join(texts(events)) == whole["text"] == expected
    assert whole["finish_reason"] == "stop"
    assert kept["choices"][0]["text"] == expected + whole["stop_reason"]


@pytest.mark.parametrize("drafter", ["none", "oracle", "part"])
async def test_tokens_logprobs_and_usage_end_where_the_text_does(drafter: str) -> None:
    body: dict[str, object] = {
        "stop": "f",
        "max_tokens": 20,
        "return_token_ids": True,
        "speculation": {"drafter": drafter, "max_draft_tokens": 5},
    }
    async with a_server(says("abcdefghijkl")) as server:
        whole = (await server.complete(logprobs=2, **body)).json()
        events = (await server.complete(logprobs=2, stream=True, **body)).events[:-1]
        chat = (await server.chat(logprobs=True, top_logprobs=2, **body)).json()
        chat_events = (await server.chat(stream=True, logprobs=True, **body)).events[:-1]
    choice = whole["choices"][0]
    assert choice["token_ids"] == list(b"abcdef")
    assert choice["logprobs"]["tokens"] == list("abcdef")
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4, 5]
    assert all(len(top) == 2 for top in choice["logprobs"]["top_logprobs"])
    assert whole["usage"]["completion_tokens"] == 6
    assert choice["prompt_token_ids"] == list(b"say:")
    streamed = [event["choices"][0] for event in events]
    assert joined(one["token_ids"] for one in streamed) == list(b"abcdef")
    assert joined(one["logprobs"]["text_offset"] for one in streamed) == [0, 1, 2, 3, 4, 5]
    assert streamed[0]["prompt_token_ids"] == list(b"say:")
    assert all("prompt_token_ids" not in one for one in streamed[1:])
    content = chat["choices"][0]["logprobs"]["content"]
    assert [token["token"] for token in content] == list("abcdef")
    assert content[0]["bytes"] == [97]
    assert content[0]["top_logprobs"][0]["token"] == "a"
    assert chat["prompt_token_ids"] == chat_events[0]["prompt_token_ids"]
    ids = [event["choices"][0].get("token_ids", []) for event in chat_events]
    assert joined(ids) == list(b"abcdef")


async def test_bad_words_and_forbidden_tokens_are_never_put_out_whoever_guesses() -> None:
    async with a_server(says("hello, hello")) as server:
        texts: dict[str, set[str]] = {"bad": set(), "allowed": set()}
        for drafter in ("none", "oracle", "anti", "part"):
            asked = {"speculation": {"drafter": drafter}, "max_tokens": 12}
            bad = await server.complete(bad_words=["el", "o,"], **asked)
            texts["bad"].add(bad.json()["choices"][0]["text"])
            ids = [ord(character) for character in "help"]
            allowed = await server.complete(allowed_token_ids=ids, **asked)
            texts["allowed"].add(allowed.json()["choices"][0]["text"])
    [bad_text], [allowed_text] = texts["bad"], texts["allowed"]
    assert len(bad_text) == 12
    assert "el" not in bad_text
    assert "o," not in bad_text
    assert set(allowed_text) <= set("help")
    assert allowed_text.startswith("hell")


@pytest.mark.parametrize("stream", [True, False])
async def test_echo_puts_each_prompt_before_its_texts(stream: bool) -> None:
    async with a_server(says("hello")) as server:
        asked: list[tuple[dict[str, object], list[str]]] = [
            ({"prompt": "say it:", "n": 2}, ["say it:hello"] * 2),
            ({"prompt": ["é:", "b:"]}, ["é:hello", "b:hello"]),
            ({"prompt": list(b"ids:")}, ["ids:hello"]),
            ({"prompt": "a long one:", "truncate_prompt_tokens": 4}, ["one:hello"]),
        ]
        for body, expected in asked:
            reply = await server.complete(echo=True, stream=stream, **body)
            found = ["" for _ in expected]
            replies = reply.events[:-1] if stream else [reply.json()]
            for choice in (choice for part in replies for choice in part["choices"]):
                found[choice["index"]] += choice["text"]
            assert found == expected


async def test_a_prompt_is_cut_to_its_last_tokens_in_both_endpoints() -> None:
    async with a_server(says("hello")) as server:
        for wanted, used in ((3, 3), (-1, 255), (255, 255)):
            reply = await server.complete(
                prompt=[*[1] * 300, ord(":")], truncate_prompt_tokens=wanted, max_tokens=1
            )
            assert reply.json()["usage"]["prompt_tokens"] == used
        chat = (await server.chat(truncate_prompt_tokens=2, max_tokens=1)).json()
        assert chat["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("drafter", ["none", "oracle"])
async def test_of_best_of_the_likeliest_come_back_and_all_are_counted(drafter: str) -> None:
    async with a_server(says("hello")) as server:
        asked = {
            "prompt": ["a:", "b:"], "temperature": 2.0, "seed": 3, "max_tokens": 4,
            "speculation": {"drafter": drafter}, "ignore_eos": True,
            "logit_bias": {str(ord(letter)): 20 for letter in "xyz"},
        }  # fmt: skip
        every = (await server.complete(**asked, n=6, logprobs=0)).json()
        best = (await server.complete(**asked, n=2, best_of=6)).json()
    assert best["usage"]["completion_tokens"] == every["usage"]["completion_tokens"] == 48
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert [choice["logprobs"] for choice in best["choices"]] == [None] * 4
    for first in (0, 1):
        group = every["choices"][6 * first : 6 * first + 6]
        means = {c["index"]: sum(c["logprobs"]["token_logprobs"]) / 4 for c in group}
        wanted = sorted(group, key=lambda choice: -means[choice["index"]])[:2]
        assert len({round(value, 9) for value in means.values()}) > 2
        assert [c["text"] for c in best["choices"][2 * first : 2 * first + 2]] == [
            c["text"] for c in wanted
        ]


async def test_long_bodies_are_read_and_parsed_all_the_same() -> None:
    settings = ServerSettings(off_loop_body_bytes=10)
    async with a_server(says("hello"), settings=settings) as server:
        assert (await server.complete()).json()["choices"][0]["text"] == "hello"
        reply = await server.post("/v1/completions", b'{"prompt": "a", "prompt": "b"}')
    assert (reply.status, reply.error["param"]) == (400, "prompt")


async def test_tokenize_and_detokenize_are_inverse_and_chat_counts_its_template() -> None:
    async with a_server(says("hello")) as server:
        reply = await server.post("/tokenize", {"prompt": "né:", "return_token_strs": True})
        assert reply.json() == {
            "count": 4,
            "max_model_len": 256,
            "tokens": list("né:".encode()),
            "token_strs": ["n", "bytes:\\xc3", "bytes:\\xa9", ":"],
        }
        back = await server.post("/detokenize", {"tokens": reply.json()["tokens"]})
        assert back.json() == {"prompt": "né:"}
        chat = (await server.post("/tokenize", {"messages": CHAT["messages"]})).json()
        assert (await server.chat()).json()["usage"]["prompt_tokens"] == chat["count"]


async def test_a_final_message_of_the_assistant_is_continued() -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "hel"}]
    async with a_server(says("hello")) as server:
        continued = await server.chat(
            messages=messages, continue_final_message=True, add_generation_prompt=False
        )
        assert continued.json()["choices"][0]["message"]["content"] == "lo"


async def test_models_name_what_is_served_under_any_spelling_of_the_path() -> None:
    async with a_server(says("hello")) as server:
        listed = (await server.get("/v1/models")).json()
        for path in ("/v1//models", "//v1/models"):
            assert (await server.get(path)).json() == listed
        one = (await server.get("/v1/models/test")).json()
        missing = await server.get("/v1/models/some/other")
        assert (await server.post("/v1//completions", {"prompt": "a:"})).status == 200
    assert listed == {"object": "list", "data": [one]}
    assert one["id"] == one["root"] == "test"
    assert (one["object"], one["owned_by"], one["max_model_len"]) == ("model", "specserve", 256)
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


async def test_health_readiness_version_and_metrics_answer() -> None:
    async with a_server(says("hello")) as server:
        assert (await server.get("/health")).json() == {"status": "ok"}
        assert (await server.get("/ready")).json() == {"status": "ready"}
        assert msgspec.json.decode((await server.get("/version")).body)["version"]
        metrics = await server.get("/metrics")
    assert metrics.body == b"specserve_up 1\n"
    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")


async def test_two_live_requests_with_one_request_id_both_work_and_both_hear_it() -> None:
    pace = Pace()
    async with a_server(says("hello"), on_forward=pace) as server:
        headers = {"x-request-id": "mine.1"}
        body = {"prompt": "say:", "temperature": 0}
        asked = [
            asyncio.create_task(server.post("/v1/completions", body, headers)) for _ in range(2)
        ]
        await _until_live(server, 2)
        pace.allow(100)
        replies = await asyncio.gather(*asked)
    assert [reply.json()["choices"][0]["text"] for reply in replies] == ["hello"] * 2
    assert [reply.headers["x-request-id"] for reply in replies] == ["mine.1"] * 2
    assert replies[0].json()["id"] != replies[1].json()["id"]


async def _until_live(server: Server, num_requests: int) -> None:
    while (now := server.engine.snapshot()).num_running + now.num_waiting < num_requests:
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("sent", ["", "a b", "x" * 129, "<script>"])
async def test_an_unfit_request_id_is_replaced(sent: str) -> None:
    async with a_server(says("hello")) as server:
        reply = await server.post("/v1/completions", {"prompt": "a:"}, {"x-request-id": sent})
        named = await server.complete(request_id="from-body")
        unfit = await server.complete(request_id="a b")
    assert reply.headers["x-request-id"].startswith("req-")
    assert named.headers["x-request-id"] == "from-body"
    assert (unfit.status, unfit.error["param"]) == (400, "request_id")

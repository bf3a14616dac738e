"""Bad input of every kind gets a 4xx that names the field, and the next request works."""

from __future__ import annotations

import asyncio
import gzip
import json

import msgspec
import pytest

from specserve.config import EngineConfig
from specserve.server.state import ServerSettings
from specserve.server.wire import ChatBody, CompletionBody
from tests.http_server import CONFIG, Pace, Server, a_server
from tests.raw_http import Reply, ask, connect
from tests.scripted import VOCAB_SIZE, says

pytestmark = pytest.mark.timeout(60)

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "say"}]


async def still_works(server: Server) -> None:
    reply = await server.complete(max_tokens=9)
    assert reply.json()["choices"][0]["text"] == "hello"
    assert (await server.get("/health")).status == 200


def check_refusal(reply: Reply, param: str | None, *, status: int = 400) -> None:
    assert (reply.status, reply.error["param"]) == (status, param), reply.body
    assert reply.headers["content-type"].startswith("application/json")
    assert reply.headers["x-request-id"]
    text = reply.body.decode()
    assert "Traceback" not in text
    assert 'File "' not in text
    assert "/work" not in text
    assert "0x" not in text


SAMPLING = [
    ("n", 0), ("n", -1), ("n", 129), ("n", 10**9),
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", -1e308), ("temperature", 10**40),
    ("top_p", -0.1), ("top_p", 1.1), ("top_k", -2), ("top_k", 10**40),
    ("min_p", -0.1), ("min_p", 1.1),
    ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
    ("repetition_penalty", 0), ("repetition_penalty", -5), ("repetition_penalty", 1e308),
    ("repetition_penalty", 5e-324), ("repetition_penalty", 1e-300), ("repetition_penalty", 0.009),
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 10**40),
    ("min_tokens", -1), ("min_tokens", 10**40), ("seed", 2**63), ("seed", -(2**63) - 1),
    ("stop", ""), ("stop", [""]), ("stop", ["", "x"]), ("stop", ["a"] * 17), ("stop", "a" * 1025),
    ("stop_token_ids", [-1]), ("stop_token_ids", [VOCAB_SIZE]), ("stop_token_ids", [1] * 129),
    ("allowed_token_ids", []), ("allowed_token_ids", [VOCAB_SIZE]), ("allowed_token_ids", [-1]),
    ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", 256), ("truncate_prompt_tokens", -2),
    ("bad_words", [""]), ("bad_words", ["a" * 257]), ("bad_words", ["a"] * 129),
    ("logit_bias", {"-1": 1}), ("logit_bias", {str(VOCAB_SIZE): 1}), ("logit_bias", {"abc": 1}),
    ("logit_bias", {"5": 1e9}), ("logit_bias", {"9" * 30: 1}),
    ("cache_salt", ""), ("cache_salt", "a" * 257), ("priority", 2**31), ("priority", -(10**40)),
    ("speculation.drafter", {"drafter": "magic"}),
    ("speculation.max_draft_tokens", {"max_draft_tokens": 9}),
    ("speculation.max_draft_tokens", {"max_draft_tokens": -1}),
    ("speculation.verify", {"verify": "hope"}),
    ("stream_options", {"include_usage": True}),
]  # fmt: skip


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
async def test_a_parameter_out_of_range_is_refused_by_name_and_harms_nobody(endpoint: str) -> None:
    async with a_server(says("hello")) as server:
        for param, value in SAMPLING:
            reply = await getattr(server, endpoint)(**{param.split(".")[0]: value})
            check_refusal(reply, param)
        await still_works(server)


async def test_a_minimum_of_tokens_beyond_the_maximum_is_refused() -> None:
    async with a_server(says("hello")) as server:
        check_refusal(await server.complete(min_tokens=9, max_tokens=8), "min_tokens")
        check_refusal(await server.complete(min_tokens=17), "min_tokens")  # of 16 by default
        whole = (await server.complete(min_tokens=8, max_tokens=8)).json()
        assert whole["usage"]["completion_tokens"] == 8  # END was forbidden at 6


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty", "seed"])
async def test_numbers_that_json_does_not_know_are_refused(field: str) -> None:
    async with a_server(says("hello")) as server:
        for literal in ("NaN", "Infinity", "-Infinity", "1e400", "-1e400", '"1"', "true", "[]"):
            raw = f'{{"prompt": "say:", "{field}": {literal}}}'.encode()
            reply = await server.post("/v1/completions", raw)
            assert reply.status == 400
            assert reply.error["message"]
        await still_works(server)


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "invalid_json"),
        (b"\xef\xbb\xbf{}", "invalid_json"),
        (b'{"prompt": "\\ud83d"}', "invalid_json"),
        (b'{"prompt": "\xff\xfe"}', "invalid_json"),
        (b'{"x": ' + b"[" * 200_000, "invalid_json"),
        (b'{"prompt": "a", "prompt": "b"}', "duplicate_key"),
    ],
)
async def test_a_body_that_is_no_json_is_refused(raw: bytes, code: str) -> None:
    async with a_server(says("hello")) as server:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            reply = await server.post(path, raw)
            assert (reply.status, reply.error["code"]) == (400, code)
        await still_works(server)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {}, "prompt"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "prompt"),
        ("/v1/completions", {"prompt": [""]}, "prompt"),
        ("/v1/completions", {"prompt": [-1]}, "prompt"),
        ("/v1/completions", {"prompt": [VOCAB_SIZE]}, "prompt"),
        ("/v1/completions", {"prompt": [10**40]}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 129}, "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 10_000}, "prompt"),
        ("/v1/completions", {"prompt": ["a:"] * 65, "n": 2}, "n"),
        ("/v1/completions", {"prompt": "a:", "logprobs": 6}, "logprobs"),
        ("/v1/completions", {"prompt": "a:", "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"prompt": "a:", "prompt_logprobs": 21}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "a:", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "a:", "prompt_logprobs": -1, "logprobs": 1, "echo": True},
         "prompt_logprobs"),
        ("/v1/completions", {"prompt": "a:", "prompt_logprobs": 0, "stream": True},
         "prompt_logprobs"),
        (CHAT, {"messages": USER, "prompt_logprobs": 21}, "prompt_logprobs"),
        (CHAT, {"messages": USER, "prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "a:", "best_of": 21}, "best_of"),
        ("/v1/completions", {"prompt": "a:", "best_of": 1, "n": 2}, "best_of"),
        ("/v1/completions", {"prompt": "a:", "best_of": 2, "stream": True}, "best_of"),
        ("/v1/completions", {"prompt": ["a:"] * 65, "best_of": 2}, "n"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "hi"}, "messages"),
        (CHAT, {"messages": [{"role": "foo", "content": ""}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": ""}] * 300}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "a", "name": "b" * 9000}]}, "messages"),
        (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools[0]"),
        (CHAT, {"messages": USER, "add_special_tokens": True}, "add_special_tokens"),
        (CHAT, {"messages": USER, "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
    ],
)  # fmt: skip
async def test_a_prompt_that_cannot_be_served_is_refused_by_name(
    path: str, body: dict[str, object], param: str
) -> None:
    async with a_server(says("hello")) as server:
        check_refusal(await server.post(path, body), param)
        await still_works(server)


IGNORED = {
    "store": True, "metadata": {"a": "b"}, "parallel_tool_calls": True, "service_tier": "auto",
    "reasoning_effort": "low", "user": "u", "x_foo": [1, {"a": None}], "modalities": ["text"],
}  # fmt: skip


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
async def test_unknown_fields_and_nulls_are_accepted(endpoint: str) -> None:
    kind = CompletionBody if endpoint == "complete" else ChatBody
    given = {"prompt", "messages", "max_tokens"}
    nulls = dict.fromkeys(name for name in kind.__struct_fields__ if name not in given)
    async with a_server(says("hello")) as server:
        ask = getattr(server, endpoint)
        for extra in (IGNORED, nulls):
            reply = await ask(max_tokens=9, **extra)
            assert reply.status == 200, reply.body
            assert "hello" in reply.body.decode()


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "min_p"])
async def test_extreme_sampling_values_are_greedy(field: str) -> None:
    values: dict[str, list[float]] = {
        "temperature": [1e-10, 1e-6, 0, -0.0],
        "top_p": [0, 1e-9],
        "top_k": [1],
        "min_p": [1],
    }
    async with a_server(says("hello")) as server:
        for value in values[field]:
            body = {"prompt": "say:", "seed": 3, field: value}
            reply = await server.post("/v1/completions", body)
            assert reply.json()["choices"][0]["text"] == "hello"


async def test_logprobs_of_a_forbidden_token_are_numbers() -> None:
    async with a_server(says("hello")) as server:
        bias = {str(token): -100 for token in b"helo"}
        reply = await server.chat(logprobs=True, top_logprobs=20, logit_bias=bias, max_tokens=4)
    for token in reply.json()["choices"][0]["logprobs"]["content"]:
        assert len(token["top_logprobs"]) == 20
        assert all(-9999.0 <= top["logprob"] <= 0 for top in token["top_logprobs"])


OVERFLOW = "This model's maximum context length is {} tokens. However, "


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [1] * 257}, "prompt"),
        ({"prompt": [1] * 256}, "prompt"),
        ({"prompt": [1] * 200, "max_tokens": 57}, "max_tokens"),
        ({"prompt": [1] * 200, "max_tokens": 10**12}, "max_tokens"),
        ({"prompt": "a" * 300}, "prompt"),
        ({"prompt": "a" * 5000}, "prompt"),  # before it is tokenized
    ],
)
async def test_a_context_overflow_is_told_in_the_words_clients_know(
    body: dict[str, object], param: str
) -> None:
    async with a_server(says("hello")) as server:
        reply = await server.post("/v1/completions", body)
        check_refusal(reply, param)
        assert reply.error["message"].startswith(OVERFLOW.format(256))
        assert "prompt is too long" in reply.error["message"]  # what LangChain knows it by
        assert reply.error["code"] == "context_length_exceeded"
        assert reply.error["type"] == "invalid_request_error"
        content = [{"role": "user", "content": "a" * 300}]
        chat = await server.post("/v1/chat/completions", {"messages": content})
        check_refusal(chat, "messages")
        assert chat.error["code"] == "context_length_exceeded"
        await still_works(server)


async def test_a_prompt_larger_than_the_pool_is_refused_not_queued() -> None:
    config = msgspec.structs.replace(CONFIG, block_size=16, num_blocks=8)
    async with a_server(says("hello"), config=config) as server:
        for k in (0, 8):
            body = {"prompt": [1] * 200, "max_tokens": 1, "speculation": {"max_draft_tokens": k}}
            reply = await server.post("/v1/completions", body)
            check_refusal(reply, "prompt")
            assert reply.error["message"].startswith(OVERFLOW.format(128))
        await still_works(server)


@pytest.mark.parametrize("drafter", ["none", "oracle", "anti"])
@pytest.mark.parametrize("room", [1, 2, 3, 4, 9])
async def test_a_prompt_that_nearly_fills_the_context_gets_exactly_what_fits(
    drafter: str, room: int
) -> None:
    tiny: EngineConfig = msgspec.structs.replace(CONFIG, max_model_len=32, num_blocks=8)
    async with a_server(says("x", then=None), config=tiny) as server:
        prompt = [ord(":")] * (32 - room)
        for asked in ({}, {"max_tokens": room}):
            body = {
                "prompt": prompt,
                "temperature": 0,
                "speculation": {"drafter": drafter},
                **asked,
            }
            reply = (await server.post("/v1/completions", body)).json()
            assert reply["choices"][0]["text"] == "x" * room
            assert reply["choices"][0]["finish_reason"] == "length"
            assert reply["usage"]["completion_tokens"] == room


@pytest.mark.parametrize("name", ["gpt-4", "", "TEST", "a" * 5000])
async def test_an_unknown_model_is_404_and_the_served_or_no_name_is_not(name: str) -> None:
    async with a_server(says("hello")) as server:
        for reply in (await server.complete(model=name), await server.chat(model=name)):
            check_refusal(reply, "model", status=404)
            assert reply.error["code"] == "model_not_found"
        for known in ({"model": "test"}, {"model": None}, {}):
            assert (await server.complete(**known)).status == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/none", 404),
        ("GET", "/v1/none", 404),
        ("POST", "/v1/completions/", 404),
        ("GET", "/v1/models/", 404),
        ("GET", "/v1/../etc/passwd", 404),
        ("GET", "/v1/%2e%2e/metrics", 404),
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("PUT", "/metrics", 405),
    ],
)
async def test_a_wrong_path_or_method_is_json_too(method: str, path: str, status: int) -> None:
    async with a_server(says("hello")) as server, connect(server.port) as connection:
        await connection.request(method, path)
        reply = await connection.read_reply()
        check_refusal(reply, None, status=status)
        assert ("allow" in reply.headers) == (status == 405)


async def test_head_is_get_without_a_body() -> None:
    async with a_server(says("hello")) as server, connect(server.port) as connection:
        await connection.request("HEAD", "/health")
        status, headers = await connection.read_head()
        assert (status, headers["content-length"]) == (200, "15")


@pytest.mark.parametrize(
    "raw",
    [
        b"not http at all\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nhead er: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: x\r\n\r\n",
        b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"a" * 9000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"a: b\r\n" * 200 + b"\r\n",
    ],
)
async def test_malformed_http_gets_a_json_400_and_the_end_of_its_connection(raw: bytes) -> None:
    async with a_server(says("hello")) as server:
        async with connect(server.port) as connection:
            await connection.send(raw)
            reply = await connection.read_reply()
            assert (reply.status, reply.error["code"]) == (400, "bad_request")
            assert await connection.is_closed()
        await still_works(server)


async def test_compressed_bodies_are_read_and_damaged_ones_are_refused() -> None:
    settings = ServerSettings(max_body_bytes=10_000)
    body = json.dumps({"prompt": "say:", "temperature": 0}).encode()
    gz = {"content-encoding": "gzip"}
    async with a_server(says("hello"), settings=settings) as server:
        good = await server.post("/v1/completions", gzip.compress(body), gz)
        assert good.json()["choices"][0]["text"] == "hello"
        for damaged in (b"not gzip", gzip.compress(body)[:-12], gzip.compress(body)[:20] + b"xxxx"):
            reply = await server.post("/v1/completions", damaged, gz)
            assert reply.status == 400, reply
            assert reply.error["type"] == "invalid_request_error"
        bomb = await server.post("/v1/completions", gzip.compress(b" " * 50_000_000), gz)
        check_refusal(bomb, None, status=413)
        large = await server.post("/v1/completions", b" " * 10_001)
        check_refusal(large, None, status=413)
        assert "10000 bytes" in large.error["message"]
        await still_works(server)


async def test_a_body_that_never_ends_is_given_up() -> None:
    settings = ServerSettings(body_seconds=0.1)
    async with a_server(says("hello"), settings=settings) as server:
        async with connect(server.port) as connection:
            await connection.send(
                b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 99\r\n\r\n{"
            )
            check_refusal(await connection.read_reply(), None, status=408)
        await still_works(server)


async def test_headers_that_never_end_are_given_up() -> None:
    settings = ServerSettings(header_seconds=0.1)
    async with a_server(says("hello"), settings=settings) as server:
        async with connect(server.port) as connection:
            await connection.send(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n")
            assert await connection.is_closed()
        await still_works(server)


async def test_a_full_queue_is_told_so_that_clients_retry() -> None:
    pace = Pace()
    config = msgspec.structs.replace(CONFIG, max_num_seqs=1, max_waiting=2)
    async with a_server(says("hello"), config=config, on_forward=pace) as server:
        first = asyncio.create_task(server.complete())
        await server.has(running=1)
        second = asyncio.create_task(server.complete())
        await server.has(running=1, waiting=1)
        refused = await server.complete(n=2, stream=True)
        check_refusal(refused, None, status=429)
        assert refused.error["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) >= 1
        pace.allow(100)
        for accepted in (await first, await second):
            assert accepted.json()["choices"][0]["text"] == "hello"
        await server.is_idle()  # what had been queued of the refused one is gone
        await still_works(server)


async def test_more_sequences_than_may_ever_queue_are_refused_for_good() -> None:
    config = msgspec.structs.replace(CONFIG, max_waiting=4)
    async with a_server(says("hello"), config=config) as server:
        check_refusal(await server.complete(n=5), "n")
        check_refusal(await server.chat(n=5), "n")
        check_refusal(await server.complete(prompt=["a:"] * 5), "prompt")
        assert (await server.complete(n=4)).status == 200
        await still_works(server)


async def test_an_expectation_nobody_knows_is_refused_in_the_shape_of_every_error() -> None:
    async with a_server(says("hello")) as server, connect(server.port) as connection:
        for expect in ("100-continue", "magic"):
            body = {"prompt": "say:"}
            await connection.request("POST", "/v1/completions", body, headers={"expect": expect})
            if expect == "100-continue":
                assert await connection.read_head() == (100, {})
                assert (await connection.read_reply()).status == 200
        check_refusal(await connection.read_reply(), None, status=417)
        await still_works(server)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/nowhere"), ("GET", "/v1/completions"), ("DELETE", "/health")]
)
async def test_so_it_is_where_no_route_is(method: str, path: str) -> None:
    async with a_server(says("hello")) as server:
        reply = await ask(server.port, method, path, headers={"expect": "magic"})
        assert (reply.status, reply.error["code"]) == (417, "expectation_failed")
        await still_works(server)

"""Thousands of damaged requests on real sockets: each is answered in a documented shape, none harms
the server, and afterwards nothing of them is left.

A request is a valid one in which a few things were changed: values of any kind anywhere in its
body, the bytes of its JSON, its coding, its headers, how it is cut on the wire. One with a prompt
that injects a fault may fail with 500; no other may.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any  # decoded JSON

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from specserve.memory import MIB
from specserve.server.app import ROUTES
from specserve.server.message_wire import MessagesBody
from specserve.server.response_wire import ResponsesBody
from specserve.server.wire import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.raw_http import Connection, Reply, connect, strict_json
from tests.server_process import CHATTER, FAULT, ServerProcess, a_server_process

PER_EXAMPLE = 10  # requests that are under way together

USER = [{"role": "user", "content": "say"}]
ADD = {
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
COMMON: dict[str, Any] = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 5, "stream": True,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
    "logit_bias": {"65": 3}, "stop_token_ids": [7], "allowed_token_ids": [65, 66, 67],
    "bad_words": ["xyz"], "cache_salt": "s", "priority": 1, "request_id": "r-1",
    "speculation": {"drafter": "part", "max_draft_tokens": 4, "detailed": True},
    "prediction": {"type": "content", "content": CHATTER},
    "structured_outputs": {"regex": "[a-z]{1,9}"},
}  # fmt: skip
OLDER: dict[str, Any] = {
    "n": 2, "stop": ["z", "!"], "min_tokens": 2, "ignore_eos": False, "return_token_ids": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "truncate_prompt_tokens": 9, "include_stop_str_in_output": True,
    "response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": ADD["parameters"]},
    },
}  # fmt: skip
# path -> (kind of body, what must be there, what may be)
POSTS: dict[str, tuple[type[msgspec.Struct], dict[str, Any], dict[str, Any]]] = {
    "/v1/completions": (
        CompletionBody,
        {"prompt": "say:", "max_tokens": 9},
        {**COMMON, **OLDER, "logprobs": 3, "best_of": 3, "echo": True, "prompt": [[1, 2], [3]]},
    ),
    "/v1/chat/completions": (
        ChatBody,
        {"messages": USER, "max_tokens": 9},
        {
            **COMMON,
            **OLDER,
            "logprobs": True,
            "top_logprobs": 4,
            "tools": [{"type": "function", "function": ADD}],
            "tool_choice": "required",
            "chat_template_kwargs": {"x": 1},
        },
    ),
    "/v1/responses": (
        ResponsesBody,
        {"input": "say", "max_output_tokens": 9},
        {
            **COMMON,
            "instructions": "be brief",
            "tools": [{"type": "function", **ADD}],
            "text": {"format": {"type": "json_schema", "name": "x", "schema": ADD["parameters"]}},
            "input": [{"type": "message", "role": "user", "content": "say"}],
        },
    ),
    "/v1/messages": (
        MessagesBody,
        {"model": "test", "messages": USER, "max_tokens": 9},
        {
            **COMMON,
            "system": [{"type": "text", "text": "be brief"}],
            "stop_sequences": ["z"],
            "tools": [{"name": "add", "input_schema": ADD["parameters"]}],
            "tool_choice": {"type": "any"},
        },
    ),
    "/v1/messages/count_tokens": (
        MessagesBody,
        {"model": "test", "messages": USER},
        {"system": "be brief"},
    ),
    "/tokenize": (TokenizeBody, {"prompt": "say"}, {"messages": USER, "return_token_strs": True}),
    "/detokenize": (DetokenizeBody, {"tokens": [65, 66]}, {"model": "test"}),
}

NUMBERS = (0, -1, 1, 2, 17, 128, 129, 257, 2**31, -(2**31) - 1, 2**63, -(2**63), 10**40)
FLOATS = (-0.0, 1e-320, 1e-10, 0.5, 1.5, 1e308, -1e308)
LITERALS = ("NaN", "Infinity", "-Infinity", "1e400", "-1e999", "9" * 400, "01", "tru", "'a'")
TEXTS = (
    "", " ", "\x00", "a\nb\r\nc", "\u2028", "é你👩‍🚀", "\U0010ffff", "ﬃ", "a" * 3000, "\ufeff",
    "\ufffd",
    "<|end|>", "<|user|>", "<tool_call>", "</think>", "{{ 7 * 7 }}", "{% for i in range(10**9) %}",
    "../../etc/passwd", "http://169.254.169.254/", "(a+)+$", "a{1,100000}", "(", FAULT,
    "oracle", "anti", "ngram", "auto", "none", "rejection", "typical", "user", "assistant", "tool",
)  # fmt: skip
HEADERS = (
    ("content-type", "text/plain"), ("content-type", ""), ("content-encoding", "gzip"),
    ("content-encoding", "deflate"), ("content-encoding", "br"), ("content-encoding", "é"),
    ("accept", "nothing/known"), ("expect", "magic"), ("connection", "close"), ("te", "trailers"),
    ("x-request-id", "x" * 500), ("x-request-id", "a b"), ("traceparent", "00-junk"),
    ("traceparent", f"00-{'1' * 32}-{'2' * 16}-01"), ("authorization", "Bearer \x80"),
    ("origin", "null"), ("host", "again"), ("upgrade", "h2c"), ("range", "bytes=0-"),
    ("x-long", "y" * 9000), ("transfer-encoding", "gzip"), ("content-length", "5"), ("a b", "c"),
)  # fmt: skip


PATHS = sorted({path for _, path in ROUTES} - {"/specserve/events"})  # which never ends


class Sent(msgspec.Struct, frozen=True):
    method: str
    path: str
    body: bytes
    headers: list[tuple[str, str]]
    pieces: int | None  # chunks of a chunked upload; None: its length is told
    length_error: int  # added to the length that is told

    @property
    def may_be_hung_up_on(self) -> bool:
        """Its end cannot be known, or it asks for that."""
        odd = {"content-length", "transfer-encoding", "host", "a b", "upgrade", "x-long"}
        return self.length_error != 0 or any(name in odd for name, _ in self.headers)

    def __repr__(self) -> str:
        return f"<{self.raw()[:2000]!r}>"

    def raw(self) -> bytes:
        lines = [f"{self.method} {self.path} HTTP/1.1", "host: test"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if self.pieces is None:
            lines.append(f"content-length: {len(self.body) + self.length_error}")
            payload = self.body
        else:
            lines.append("transfer-encoding: chunked")
            size = -(-len(self.body) // self.pieces) or 1
            parts = [self.body[at : at + size] for at in range(0, len(self.body), size)]
            payload = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))
        return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + payload


# ---- making them -----------------------------------------------------------------------------


def a_scalar(luck: random.Random) -> Any:
    return luck.choice(
        [
            None, luck.random() < 0.5, luck.choice(NUMBERS), luck.choice(FLOATS),
            luck.choice(TEXTS), luck.choice(TEXTS), luck.randrange(-(2**70), 2**70), {}, [],
            "".join(chr(luck.randrange(0xD7FF)) for _ in range(luck.randrange(9))),
        ]
    )  # fmt: skip


def a_value(luck: random.Random) -> Any:
    kind = luck.randrange(8)
    if kind == 0:
        return [a_scalar(luck) for _ in range(luck.randrange(4))]
    if kind == 1:
        keys = [*TEXTS, "type", "text", "role", "json"]
        return {luck.choice(keys): a_scalar(luck) for _ in range(luck.randrange(4))}
    if kind == 2:
        return [a_scalar(luck)] * luck.choice([20, 130, 1100])
    if kind == 3:
        depth = luck.choice([9, 200])
        return json.loads("[" * depth + "]" * depth)
    return a_scalar(luck)


def places(document: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if at:
        yield at
    if isinstance(document, dict):
        for key, inner in document.items():
            yield from places(inner, (*at, key))
    elif isinstance(document, list):
        for idx, inner in enumerate(document[:4]):
            yield from places(inner, (*at, idx))


def a_body(luck: random.Random, path: str) -> Any:
    """A valid body with some of the optional fields, and up to three of its places changed."""
    kind, needed, optional = POSTS[path]
    chosen = luck.sample(sorted(optional), luck.randrange(min(4, len(optional) + 1)))
    document = json.loads(json.dumps({**needed, **{name: optional[name] for name in chosen}}))
    for _ in range(luck.choice([0, 1, 1, 2, 3])):
        if luck.randrange(3) == 0:
            document[luck.choice(kind.__struct_fields__)] = a_value(luck)
            continue
        *way, last = luck.choice(list(places(document)) or [("x",)])
        holder = document
        for step in way:
            holder = holder[step]
        if luck.randrange(6) == 0 and holder:
            del holder[last]
        else:
            holder[last] = a_value(luck)
    return document


def encoded(luck: random.Random, path: str) -> bytes:
    text = json.dumps(a_body(luck, path), ensure_ascii=luck.random() < 0.5)
    if luck.randrange(10) == 0:
        text = text.replace("say", FAULT, 1)
    raw = text.encode("utf-8", "surrogatepass")
    damage = luck.choice(["none"] * 12 + ["cut", "byte", "literal", "twice", "deep", "any"])
    at = luck.randrange(len(raw))
    if damage == "cut":
        return raw[:at]
    if damage == "byte":
        return raw[:at] + luck.randbytes(luck.randrange(1, 4)) + raw[at + 1 :]
    if damage == "literal":
        return raw.replace(b"9", luck.choice(LITERALS).encode(), 1)
    if damage == "twice":
        return raw + raw
    if damage == "deep":
        return b'{"prompt": ' + b"[" * 50_000 + raw
    return luck.randbytes(luck.randrange(60)) if damage == "any" else raw


def a_request(luck: random.Random) -> Sent:
    path = luck.choice(sorted(POSTS))
    raw = encoded(luck, path)
    # Two times in three the headers are left alone: most damaged ones end a request at once.
    headers = luck.sample(HEADERS, luck.randrange(3)) if luck.randrange(3) == 0 else []
    if luck.randrange(10) == 0:
        raw, headers = gzip.compress(raw), [*headers, ("content-encoding", "gzip")]
    method = "POST"
    if luck.randrange(10) == 0:
        method = luck.choice(["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "BREW"])
        path = luck.choice([*PATHS, "/", "/v1/%00", "/v1/é?a=b"])
    pieces = luck.choice([None, None, 1, 2, 30])
    wrong = luck.choice([0] * 12 + [-1, 1, 50]) if pieces is None else 0
    return Sent(method, path, raw, headers, pieces, max(wrong, -len(raw)))


# ---- sending and judging them ----------------------------------------------------------------


async def exchange(port: int, sent: Sent) -> Reply | None:
    """None: the server hung up without a reply."""
    async with connect(port) as connection:
        try:
            await connection.send(sent.raw())
            if sent.may_be_hung_up_on and connection.writer.can_write_eof():
                connection.writer.write_eof()  # else it waits for the rest, as it should
            return await read_reply(connection, sent)
        except (ConnectionError, asyncio.IncompleteReadError):
            return None


async def read_reply(connection: Connection, sent: Sent) -> Reply:
    if sent.method != "HEAD":
        return await connection.read_reply()
    status, headers = await connection.read_head()
    return Reply(status, headers, b"")


def check(sent: Sent, reply: Reply | None) -> None:
    """AssertionError with the whole exchange."""
    said = (sent, reply)
    if reply is None:
        assert sent.may_be_hung_up_on, said
        return
    faulty = FAULT.encode() in sent.body or ("content-encoding", "gzip") in sent.headers
    if reply.status >= 500:
        assert faulty, said
        assert b"engine_error" in reply.body or b"api_error" in reply.body, said
    assert b"Traceback" not in reply.body, said
    assert b"0x7f" not in reply.body, said
    kind = reply.headers.get("content-type", "")
    if sent.method == "HEAD" or not reply.body:
        return
    if kind.startswith("text/event-stream"):
        check_events(said, reply.body, faulty)
    elif kind.startswith("application/json"):
        document = strict_json(reply.body)
        assert (reply.status >= 400) == bool(document.get("error")), said
    else:
        assert reply.status == 200, said


def check_events(said: object, body: bytes, faulty: bool) -> None:
    """The stream came to its end; only a fault may be how."""
    assert body.endswith(b"\n\n"), said
    last = body.rstrip(b"\n").rsplit(b"\n\n", 1)[-1]
    ends = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete")
    if not any(end in last for end in ends):
        assert faulty or b"asks for what cannot be" in last, said
        assert b"error" in last, said


class Campaign:
    """One server for all of them; counts what it answers."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.statuses: Counter[str] = Counter()
        self.rss: list[int] = []  # bytes, after each example

    async def send(self, batch: list[Sent]) -> None:
        async with asyncio.timeout(900):
            replies = await asyncio.gather(*(exchange(self.server.port, one) for one in batch))
        for sent, reply in zip(batch, replies, strict=True):
            check(sent, reply)
            self.statuses["hung up" if reply is None else str(reply.status)] += 1
        assert self.server.process.poll() is None, self.server.log[-2000:]
        self.rss.append(self.server.rss)


def run_campaign(folder: Path, num_requests: int, *, fixed: bool) -> Campaign:
    """fixed: the same requests each time"""
    with asyncio.Runner() as runner, a_server_process(folder, fail_every=50) as server:
        campaign = Campaign(server)
        files, tasks = server.num_files, runner.run(server.tasks())

        @settings(
            max_examples=num_requests // PER_EXAMPLE,
            deadline=None,
            database=None,
            derandomize=fixed,
            phases=[Phase.generate],  # one exchange is short, and said in full
            suppress_health_check=list(HealthCheck),
        )
        @given(st.integers(0, 2**64))
        def attack(seed: int) -> None:
            luck = random.Random(seed)
            runner.run(campaign.send([a_request(luck) for _ in range(PER_EXAMPLE)]))

        attack()
        runner.run(server.is_idle())
        runner.run(server.has_only(files + 1, tasks))  # the source of random ids is opened once
        alive = Sent("POST", "/v1/completions", b'{"prompt": "say:"}', [], None, 0)
        runner.run(campaign.send([alive] * PER_EXAMPLE))
        assert "request_failed" not in server.log
        assert "connection_failed" not in server.log
    return campaign


def report(campaign: Campaign) -> None:
    first, last = campaign.rss[len(campaign.rss) // 4], campaign.rss[-1]
    print(dict(sorted(campaign.statuses.items())))
    print(f"RSS after a quarter {first / MIB:.0f} MiB, at the end {last / MIB:.0f} MiB")


@pytest.mark.timeout(300)
def test_some_hundred_damaged_requests_harm_nobody(tmp_path: Path) -> None:
    campaign = run_campaign(tmp_path, 300, fixed=True)
    report(campaign)
    assert {"200", "400", "500"} <= set(campaign.statuses)  # 500: the injected faults


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_thousand_damaged_requests_leave_nothing_behind(tmp_path: Path) -> None:
    campaign = run_campaign(tmp_path, 20_000, fixed=False)
    report(campaign)
    assert campaign.statuses.total() >= 20_000
    assert campaign.statuses["200"] > 1000
    assert campaign.statuses["500"] > 50
    quarter = len(campaign.rss) // 4
    assert max(campaign.rss[quarter:]) < campaign.rss[quarter] + 64 * MIB

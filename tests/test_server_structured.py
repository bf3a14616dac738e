"""A reply looks as asked, over HTTP: whoever guesses, streamed or not; or a 400 says why not."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from specserve.constraint import Constraint, GrammarSpec
from specserve.grammar import Grammars
from specserve.server.state import ServerSettings
from tests.http_server import Server, a_server
from tests.raw_http import connect
from tests.scripted import TOOL_TEMPLATE, says
from tests.test_server_tools import ADD, LARGE

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "sure": {"type": "boolean"},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["tree", "treehouse", "shrub"]},
    },
    "required": ["sure", "count", "kind"],
    "additionalProperties": False,
}
CHATTER = 'Well! The "treehouse", that is: true; 7 of them. '
FORMATS: dict[str, dict[str, Any]] = {
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    },
    "json": {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    "json as text": {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
    "regex": {"structured_outputs": {"regex": r"(yes|no), [0-9]{1,3}!"}},
    "choice": {"structured_outputs": {"choice": ["the tree", "the treehouse", "W[e]ll!"]}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= "W" ("e" | "l")+ "?"\n'}},
    "lark": {"structured_outputs": {"grammar": 'start: "W" ("e" | "l")+ "?"'}},
}


def check(kind: str, text: str) -> None:
    if kind.startswith("json"):
        value = json.loads(text)
        assert list(value) == ["sure", "count", "kind"]
        assert isinstance(value["sure"], bool)
        assert 0 <= value["count"] <= 99
        assert value["kind"] in SCHEMA["properties"]["kind"]["enum"]
        assert (" " in text) <= (kind != "json")
    elif kind == "choice":
        assert text in FORMATS[kind]["structured_outputs"]["choice"]
    else:
        pattern = FORMATS[kind]["structured_outputs"].get("regex", r"W[el]+\?")
        assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("kind", FORMATS)
async def test_a_model_that_chatters_says_what_was_asked_for(kind: str) -> None:
    """Chat and completions, streamed or not, whoever guesses: one text, and it is as asked."""
    async with a_server(says(CHATTER, then=None)) as server:
        texts = set()
        for drafter in ("none", "oracle", "anti", "part"):
            body = {**FORMATS[kind], "max_tokens": 120, "speculation": {"drafter": drafter}}
            whole = (await server.chat(**body)).json()["choices"][0]
            *events, done = (await server.chat(**body, stream=True)).events
            deltas = [choice["delta"] for event in events for choice in event["choices"]]
            plain = (await server.complete(**body)).json()["choices"][0]
            assert done == "[DONE]"
            assert whole["finish_reason"] == plain["finish_reason"] == "stop"
            texts |= {whole["message"]["content"], plain["text"]}
            texts.add("".join(delta.get("content") or "" for delta in deltas))
    [text] = texts
    check(kind, text)


async def test_any_json_object_will_do_where_only_that_is_asked() -> None:
    async with a_server(says('{"a": [1, {"b": null}], "c": "{"} and more')) as server:
        for body in (
            {"response_format": {"type": "json_object"}},
            {"structured_outputs": {"json_object": True}},
        ):
            reply = (await server.chat(**body, max_tokens=99)).json()
            text = reply["choices"][0]["message"]["content"]
            assert json.loads(text) == {"a": [1, {"b": None}], "c": "{"}


async def test_every_reply_of_several_keeps_to_it() -> None:
    async with a_server(says(CHATTER)) as server:
        body = {**FORMATS["json"], "n": 3, "prompt": ["say:", "tell:"], "max_tokens": 99}
        reply = await server.complete(**body, temperature=1, seed=4)  # type: ignore[arg-type]  # JSON
        texts = [choice["text"] for choice in reply.json()["choices"]]
        assert len(texts) == 6
        for text in texts:
            check("json", text)


@pytest.mark.parametrize("drafter", ["none", "oracle", "anti", "part"])
async def test_banned_and_allowed_tokens_are_kept_to_inside_a_grammar(drafter: str) -> None:
    """Where the text is complete it may end, whatever is allowed beside it."""
    letters = [ord(letter) for letter in "bc"]
    asked: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
        ({"regex": "[abc]{3}x?"}, "bbb", {"allowed_token_ids": letters[:1]}),
        ({"regex": "[abc]{3}"}, "cbc", {"bad_words": ["a", "bb", "cc"]}),
        ({"choice": ["abc", "bcb"]}, "bcb", {"allowed_token_ids": letters}),
        ({"json": {"enum": ["b", "c"]}}, '"c"', {"bad_words": ["b"]}),
    ]
    async with a_server(says("cbabcabc", then=None)) as server:
        for form, text, more in asked:
            body = {"structured_outputs": form, "max_tokens": 20, **more}
            body["speculation"] = {"drafter": drafter}
            choice = (await server.complete(**body)).json()["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (text, "stop")


@pytest.mark.parametrize("drafter", ["none", "oracle", "anti", "part"])
async def test_what_leaves_no_token_to_choose_is_a_400_that_says_so(drafter: str) -> None:
    """Known only where the text arrives at it; the server is as well as before."""
    asked: list[dict[str, Any]] = [
        {"structured_outputs": {"choice": ["abc"]}, "bad_words": ["bc"]},
        {"structured_outputs": {"choice": ["abc"]}, "allowed_token_ids": [*b"ab"]},
        {"allowed_token_ids": [7], "bad_words": ["\x07"]},
    ]
    async with a_server(says("abcabc")) as server:
        for body in asked:
            body = {**body, "max_tokens": 9, "speculation": {"drafter": drafter}}
            reply = await server.complete(**body)
            assert (reply.status, reply.error["code"]) == (400, "unfollowable")
            assert "bad_words" in reply.error["message"]
            *_, last = (await server.complete(**body, stream=True)).events
            assert last["error"]["type"] == "invalid_request_error"
        assert (await server.complete(max_tokens=1)).status == 200


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a bad schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        "response_format.json_schema",
        "Invalid type: x",
    ),
    "no schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema",
        "must have json_schema.schema",
    ),
    "a format nobody knows": (
        {"response_format": {"type": "xml"}}, "response_format.type", "xml"
    ),
    "a bad regex": (
        {"structured_outputs": {"regex": "a("}}, "structured_outputs.regex", "unclosed group"
    ),
    "a bad grammar": (
        {"structured_outputs": {"grammar": "start: foo"}}, "structured_outputs.grammar", "foo"
    ),
    "a schema that is no JSON": (
        {"structured_outputs": {"json": "{"}}, "structured_outputs.json", "no JSON schema"
    ),
    "a schema that is a list": (
        {"structured_outputs": {"json": "[1]"}}, "structured_outputs.json", "object"
    ),
    "no choice": (
        {"structured_outputs": {"choice": []}}, "structured_outputs.choice", "empty one"
    ),
    "a choice of numbers": (
        {"structured_outputs": {"choice": [1]}}, "structured_outputs.choice[0]", "str"
    ),
    "two at once": (
        {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one"
    ),
    "none": ({"structured_outputs": {"json": None}}, "structured_outputs", "exactly one"),
    "both spellings": (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "leave one out",
    ),
    "structural tags": (
        {"structured_outputs": {"structural_tag": "x"}},
        "structured_outputs.structural_tag",
        "not supported",
    ),
    "a megabyte": (
        {"structured_outputs": {"json": {"enum": ["x" * 1_000_000]}}},
        "structured_outputs.json",
        "at most 262144",
    ),
    "ignored ends": (
        {"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "can only end"
    ),
    "a least length": (
        {"structured_outputs": {"regex": "a"}, "min_tokens": 3}, "min_tokens", "leave it out"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_kept_is_refused_by_field_and_reason(name: str) -> None:
    body, param, reason = REFUSED[name]
    async with a_server(says("hello")) as server:
        for reply in (await server.chat(**body), await server.complete(**body, stream=True)):
            assert reply.status == 400
            assert reply.error["param"] == param
            assert reason in reply.error["message"]
        assert (await server.complete(max_tokens=9)).status == 200  # and nothing is broken


async def test_with_tools_and_within_reasoning_it_is_refused_where_it_could_not_hold() -> None:
    async with a_server(says("hello"), config=LARGE, template=TOOL_TEMPLATE) as server:
        reply = await server.chat(**FORMATS["json"], tools=[ADD])
        assert (reply.status, reply.error["param"]) == (400, "structured_outputs.json")
        assert "tool_choice" in reply.error["message"]
        free = await server.chat(**FORMATS["json"], tools=[ADD], tool_choice="none", max_tokens=99)
        check("json", free.json()["choices"][0]["message"]["content"])
    opening = "{{ messages[0].content }}</think><|assistant|><think>"
    async with a_server(says("so</think>hello"), template=opening) as server:
        reply = await server.chat(**FORMATS["json"])
        assert (reply.status, reply.error["param"]) == (400, "structured_outputs.json")
        assert "</think>" in reply.error["message"]


async def test_text_is_the_format_that_asks_for_nothing() -> None:
    async with a_server(says("hello")) as server:
        for asked in ({"type": "text"}, None):
            reply = await server.chat(response_format=asked, min_tokens=2)
            assert reply.json()["choices"][0]["message"]["content"] == "hello"


async def test_the_same_bad_grammar_twice_leaves_good_ones_alone() -> None:
    async with a_server(says(CHATTER)) as server:
        for _ in range(2):
            bad = await server.complete(structured_outputs={"regex": "a("})
            assert bad.status == 400
        good = await server.complete(**FORMATS["regex"], max_tokens=20)
        check("regex", good.json()["choices"][0]["text"])


def _nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": _nested(depth - 1)} if depth else {"type": "integer"}


_DEFINED = {
    f"d{idx}": {"type": "object", "properties": {k: {"$ref": f"#/$defs/d{idx + 1}"} for k in "ab"}}
    for idx in range(30)
}
HOSTILE: dict[str, dict[str, Any]] = {
    "ten thousand choices": {"json": {"enum": [f"number {idx}" for idx in range(10_000)]}},
    "two thousand properties": {
        "json": {"properties": {f"k{idx}": {"type": "string"} for idx in range(2000)}}
    },
    "itself": {"json": {"$defs": {"n": {"items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"}},
    "2^30 paths": {"json": {"$defs": {**_DEFINED, "d30": {}}, "$ref": "#/$defs/d0"}},
    "deep": {"json": _nested(100)},
    "a million items": {
        "json": {"type": "array", "items": {"type": "null"}, "minItems": 999_999}
    },
    "a million letters": {"regex": "a{1,1000000}"},
    "repetition of repetition": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "an automaton of 2^18 states": {"regex": "(a|b)*a(a|b){18}"},
    "every letter there is": {"regex": "\\p{L}{1,200}\\w{1,300}"},
    "ambiguous": {"grammar": 'start: start start start | "a" | ""'},
    "left recursion": {"grammar": 'start: start "a" | "a"'},
    "a deep grammar": {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "a divisor": {"json": {"type": "integer", "multipleOf": 104_729}},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_grammars_are_served_or_refused_and_others_live_on(name: str) -> None:
    async with a_server(says(CHATTER)) as server:
        body = {"structured_outputs": HOSTILE[name], "max_tokens": 12}
        hostile, plain = await asyncio.gather(
            server.complete(**body, speculation={"drafter": "anti"}), server.complete(max_tokens=12)
        )
        assert plain.status == 200
        assert hostile.status in (200, 400), hostile.body
        if hostile.status == 400:
            assert hostile.error["param"].startswith("structured_outputs")
        assert (await server.get("/health")).status == 200


# ---- while a grammar is made ---------------------------------------------------------------


class SlowGrammars:
    """In place of the real compiler's work: waits until it may go on; counts."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun = threading.Semaphore(0)
        self.num_made = 0
        self._real = Grammars.constraint

    def constraint(self, grammars: Grammars, spec: GrammarSpec) -> Constraint:
        self.begun.release()
        assert self.go_on.wait(30)
        self.num_made += 1
        return self._real(grammars, spec)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowGrammars]:
    made = SlowGrammars()
    monkeypatch.setattr(Grammars, "constraint", lambda self, spec: made.constraint(self, spec))
    yield made
    made.go_on.set()


async def hang_up_while_compiling(server: Server, slow: SlowGrammars, n: int) -> None:
    async with connect(server.port) as client:
        body = {"prompt": "say:", "n": n, **FORMATS["regex"]}
        await client.request("POST", "/v1/completions", body)
        await asyncio.to_thread(slow.begun.acquire)
    while server.num_connections:
        await asyncio.sleep(0.002)


async def test_a_client_that_leaves_while_its_grammar_is_made_leaves_nothing_behind(
    slow: SlowGrammars,
) -> None:
    async with a_server(says(CHATTER)) as server:
        await hang_up_while_compiling(server, slow, n=5)
        async with connect(server.port) as second:  # waits behind it, and leaves, too
            await second.request("POST", "/v1/completions", {"prompt": "a", **FORMATS["choice"]})
            await asyncio.sleep(0.05)
        while server.num_connections:
            await asyncio.sleep(0.002)
        assert server.num_live == 0
        slow.go_on.set()
        reply = await server.complete(**FORMATS["regex"], max_tokens=20)
        check("regex", reply.json()["choices"][0]["text"])
        assert slow.num_made == 2  # the one that was under way, and the last request's
        assert server.engine.snapshot().num_running == 0


async def test_a_grammar_that_takes_too_long_is_refused_and_others_are_served_meanwhile(
    slow: SlowGrammars,
) -> None:
    settings = ServerSettings(grammar_seconds=0.05)
    async with a_server(says(CHATTER), settings=settings) as server:
        reply = await server.complete(**FORMATS["regex"])
        assert (reply.status, reply.error["code"]) == (400, "grammar_timeout")
        assert "within 0.05 seconds" in reply.error["message"]
        assert (await server.complete(max_tokens=4)).status == 200
        slow.go_on.set()


async def test_the_responses_endpoint_keeps_to_a_schema_and_names_its_own_field() -> None:
    async with a_server(says(CHATTER, then=None)) as server:
        asked = {"input": "say", "temperature": 0, "max_output_tokens": 120}
        text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
        reply = (await server.post("/v1/responses", {**asked, "text": text})).json()
        check("json_schema", reply["output"][0]["content"][0]["text"])
        extension = {"structured_outputs": {"choice": ["the tree", "the treehouse", "W[e]ll!"]}}
        reply = (await server.post("/v1/responses", {**asked, **extension})).json()
        check("choice", reply["output"][0]["content"][0]["text"])
        bad = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}}
        refused = await server.post("/v1/responses", {**asked, "text": bad})
        assert (refused.status, refused.error["param"]) == (400, "text.format")
        assert "Invalid type: x" in refused.error["message"]

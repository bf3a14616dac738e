"""Tools over HTTP: told to the model, its calls read, their results taken back."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from specserve.server.readers import ReplyFormat
from specserve.server.state import ServerSettings
from specserve.server.tools import MAX_TOOLS
from tests.http_server import CONFIG, Server, a_server
from tests.raw_http import Reply
from tests.scripted import TOOL_TEMPLATE, byte_tokenizer, says

pytestmark = pytest.mark.timeout(60)

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é🎉"}}\n</tool_call>'
ARGUMENTS = '{"a": 1, "b": "é🎉"}'
USER = {"role": "user", "content": "say"}
LARGE = msgspec.structs.replace(CONFIG, max_model_len=900, num_blocks=1024)


def a_tool_server(reply: str, parser: str = "auto") -> Any:
    settings = ServerSettings(tool_call_parser=parser)
    return a_server(says(reply), config=LARGE, settings=settings, template=TOOL_TEMPLATE)


def joined_calls(events: list[Any]) -> list[dict[str, Any]]:
    """The calls of a stream, put together as clients do; asserts that each has one head."""
    calls: list[dict[str, Any]] = []
    for event in events:
        for choice in event["choices"]:
            for delta in choice["delta"].get("tool_calls", []):
                if "id" in delta:
                    assert delta["index"] == len(calls)
                    assert delta["type"] == "function"
                    calls.append({"id": delta["id"], **delta["function"]})
                else:
                    assert "name" not in delta["function"]
                    calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
    return calls


@pytest.mark.parametrize("drafter", ["none", "oracle", "anti", "part"])
async def test_a_call_is_the_same_whole_and_streamed_whoever_guesses(drafter: str) -> None:
    options = {"tools": [ADD, CLOCK], "speculation": {"drafter": drafter, "max_draft_tokens": 8}}
    async with a_tool_server(f"Let me see.\n{CALL}\n{CALL}") as server:
        whole = (await server.chat(**options)).json()["choices"][0]
        *events, done = (await server.chat(**options, stream=True)).events
    assert done == "[DONE]"
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "Let me see.\n"
    calls = whole["message"]["tool_calls"]
    assert [call["type"] for call in calls] == ["function", "function"]
    assert [call["function"] for call in calls] == [{"name": "add", "arguments": ARGUMENTS}] * 2
    assert len({call["id"] for call in calls}) == 2
    streamed = joined_calls(events)
    assert [(call["name"], call["arguments"]) for call in streamed] == [("add", ARGUMENTS)] * 2
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == "Let me see.\n"
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * (len(events) - 1) + ["tool_calls"]
    assert deltas[-1] == {}


async def test_a_reply_of_calls_alone_has_no_content_and_arguments_come_in_pieces() -> None:
    async with a_tool_server(CALL) as server:
        whole = (await server.chat(tools=[ADD])).json()["choices"][0]["message"]
        events = (await server.chat(tools=[ADD], stream=True)).events[:-1]
    assert whole["content"] is None
    assert len(whole["tool_calls"]) == 1
    pieces = [e for e in events if e["choices"][0]["delta"].get("tool_calls")]
    assert len(pieces) > 10
    assert events[0]["choices"][0]["delta"]["content"] == ""
    assert all("content" not in event["choices"][0]["delta"] for event in events[1:])


async def test_what_is_no_call_stays_text() -> None:
    for reply in ("plain", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "<tool_call>"):
        async with a_tool_server(reply) as server:
            whole = (await server.chat(tools=[ADD])).json()["choices"][0]
            events = (await server.chat(tools=[ADD], stream=True)).events[:-1]
        assert whole["message"]["content"] == reply
        assert "tool_calls" not in whole["message"]
        assert whole["finish_reason"] == "stop"
        assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == reply


async def test_a_reply_cut_inside_a_call_says_length() -> None:
    async with a_tool_server(CALL) as server:
        whole = (await server.chat(tools=[ADD], max_tokens=50)).json()["choices"][0]
    assert whole["finish_reason"] == "length"
    assert ARGUMENTS.startswith(whole["message"]["tool_calls"][0]["function"]["arguments"])


async def test_without_tools_or_with_none_marks_are_text() -> None:
    async with a_tool_server(CALL) as server:
        for options in ({}, {"tools": []}, {"tools": [ADD], "tool_choice": "none"}):
            message = (await server.chat(**options)).json()["choices"][0]["message"]
            assert message["content"] == CALL
            assert "tool_calls" not in message


async def test_parallel_tool_calls_false_leaves_further_calls_out() -> None:
    async with a_tool_server(CALL + CALL) as server:
        reply = await server.chat(tools=[ADD], parallel_tool_calls=False)
        both = await server.chat(tools=[ADD], parallel_tool_calls=True)
    assert len(reply.json()["choices"][0]["message"]["tool_calls"]) == 1
    assert len(both.json()["choices"][0]["message"]["tool_calls"]) == 2


async def test_every_choice_has_its_own_calls_and_logprobs_are_of_all_tokens() -> None:
    async with a_tool_server(CALL) as server:
        reply = (await server.chat(tools=[ADD], n=2, logprobs=True)).json()
        events = (await server.chat(tools=[ADD], stream=True, logprobs=True)).events[:-1]
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in reply["choices"]}
    assert len(ids) == 2
    tokens = [
        token["token"]
        for event in events
        for token in (event["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    expected = [entry["token"] for entry in reply["choices"][0]["logprobs"]["content"]]
    assert tokens == expected
    assert len(tokens) == len(CALL.encode()) + 1


async def rendered(server: Server, reply: Reply) -> str:
    ids = reply.json()["prompt_token_ids"]
    return server.engine.tokenizer.decode(ids, skip_special_tokens=False)


async def test_the_model_is_told_of_tools_earlier_calls_and_results() -> None:
    messages = [
        USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function",
                 "function": {"name": "add", "arguments": '{"a": [1, {"b": "<|end|>"}]}'}},
                {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{oops"}},
                {"id": "c3", "type": "function", "function": {"name": "add", "arguments": ""}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]  # fmt: skip
    async with a_tool_server("three") as server:
        options = {"return_token_ids": True, "max_tokens": 1}
        reply = await server.chat(messages=messages, tools=[ADD, CLOCK], **options)
        text = await rendered(server, reply)
        no_tools = await server.chat(messages=messages, **options)
        without = await rendered(server, no_tools)
    assert text == f"<tools>{json.dumps(ADD)}<tools>{json.dumps(CLOCK)}{without}"
    assert without == (
        "<|user|>user>say<|assistant|>"
        '<tool_call>{"name": "add", "arguments": {"a": [1, {"b": "<|end|>"}]}}</tool_call>'
        '<tool_call>{"name": "add", "arguments": "{oops"}</tool_call>'
        '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
        "<|user|>tool>3<|assistant|>"
    )
    ids = reply.json()["prompt_token_ids"]
    assert server.engine.tokenizer.token_id("<|end|>") not in ids  # written by the caller


DEEP: dict[str, Any] = {}
for _ in range(900):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0]"),
        ({"tools": [ADD, ADD]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x", "parameters": DEEP}}]}, "tools"),
        ({"tools": [CLOCK] * (MAX_TOOLS + 1)}, "tools"),
        ({"tools": "add"}, "tools"),
        ({"tools": [ADD], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "rm"}}},
         "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{**USER, "tool_calls": [{"function": {"name": "add"}}]}]},
         "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
         "messages[0].tool_calls[0].function"),
    ],
)  # fmt: skip
async def test_a_tool_that_cannot_be_used_is_refused_by_name(
    options: dict[str, Any], param: str
) -> None:
    async with a_tool_server("hello") as server:
        reply = await server.chat(**options)
        assert reply.status == 400
        assert reply.error["param"].replace("[...]", "[0]") == param, reply.body
        assert (await server.chat()).status == 200


async def test_a_model_that_cannot_be_understood_refuses_tools() -> None:
    async with a_tool_server("hello", parser="none") as server:
        reply = await server.chat(tools=[ADD])
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert "--tool-call-parser hermes" in reply.error["message"]
        assert (await server.chat(tools=[ADD], tool_choice="none")).status == 200


HISTORY: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    USER,
    {
        "role": "assistant",
        "content": "Well.",
        "tool_calls": [
            {"id": "c1", "function": {"name": "add", "arguments": '{"a": "<|end|>"}'}},
            {"id": "c2", "function": {"name": "add", "arguments": "{oops"}},
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "tool", "tool_call_id": "c2", "content": "4"},
]


async def test_where_the_template_knows_no_tools_the_messages_tell_of_them() -> None:
    async with a_server(says(CALL), config=LARGE) as server:
        options = {"return_token_ids": True, "max_tokens": 200}
        reply = await server.chat(messages=HISTORY, tools=[ADD], **options)
        without = await rendered(server, await server.chat(messages=HISTORY, **options))
        text = await rendered(server, reply)
        first = await server.chat(tools=[ADD], **options)
        fresh = await rendered(server, first)
    [call] = first.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": ARGUMENTS}
    assert without == (
        "Be short.<|user|>say<|assistant|>Well.\n"
        '<tool_call>\n{"name": "add", "arguments": {"a":"<|end|>"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {oops}\n</tool_call>'
        "<|user|><tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
        "<|assistant|>"
    )
    system, rest = text.split("<|user|>", 1)
    assert rest == without.split("<|user|>", 1)[1]
    assert system.startswith("Be short.\n\nYou can use these functions.")
    assert json.dumps(ADD["function"], separators=(",", ":")) in system
    assert '<tool_call>\n{"name": "NAME", "arguments": {ARGUMENTS}}\n</tool_call>' in system
    assert fresh == system.removeprefix("Be short.\n\n") + "<|user|>say<|assistant|>"
    assert server.engine.tokenizer.token_id("<|end|>") not in reply.json()["prompt_token_ids"]


async def test_tokenize_counts_tools_and_switches_as_a_chat_does() -> None:
    async with a_tool_server("hello") as server:
        chat: dict[str, Any] = {"messages": HISTORY, "tools": [ADD]}
        count = (await server.post("/tokenize", chat)).json()["count"]
        usage = (await server.chat(**chat, max_tokens=1)).json()["usage"]
        assert count == usage["prompt_tokens"]
        bad = await server.post("/tokenize", {**chat, "tools": [ADD, ADD]})
        assert (bad.status, bad.error["param"]) == (400, "tools[1].function.name")


@pytest.mark.parametrize(
    ("template", "opens"),
    [
        (TOOL_TEMPLATE, "<tool_call>"),
        ("{{ tools }}<tool_call><function=f>", None),
        (
            '{{ tools }}Respond as {"name": function name, "parameters": dictionary}',
            "<|python_tag|>",
        ),
        ("{{ tools }}<|python_tag|>", "<|python_tag|>"),
        ("{{ tools }}", None),
        ("{% if tools %}", "<tool_call>"),
        ("{{ messages }}", "<tool_call>"),
    ],
)
def test_how_a_model_writes_calls_is_read_off_its_template(
    template: str, opens: str | None
) -> None:
    layout = ReplyFormat.of(byte_tokenizer(template), "auto", "auto")
    assert (layout.calls.opens if layout.calls else None) == opens
    takes_tools = template not in ("{% if tools %}", "{{ messages }}")
    assert layout.takes_tools == takes_tools
    assert layout.told_in_text == (None if takes_tools else layout.calls)
    assert ReplyFormat.of(byte_tokenizer(template), "hermes", "none").calls is not None

"""/v1/messages by hand: blocks, their events, errors in its own shape, keys in its own header."""

from __future__ import annotations

from typing import Any

import pytest

from specserve.server.keys import KeyRing
from specserve.server.state import ServerSettings
from tests.http_server import Server, a_server
from tests.raw_http import Reply, ask, strict_json
from tests.scripted import BROKEN, says
from tests.test_server_reasoning import THINK_TEMPLATE
from tests.test_server_responses import REPLY, prompt_of
from tests.test_server_tools import ADD, ARGUMENTS, CALL, LARGE

pytestmark = pytest.mark.timeout(60)

USER = {"role": "user", "content": "say"}
TOOL = {
    "name": "add",
    "description": "Adds.",
    "input_schema": ADD["function"]["parameters"],  # type: ignore[index]
}
IMAGE = {"type": "image"}
OTHER = {"model": "y", "max_tokens": 1, "messages": [USER]}
KEY = "k-0123456789abcdef"


def a_messages_server(reply: str, **more: Any) -> Any:
    return a_server(says(reply, **more), config=LARGE, template=THINK_TEMPLATE)


async def send(server: Server, **body: Any) -> Reply:
    asked = {"messages": [USER], "max_tokens": 400, "temperature": 0, **body}
    return await server.post("/v1/messages", asked, {"anthropic-version": "2023-06-01"})


def named_events(reply: Reply) -> list[Any]:
    blocks = reply.body.decode().split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(strict_json(data.removeprefix("data: ").encode()))
        assert name == f"event: {events[-1]['type']}"
    return events


def error_of(reply: Reply) -> dict[str, Any]:
    document = reply.json()
    assert sorted(document) == ["error", "request_id", "type"]
    assert document["type"] == "error"
    assert document["request_id"] == reply.headers["x-request-id"]
    assert sorted(document["error"]) == ["message", "type"]
    error: dict[str, Any] = document["error"]
    return error


async def test_a_text_is_one_block_and_its_events_come_in_the_documented_order() -> None:
    async with a_server(says("hi")) as server:
        whole = (await send(server, max_tokens=9)).json()
        events = named_events(await send(server, max_tokens=9, stream=True))
    assert whole["type"] == "message"
    assert whole["role"] == "assistant"
    assert whole["content"] == [{"type": "text", "text": "hi"}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    assert whole["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": 3,
    }
    assert [event["type"] for event in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["cache_read_input_tokens"] == 4  # the prompt has come before
    assert start["usage"]["input_tokens"] == 1
    assert events[1]["content_block"] == {"type": "text", "text": ""}
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 3
    assert events[-2]["metrics"]["speculative_decoding"]


@pytest.mark.parametrize("drafter", ["none", "oracle", "anti", "part"])
async def test_blocks_are_the_same_whole_and_streamed_whoever_guesses(drafter: str) -> None:
    options = {"tools": [TOOL], "speculation": {"drafter": drafter, "max_draft_tokens": 8}}
    async with a_messages_server(REPLY) as server:
        whole = (await send(server, **options)).json()
        events = named_events(await send(server, **options, stream=True))
    assert whole["stop_reason"] == "tool_use"
    thinking, text, first, second = whole["content"]
    assert thinking == {"type": "thinking", "thinking": "é so", "signature": ""}
    assert text == {"type": "text", "text": "Let me see.\n"}
    assert first["type"] == "tool_use"
    assert (first["name"], first["input"]) == ("add", strict_json(ARGUMENTS.encode()))
    assert first["id"] != second["id"]
    for index, expected in enumerate(["é so", "Let me see.\n", ARGUMENTS, ARGUMENTS]):
        own = [event for event in events if event.get("index") == index]
        assert own[0]["type"] == "content_block_start"
        assert own[0]["content_block"]["type"] == whole["content"][index]["type"]
        assert own[-1]["type"] == "content_block_stop"
        deltas = [event["delta"] for event in own[1:-1]]
        said = [next(v for k, v in delta.items() if k != "type") for delta in deltas]
        assert "".join(said) == expected
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_how_a_reply_ended_is_told() -> None:
    async with a_messages_server("hello") as server:
        stopped = (await send(server, stop_sequences=["l", "x"])).json()
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "l")
        assert stopped["content"] == [{"type": "text", "text": "he"}]
        cut = (await send(server, max_tokens=2)).json()
        assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    async with a_messages_server(CALL) as server:
        half = (await send(server, tools=[TOOL], max_tokens=50)).json()
        assert half["stop_reason"] == "max_tokens"
        assert half["content"][0]["input"] == {}
    async with a_messages_server('<tool_call>{"name": "add", "arguments": {"a" 1}}') as server:
        broken = (await send(server, tools=[TOOL])).json()
        assert broken["stop_reason"] == "end_turn"
        assert [block["type"] for block in broken["content"]] == ["tool_use", "text"]
        assert broken["content"][0]["input"] == {}


async def test_a_failure_in_a_stream_is_one_error_event_and_the_end() -> None:
    async with a_server(says("hello", then=BROKEN)) as server:
        events = named_events(await send(server, max_tokens=9, stream=True))
        whole = await send(server, max_tokens=9)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"
    assert "message_stop" not in [event["type"] for event in events]
    assert whole.status == 500
    assert error_of(whole)["type"] == "api_error"


BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "dd"}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "so", "signature": "x"},
        {"type": "text", "text": "Well."},
        {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "t2", "name": "add", "input": {}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": "3"},
        {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "4"}]},
        {"type": "text", "text": "and?"},
    ]},
]  # fmt: skip


async def test_blocks_mean_the_same_conversation_as_messages() -> None:
    calls = [
        {"id": f"t{i}", "function": {"name": "add", "arguments": text}}
        for i, text in ((1, '{"a": 1}'), (2, "{}"))
    ]
    messages = [
        {"role": "system", "content": "be\n\nshort"},
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "Well.", "reasoning_content": "so", "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": "t1"},
        {"role": "tool", "content": "4", "tool_call_id": "t2"},
        {"role": "user", "content": "and?"},
    ]
    async with a_messages_server("x") as server:
        system = [{"type": "text", "text": "be"}, {"type": "text", "text": "short"}]
        asked: dict[str, Any] = {"messages": BLOCKS, "system": system, "tools": [TOOL]}
        ours = await prompt_of(server, "/v1/messages", {**asked, "max_tokens": 5})
        chat = {"messages": messages, "tools": [ADD]}
        assert ours == await prompt_of(server, "/v1/chat/completions", chat)
        count = (await server.post("/v1/messages/count_tokens", asked)).json()
        assert count == {"input_tokens": len(server.engine.tokenizer.encode(ours))}


async def test_a_text_of_the_assistant_is_continued_and_thinking_can_be_off() -> None:
    async with a_messages_server("hello") as server:
        reply = await send(server, messages=[USER, {"role": "assistant", "content": "hel"}])
        assert reply.json()["content"] == [{"type": "text", "text": "lo"}]
        body = {"messages": [USER], "max_tokens": 5, "thinking": {"type": "disabled"}}
        assert (await prompt_of(server, "/v1/messages", body)).endswith("<think></think>")
        body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        assert (await prompt_of(server, "/v1/messages", body)).endswith("<|assistant|>")


@pytest.mark.parametrize(
    ("choice", "num_calls"), [({"type": "auto"}, 2), ({"type": "none"}, 0),
                              ({"type": "auto", "disable_parallel_tool_use": True}, 1)]
)  # fmt: skip
async def test_tool_choice_is_a_chats(choice: dict[str, Any], num_calls: int) -> None:
    async with a_messages_server(CALL + CALL) as server:
        content = (await send(server, tools=[TOOL], tool_choice=choice)).json()["content"]
    assert [block["type"] for block in content].count("tool_use") == num_calls


@pytest.mark.parametrize(
    ("body", "names"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "x"}, "max_tokens"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]},
         "messages[0].content[0].name"),
        ({"messages": [{"role": "user", "content": [
            {"type": "text", "text": "a"}, {"type": "tool_result", "content": [IMAGE]}]}]},
         "messages[0].content[1].content[0]"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"stop_sequences": [""]}, "stop_sequences holds"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format is"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "odd"}}}},
         "output_config.format cannot"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "rm"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"temperature": 3}, "temperature"),
        ({"messages": [{"role": "user", "content": "x" * 900}]}, "maximum context length"),
    ],
)  # fmt: skip
async def test_what_cannot_be_served_is_said_in_anthropics_shape(
    body: dict[str, Any], names: str
) -> None:
    async with a_messages_server("x") as server:
        reply = await send(server, **body)
        assert reply.status == 400
        error = error_of(reply)
        assert error["type"] == "invalid_request_error"
        assert names in error["message"], error
        assert (await send(server)).status == 200


async def test_every_error_of_these_routes_has_that_shape_and_no_other_route_has() -> None:
    settings = ServerSettings(keys=KeyRing([KEY]), max_body_bytes=2000)
    async with a_server(says("x"), config=LARGE, settings=settings) as server:
        for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1//messages"):
            for status, kind, asked in (
                (401, "authentication_error", {}),
                (400, "invalid_request_error", {"body": b"{"}),
                (404, "not_found_error", {"body": OTHER}),
                (413, "request_too_large", {"body": b" " * 3000}),
            ):  # fmt: skip
                headers = {} if status == 401 else {"x-api-key": KEY}
                body = asked.get("body", {})
                reply = await ask(server.port, "POST", path, body, headers=headers)
                assert reply.status == status, (path, status, reply.body)
                assert error_of(reply)["type"] == kind
            reply = await ask(server.port, "GET", path, headers={"x-api-key": KEY})
            assert reply.status == 405
            assert error_of(reply)["type"] == "invalid_request_error"
            assert "GET" in error_of(reply)["message"]
        other = await ask(server.port, "GET", "/v1/models", headers={"x-api-key": KEY[:-1]})
        assert (other.status, other.error["code"]) == (401, "invalid_api_key")


async def test_a_key_in_x_api_key_opens_every_route_unless_authorization_says_otherwise() -> None:
    settings = ServerSettings(keys=KeyRing([KEY]))
    async with a_server(says("x"), settings=settings) as server:
        for headers, status in (
            ({"x-api-key": KEY}, 200),
            ({"x-api-key": f"{KEY}x"}, 401),
            ({"x-api-key": ""}, 401),
            ({"x-api-key": KEY, "authorization": f"Bearer {KEY}x"}, 401),
            ({"x-api-key": "other", "authorization": f"Bearer {KEY}"}, 200),
            ({"x-api-key": "schlüssel"}, 401),
        ):
            reply = await ask(server.port, "GET", "/v1/models", headers=headers)
            assert reply.status == status, headers

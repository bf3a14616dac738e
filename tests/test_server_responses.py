"""/v1/responses with the official client and by hand: items, their events, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from specserve.server.state import ServerSettings
from tests.http_server import CONFIG, Server, a_server
from tests.raw_http import Reply, strict_json
from tests.scripted import BROKEN, says
from tests.test_openai_client import a_client
from tests.test_server_reasoning import THINK_TEMPLATE
from tests.test_server_tools import ADD, ARGUMENTS, CALL, LARGE

pytestmark = pytest.mark.timeout(60)

TOOL = {"type": "function", **ADD["function"]}
LOGPROBS: Any = ["message.output_text.logprobs"]
REPLY = f"<think>é so</think>Let me see.\n{CALL}\n{CALL}"


def a_responses_server(reply: str, **more: Any) -> Any:
    return a_server(says(reply, **more), config=LARGE, template=THINK_TEMPLATE)


async def ask(server: Server, **body: Any) -> Reply:
    return await server.post("/v1/responses", {"input": "say", "temperature": 0, **body})


def named_events(reply: Reply) -> list[Any]:
    """Data of each event; asserts the framing, the names and the numbers."""
    blocks = reply.body.decode().split("\n\n")
    assert blocks.pop() == ""
    events = []
    for number, block in enumerate(block for block in blocks if not block.startswith(": ")):
        name, data = block.split("\n")
        event = strict_json(data.removeprefix("data: ").encode())
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def plain(output: list[Any]) -> list[Any]:
    """Items without their ids."""
    return [
        {key: value for key, value in item.items() if key not in ("id", "call_id")}
        for item in output
    ]


async def test_a_text_is_one_message_and_its_events_come_in_the_documented_order() -> None:
    async with a_server(says("hi")) as server:
        whole = (await ask(server)).json()
        reply = await ask(server, stream=True)
        events = named_events(reply)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[0]["response"]["status"] == "in_progress"
    assert events[0]["response"]["output"] == []
    final = events[-1]["response"]
    assert final["status"] == whole["status"] == "completed"
    assert final["id"] == events[0]["response"]["id"]
    assert final["output"] == [events[-2]["item"]]
    assert plain(final["output"]) == plain(whole["output"])
    assert whole["output"][0]["content"] == [
        {"type": "output_text", "text": "hi", "annotations": [], "logprobs": []}
    ]
    for usage in (final["usage"], whole["usage"]):
        assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (5, 3, 8)
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
    assert whole["store"] is False
    assert whole["metrics"]["speculative_decoding"]


@pytest.mark.parametrize("drafter", ["none", "oracle", "anti", "part"])
async def test_items_are_the_same_whole_and_streamed_whoever_guesses(drafter: str) -> None:
    options = {"tools": [TOOL], "speculation": {"drafter": drafter, "max_draft_tokens": 8}}
    async with a_responses_server(REPLY) as server:
        whole = (await ask(server, **options)).json()
        events = named_events(await ask(server, **options, stream=True))
    final = events[-1]["response"]
    assert plain(final["output"]) == plain(whole["output"])
    reasoning, message, first, second = whole["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "é so"}]
    assert message["content"][0]["text"] == "Let me see.\n"
    assert (first["name"], first["arguments"]) == ("add", ARGUMENTS)
    assert first["call_id"] != second["call_id"]
    assert {item["status"] for item in whole["output"]} == {"completed"}
    assert len({item["id"] for item in whole["output"]}) == 4
    thought = len("<think>é so</think>".encode())
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": thought}
    for idx, item in enumerate(final["output"]):
        own = [event for event in events if event.get("output_index") == idx]
        assert own[0]["type"] == "response.output_item.added"
        assert own[0]["item"]["status"] == "in_progress"
        assert own[-1] == {**own[-1], "type": "response.output_item.done", "item": item}
        text = "".join(event["delta"] for event in own if "delta" in event)
        said = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        assert text == said


async def test_a_reply_that_was_cut_is_incomplete() -> None:
    async with a_responses_server("<think>so it is</think>then") as server:
        whole = (await ask(server, max_output_tokens=12)).json()
        events = named_events(await ask(server, max_output_tokens=12, stream=True))
    assert whole["status"] == "incomplete"
    assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [(item["type"], item["status"]) for item in whole["output"]] == [
        ("reasoning", "incomplete")
    ]
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 12}
    assert events[-1]["type"] == "response.incomplete"


async def test_a_reply_of_nothing_is_an_empty_message() -> None:
    async with a_server(says("")) as server:
        whole = (await ask(server)).json()
    assert [item["content"][0]["text"] for item in whole["output"]] == [""]


async def test_a_failure_after_the_first_event_is_one_failed_response_and_the_end() -> None:
    async with a_server(says("hello", then=BROKEN)) as server:
        events = named_events(await ask(server, stream=True))
        whole = await ask(server)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["code"] == "engine_error"
    assert not [event for event in events if event["type"] == "response.completed"]
    assert (whole.status, whole.error["code"]) == (500, "engine_error")


async def prompt_of(server: Server, path: str, body: dict[str, Any]) -> str:
    """What the model was shown, read off the prefix that the engine was asked for."""
    seen: list[tuple[int, ...]] = []
    submit = server.engine.submit

    def note(request: Any) -> Any:
        seen.append(request.prompt_ids)
        return submit(request)

    server.engine.submit = note  # type: ignore[method-assign]
    try:
        reply = await server.post(path, {**body, "temperature": 0})
        assert reply.status == 200, reply.body
    finally:
        server.engine.submit = submit  # type: ignore[method-assign]
    return server.engine.tokenizer.decode(seen[-1], skip_special_tokens=False)


async def test_items_mean_the_same_conversation_as_messages() -> None:
    items = [
        {"role": "developer", "content": "short"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "add"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [
            {"type": "reasoning_text", "text": "so"}]},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [
            {"type": "output_text", "text": "Well.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "function_call_output", "call_id": "c2", "output": [
            {"type": "input_text", "text": "4"}]},
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]  # fmt: skip
    calls = [
        {"id": f"c{i}", "function": {"name": "add", "arguments": text}}
        for i, text in ((1, '{"a": 1}'), (2, "{}"))
    ]
    messages = [
        {"role": "system", "content": "be"},
        {"role": "system", "content": "short"},
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": "Well.", "reasoning_content": "so", "tool_calls": calls},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "4", "tool_call_id": "c2"},
        {"role": "assistant", "content": "done"},
        {"role": "assistant", "content": "no"},
    ]
    async with a_responses_server("x") as server:
        body = {"input": items, "instructions": "be", "tools": [TOOL]}
        ours = await prompt_of(server, "/v1/responses", body)
        chat = {"messages": messages, "tools": [ADD]}
        assert ours == await prompt_of(server, "/v1/chat/completions", chat)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "foo", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0]"),
        ({"input": [{"type": "function_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": "x" * 20_000}, "input"),
        ({"input": "x" * 900}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "rm"}}, "tool_choice"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"conversation": {"id": "x"}}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "include": LOGPROBS}, "top_logprobs"),
        ({"top_logprobs": -1, "include": LOGPROBS}, "top_logprobs"),
        ({"model": "other"}, "model"),
    ],
)  # fmt: skip
async def test_what_cannot_be_served_is_refused_by_this_endpoints_own_name(
    body: dict[str, Any], param: str
) -> None:
    async with a_responses_server("x") as server:
        reply = await ask(server, **body)
        assert reply.status == (404 if param == "model" else 400), reply.body
        assert reply.error["param"] == param, reply.body
        assert (await ask(server, instructions=None)).status == 200


@pytest.mark.parametrize(
    ("body", "begins"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format is"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "odd"}}}},
         "text.format cannot"),
        ({"text": {"format": {"type": "json_object"}}, "tools": [TOOL]}, "text.format leaves"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}},
         "text.format and structured_outputs"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
    ],
)  # fmt: skip
async def test_a_refusal_names_fields_as_this_endpoint_does(
    body: dict[str, Any], begins: str
) -> None:
    async with a_responses_server("x") as server:
        message = (await ask(server, **body)).error["message"]
    assert message.startswith(begins)
    assert "response_format" not in message
    assert "json_schema.schema" not in message


async def test_what_clients_send_by_habit_is_taken_and_given_back_as_it_is() -> None:
    async with a_responses_server("x") as server:
        asked = {
            "instructions": "be",
            "metadata": {"a": "b"},
            "tools": [TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "store": True,
            "background": False,
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "low"},
            "truncation": "auto",
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "service_tier": "auto",
            "user": "u",
            "top_p": 0.5,
        }
        said = (await ask(server, **asked)).json()
    for field in ("instructions", "metadata", "tools", "tool_choice", "parallel_tool_calls"):
        assert said[field] == asked[field]
    assert (said["store"], said["truncation"], said["top_p"]) == (False, "disabled", 0.5)
    assert said["text"] == {"format": {"type": "text"}}


async def test_cached_tokens_are_told() -> None:
    async with a_server(says("x")) as server:
        for expected in (0, 20):
            usage = (await ask(server, input="say it twice or more")).json()["usage"]
            assert usage["input_tokens_details"]["cached_tokens"] == expected


async def test_the_official_client_reads_items_streams_and_errors() -> None:
    async with a_responses_server(REPLY) as server, a_client(server) as client:
        tools: Any = [TOOL]
        whole = await client.responses.create(model="test", input="say", tools=tools, temperature=0)
        async with client.responses.stream(
            model="test", input="say", tools=tools, temperature=0
        ) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        assert whole.output_text == streamed.output_text == "Let me see.\n"
        calls = [item for item in streamed.output if item.type == "function_call"]
        assert [(call.name, call.arguments) for call in calls] == [("add", ARGUMENTS)] * 2
        assert whole.usage is not None
        assert streamed.usage is not None
        assert whole.usage.output_tokens == streamed.usage.output_tokens
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        results: Any = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
            for call in calls
        ]
        history: Any = [{"role": "user", "content": "say"}, *whole.output, *results]
        after = await client.responses.create(
            model="test", input=history, tools=tools, max_output_tokens=3
        )
        assert after.status == "incomplete"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="test", input="say", previous_response_id="resp_1")
        assert refused.value.param == "previous_response_id"


async def test_a_client_that_leaves_leaves_nothing_behind() -> None:
    settings = ServerSettings(keep_alive_seconds=0.05)
    async with (
        a_server(says("x", then=None), config=CONFIG, settings=settings) as server,
        a_client(server) as client,
    ):
        stream = await client.responses.create(model="test", input="say", stream=True)
        async for event in stream:
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        await server.is_idle()
    assert json.dumps(server.num_live) == "0"

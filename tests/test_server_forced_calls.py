"""tool_choice required or named: the reply is a call, whatever the model would rather say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from specserve.server.state import ServerSettings
from tests.http_server import a_server
from tests.scripted import TOOL_TEMPLATE, says
from tests.test_server_messages import TOOL as MESSAGES_TOOL
from tests.test_server_messages import USER
from tests.test_server_reasoning import THINK_TEMPLATE
from tests.test_server_responses import TOOL as RESPONSE_TOOL
from tests.test_server_tools import CLOCK, LARGE, joined_calls

pytestmark = pytest.mark.timeout(60)

CHATTER = 'No: "I" would rather } talk, 7 times. '
BOOK = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "properties": {
                "seats": {"$ref": "#/$defs/seats"},
                "kind": {"enum": ["sleeper", "seat"], "description": "a ::= b"},
            },
            "required": ["seats", "kind"],
            "additionalProperties": False,
            "$defs": {"seats": {"type": "integer", "minimum": 1, "maximum": 99}},
        },
    },
}
NAMED = {"type": "function", "function": {"name": "book"}}


def a_forced_server(parser: str = "hermes", template: str = TOOL_TEMPLATE) -> Any:
    settings = ServerSettings(tool_call_parser=parser)
    script = says(CHATTER, then=None)
    return a_server(script, config=LARGE, settings=settings, template=template)


def check(call: dict[str, Any], names: set[str]) -> None:
    assert call["name"] in names
    arguments = json.loads(call["arguments"])
    if call["name"] == "book":
        assert list(arguments) == ["seats", "kind"]
        assert 1 <= arguments["seats"] <= 99
        assert arguments["kind"] in ("sleeper", "seat")


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
async def test_a_named_function_is_called_whoever_guesses(parser: str) -> None:
    async with a_forced_server(parser) as server:
        said = set()
        for drafter in ("none", "oracle", "anti", "part"):
            body = {"tools": [CLOCK, BOOK], "tool_choice": NAMED, "max_tokens": 200}
            body["speculation"] = {"drafter": drafter}
            choice = (await server.chat(**body)).json()["choices"][0]
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["content"] is None
            [call] = choice["message"]["tool_calls"]
            check(call["function"], {"book"})
            events = (await server.chat(**body, stream=True)).events[:-1]
            [streamed] = joined_calls(events)
            assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
            said |= {call["function"]["arguments"], streamed["arguments"]}
    assert len(said) == 1


@pytest.mark.parametrize("parser", ["hermes", "llama3_json"])
async def test_required_is_one_call_at_least_of_any_function(parser: str) -> None:
    async with a_forced_server(parser) as server:
        body = {"tools": [CLOCK, BOOK], "tool_choice": "required", "max_tokens": 300}
        one = (await server.chat(**body, parallel_tool_calls=False)).json()["choices"][0]
        assert one["finish_reason"] == "tool_calls"
        [call] = one["message"]["tool_calls"]
        check(call["function"], {"book", "clock"})
        several = (await server.chat(**body, n=2)).json()["choices"]
        for choice in several:
            assert choice["message"]["content"] is None
            for call in choice["message"]["tool_calls"][:-1]:
                check(call["function"], {"book", "clock"})


async def test_other_endpoints_force_calls_in_their_own_words() -> None:
    async with a_forced_server() as server:
        asked = {"input": "say", "tools": [RESPONSE_TOOL], "temperature": 0}
        for choice in ("required", {"type": "function", "name": "add"}):
            body = {**asked, "tool_choice": choice, "parallel_tool_calls": False}
            reply = (await server.post("/v1/responses", body)).json()
            assert [item["type"] for item in reply["output"]] == ["function_call"]
        for kind in ({"type": "any"}, {"type": "tool", "name": "add"}):
            choice = {**kind, "disable_parallel_tool_use": True}
            body = {"messages": [USER], "tools": [MESSAGES_TOOL], "tool_choice": choice}
            reply = (
                await server.post("/v1/messages", {**body, "max_tokens": 300, "temperature": 0})
            ).json()
            assert reply["stop_reason"] == "tool_use"
            assert [block["type"] for block in reply["content"]] == ["tool_use"]


async def test_text_formats_of_the_other_endpoints_bind_the_text() -> None:
    schema = {"type": "object", "properties": {"x": {"enum": [7]}}, "required": ["x"]}
    schema["additionalProperties"] = False
    async with a_forced_server() as server:
        asked: dict[str, Any] = {"input": "say", "temperature": 0, "max_output_tokens": 90}
        asked["text"] = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
        reply = (await server.post("/v1/responses", asked)).json()
        assert json.loads(reply["output"][0]["content"][0]["text"]) == {"x": 7}
        assert reply["text"]["format"]["schema"] == schema
        asked["text"] = {"format": {"type": "json_schema", "name": "n"}}
        refused = await server.post("/v1/responses", asked)
        assert (refused.status, refused.error["param"]) == (400, "text.format")
        body: dict[str, Any] = {"messages": [USER], "max_tokens": 90, "temperature": 0}
        body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        reply = (await server.post("/v1/messages", body)).json()
        assert json.loads(reply["content"][0]["text"]) == {"x": 7}


async def test_a_model_without_a_token_that_ends_reasoning_cannot_be_forced_behind_it() -> None:
    opening = THINK_TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"
    async with a_forced_server(template=opening) as server:
        reply = await server.chat(tools=[BOOK], tool_choice="required", max_tokens=50)
        assert (reply.status, reply.error["param"]) == (400, "tools")
        assert "reasoning" in reply.error["message"]


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"type": "object", "properties": {"a": {"type": "whatever"}}}, "tools"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}, "tools"),
        ({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}, "tools"),
        ({"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}, "tools"),
    ],
)
async def test_parameters_that_cannot_be_followed_are_refused(
    parameters: dict[str, Any], param: str
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    async with a_forced_server() as server:
        reply = await server.chat(tools=[tool], tool_choice="required", max_tokens=9)
        assert (reply.status, reply.error["param"]) == (400, param), reply.body
        assert (await server.chat(tools=[tool], max_tokens=2)).status == 200

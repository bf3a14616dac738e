"""The OpenAPI document says what this server does: every route, type and range, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any  # decoded JSON

import pytest

from specserve.server.app import ROUTES
from specserve.server.keys import KeyRing
from specserve.server.openapi import OPERATIONS
from specserve.server.state import ServerSettings
from tests.http_server import CONFIG, Server, a_server
from tests.raw_http import Reply, ask
from tests.scripted import TOOL_TEMPLATE, VOCAB_SIZE, says
from tests.test_server_messages import TOOL as MESSAGES_TOOL
from tests.test_server_messages import named_events as message_events
from tests.test_server_reasoning import THINK_TEMPLATE
from tests.test_server_responses import REPLY, TOOL
from tests.test_server_responses import named_events as response_events
from tests.test_server_tools import ADD, CALL, LARGE

pytestmark = pytest.mark.timeout(60)

CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "say"}]}
PROMPT: dict[str, object] = {"prompt": "say:"}
OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
BODIES = [
    ("/v1/completions", "CompletionBody", PROMPT),
    ("/v1/chat/completions", "ChatBody", CHAT),
]


async def document(server: Server) -> Any:
    reply = await server.get("/openapi.json")
    assert reply.status == 200
    assert reply.headers["content-type"].startswith("application/json")
    return reply.json()


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references(inner)


def test_every_route_is_described() -> None:
    assert set(OPERATIONS) == set(ROUTES)


async def test_every_reference_leads_somewhere_and_nothing_is_defined_for_nobody() -> None:
    async with a_server(says("hello")) as server:
        said = await document(server)
    assert said["openapi"] == "3.1.0"
    defined = {f"#/components/schemas/{name}" for name in said["components"]["schemas"]}
    assert set(references(said)) == defined
    assert set(said["paths"]) == {path for _, path in ROUTES}


async def test_only_with_keys_they_are_asked_for_and_not_on_open_routes() -> None:
    async with a_server(says("hello")) as server:
        said = await document(server)
    assert "securitySchemes" not in said["components"]
    key = "k-0123456789abcdef"
    async with a_server(says("hello"), settings=ServerSettings(keys=KeyRing([key]))) as server:
        headers = {"authorization": f"Bearer {key}"}
        said = (await ask(server.port, "GET", "/openapi.json", headers=headers)).json()
    assert said["components"]["securitySchemes"] == {
        "bearer": {"type": "http", "scheme": "bearer"},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    ways = said["paths"]["/v1/completions"]["post"]["security"]
    assert ways == [{"bearer": []}, {"x-api-key": []}]
    assert "security" not in said["paths"]["/health"]["get"]


def body_with(base: dict[str, object], path: str, value: object) -> dict[str, object]:
    """speculation.max_draft_tokens needs a drafter that takes it."""
    if path.startswith("speculation."):
        return {**base, "speculation": {path.removeprefix("speculation."): value}}
    if path == "top_logprobs":  # of a chat, of /v1/responses
        asked = {"logprobs": True, "include": ["message.output_text.logprobs"]}
        return {**base, **asked, path: value}
    return {**base, path: value}


def beyond(schema: dict[str, Any]) -> Iterator[tuple[bool, object]]:
    """(allowed, value): each limit of a property, and what lies just beyond it."""
    step = 1 if "integer" in str(schema) else 0.005
    if "minimum" in schema:
        yield True, schema["minimum"]
        yield False, schema["minimum"] - step
        yield True, schema["maximum"]
        yield False, schema["maximum"] + step
    if "maxItems" in schema and "items" in schema:
        yield True, [schema["items"].get("minimum", "x")] * schema["maxItems"]
        yield False, [schema["items"].get("minimum", "x")] * (schema["maxItems"] + 1)
    if "minItems" in schema:
        yield False, []
    inner = schema.get("items", {})
    if "maximum" in inner:
        yield True, [inner["maximum"], inner["minimum"]]
        yield False, [inner["maximum"] + 1]
        yield False, [inner["minimum"] - 1]
    if "maxLength" in schema:
        yield True, "x" * schema["maxLength"]
        yield False, "x" * (schema["maxLength"] + 1)
        yield False, "x" * (schema["minLength"] - 1)
    if "maxLength" in inner:
        yield False, ["x" * (inner["maxLength"] + 1)]
        yield False, [""]
    if "maxProperties" in schema:
        low, high = (schema["additionalProperties"][name] for name in ("minimum", "maximum"))
        yield True, {"0": low, "1": high}
        yield False, {"0": low - 1}
        yield False, {"0": high + 1}
        yield False, {"x": 0}
        yield False, {str(idx): 0 for idx in range(schema["maxProperties"] + 1)}
    if "enum" in schema:
        yield from ((True, value) for value in schema["enum"])
        yield False, "something else"
    if "pattern" in schema:
        assert re.fullmatch(schema["pattern"], "a.b-c_d:e")
        yield True, "a.b-c_d:e"
        yield False, "a b"
        yield False, "x" * 129


@pytest.mark.parametrize(
    ("path", "name", "base"),
    [
        *BODIES,
        ("/v1/responses", "ResponsesBody", {"input": "say"}),
        ("/v1/messages", "MessagesBody", {**CHAT, "max_tokens": 2}),
    ],
)
async def test_each_limit_is_the_servers_own_on_either_side(
    path: str, name: str, base: dict[str, object]
) -> None:
    tried = set()
    async with a_server(says("hello")) as server:
        schemas = (await document(server))["components"]["schemas"]
        properties = dict(schemas[name]["properties"])
        for field, schema in schemas["SpeculationBody"]["properties"].items():
            properties[f"speculation.{field}"] = schema
        for field, schema in properties.items():
            for allowed, value in beyond(schema):
                tried.add(field)
                short = "max_output_tokens" if "input" in base else "max_tokens"
                body = body_with({**base, short: 2, "temperature": 0}, field, value)
                if field in OUTPUT_LIMITS and allowed:
                    continue  # as large as the context: nothing is left for a prompt
                reply = await server.post(path, body)
                where = (field, value if len(str(value)) < 99 else len(str(value)))
                if allowed:
                    assert reply.status == 200, (where, reply.body)
                else:
                    assert reply.status in (400, 404), where
                    assert path == "/v1/messages" or reply.error["param"].startswith(field), where
    assert tried >= {"temperature", "top_p", "top_k", "min_p", "seed", "priority"}
    assert tried >= {"presence_penalty", "repetition_penalty", "logit_bias", "cache_salt", "model"}
    assert tried >= {"min_tokens", "stop_token_ids", "request_id"}
    assert path not in dict.fromkeys(path for path, _, _ in BODIES) or tried >= {
        "n",
        "stop",
        "max_tokens",
    }
    assert tried >= {"speculation.drafter", "speculation.max_draft_tokens"}
    assert tried >= {"speculation.draft_width"}


async def test_limits_are_those_of_this_model_and_these_options() -> None:
    async with a_server(says("hello")) as server:
        schemas = (await document(server))["components"]["schemas"]
    speculation = schemas["SpeculationBody"]["properties"]
    assert speculation["max_draft_tokens"]["maximum"] == CONFIG.max_draft_tokens
    assert set(speculation["drafter"]["enum"]) == {*server.engine.limits.drafters, None}
    assert schemas["DetokenizeBody"]["properties"]["tokens"]["items"]["maximum"] == VOCAB_SIZE - 1
    assert schemas["ChatBody"]["properties"]["max_tokens"]["maximum"] == CONFIG.max_model_len - 1


async def test_what_is_refused_is_not_offered() -> None:
    async with a_server(says("hello")) as server:
        schemas = (await document(server))["components"]["schemas"]
        for path, name, base in BODIES:
            for field in ("functions", "suffix", "guided_json"):
                reply = await server.post(path, {**base, field: "y", "max_tokens": 2})
                refused = reply.status == 400 and reply.error["code"] == "unsupported_parameter"
                assert not (refused and field in schemas[name]["properties"]), field


def _within(value: object, schema: dict[str, Any]) -> bool:
    """The limits of a list's or a text's length and of a number, each on its own type only."""
    if isinstance(value, list | str):
        kind = "Items" if isinstance(value, list) else "Length"
        limits = schema.get(f"min{kind}", 0), schema.get(f"max{kind}", len(value))
        return bool(limits[0] <= len(value) <= limits[1])
    if isinstance(value, int | float) and "minimum" in schema:
        return bool(schema["minimum"] <= value <= schema["maximum"])
    return True


def conforms(value: object, schema: dict[str, Any], schemas: dict[str, Any]) -> bool:
    """As much of JSON Schema as the replies' schemas use."""
    if not schema:
        return True
    if "$ref" in schema:
        return conforms(value, schemas[schema["$ref"].rsplit("/", 1)[1]], schemas)
    if "anyOf" in schema:
        return any(conforms(value, one, schemas) for one in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    if not _within(value, schema):
        return False
    match schema.get("type"):
        case "object":
            if not isinstance(value, dict):
                return False
            known = schema.get("properties", {})
            rest = schema.get("additionalProperties", False)
            return set(schema.get("required", ())) <= set(value) and all(
                conforms(inner, known.get(key, rest), schemas)
                if known.get(key, rest) is not False
                else False
                for key, inner in value.items()
            )
        case "array":
            return isinstance(value, list) and all(
                conforms(inner, schema.get("items", {}), schemas) for inner in value
            )
        case "string":
            return isinstance(value, str)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case _:
            raise AssertionError(f"a schema this test does not know: {schema}")


@pytest.mark.parametrize(("path", "name", "base"), BODIES)
async def test_replies_events_and_errors_are_as_described(
    path: str, name: str, base: dict[str, object]
) -> None:
    logprobs: dict[str, object] = {"logprobs": 2}
    if base is CHAT:
        logprobs = {"logprobs": True, "top_logprobs": 2}
    usage = {"include_usage": True}
    async with a_server(says(f"hello {CALL}"), config=LARGE, template=TOOL_TEMPLATE) as server:
        said = await document(server)
        schemas = said["components"]["schemas"]
        responses = said["paths"][path]["post"]["responses"]
        whole = responses["200"]["content"]["application/json"]["schema"]
        one_event = responses["200"]["content"]["text/event-stream"]["schema"]
        event = one_event["properties"]["data"]["anyOf"][1]["contentSchema"]
        failure = responses["default"]["content"]["application/json"]["schema"]
        extras: list[dict[str, object]] = [{}, logprobs, {"return_token_ids": True}]
        extras.append({"speculation": {"detailed": True}})
        extras.append({"tools": [ADD]} if base is CHAT else {})
        for more in extras:
            body = {**base, "max_tokens": 99, "temperature": 0, **more}
            reply = (await server.post(path, body)).json()
            assert conforms(reply, whole, schemas), reply
            assert not conforms({**reply, "object": "thing"}, whole, schemas)
            assert not conforms({key: reply[key] for key in reply if key != "id"}, whole, schemas)
            stream = {**body, "stream": True, "stream_options": usage}
            *events, _ = (await server.post(path, stream)).events
            for one in events:
                assert conforms(one, event, schemas), one
        bad = (await server.post(path, {**base, "n": 0})).json()
        assert conforms(bad, failure, schemas)


ITEMS: list[tuple[str, dict[str, Any], Callable[[Reply], list[Any]], dict[str, Any]]] = [
    ("/v1/responses", {"input": "say", "max_output_tokens": 12}, response_events, TOOL),
    ("/v1/messages", {**CHAT, "max_tokens": 12}, message_events, MESSAGES_TOOL),
]


@pytest.mark.parametrize(("path", "cut", "events_of", "tool"), ITEMS)
async def test_replies_of_several_items_and_their_events_are_as_described(
    path: str,
    cut: dict[str, Any],
    events_of: Callable[[Reply], list[Any]],
    tool: dict[str, Any],
) -> None:
    async with a_server(says(REPLY), config=LARGE, template=THINK_TEMPLATE) as server:
        said = await document(server)
        schemas = said["components"]["schemas"]
        responses = said["paths"][path]["post"]["responses"]
        content = responses["200"]["content"]
        reply = content["application/json"]["schema"]
        refusal = responses["default"]["content"]["application/json"]["schema"]
        event = content["text/event-stream"]["schema"]["properties"]
        seen = set()
        for extra in ({}, {"tools": [tool], [*cut][-1]: 400}):
            body = {**cut, "temperature": 0, **extra}
            whole = (await server.post(path, body)).json()
            assert conforms(whole, reply, schemas), whole
            assert not conforms({**whole, "model": 5}, reply, schemas)
            for one in events_of(await server.post(path, {**body, "stream": True})):
                assert one["type"] in event["event"]["enum"]
                assert conforms(one, event["data"]["contentSchema"], schemas), one
                seen.add(one["type"])
        failure = (await server.post(path, {**cut, "temperature": 5})).json()
        assert conforms(failure, refusal, schemas)
    [unseen] = set(event["event"]["enum"]) - seen
    assert unseen in ("response.failed", "error")


async def test_the_servers_own_answers_are_as_described() -> None:
    async with a_server(says("hello")) as server:
        said = await document(server)
        schemas = said["components"]["schemas"]
        for (method, path), operation in OPERATIONS.items():
            if method == "GET" and operation.reply is not None and path != "/openapi.json":
                reply = await server.get(path.replace("{id}", "test"))
                content = said["paths"][path]["get"]["responses"]["200"]["content"]
                assert conforms(reply.json(), content["application/json"]["schema"], schemas), path
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [97]})):
            content = said["paths"][path]["post"]["responses"]["200"]["content"]
            reply = await server.post(path, body)
            assert conforms(reply.json(), content["application/json"]["schema"], schemas), path


PROMPTS: list[object] = [
    "say:", ["say:"], ["a", "b"], [1, 2], [[1], [2, 3]], [VOCAB_SIZE - 1],
    "", [], [""], [[]], ["a", 1], [[1], "a"], [[1], 2], [-1], [VOCAB_SIZE], [[VOCAB_SIZE]], 5, None,
    ["a"] * 128, ["a"] * 129, [[1]] * 128, [[1]] * 129, [1] * 255, [1] * 256, {"a": 1}, [1.5],
    [True],
]  # fmt: skip


async def test_prompts_and_roles_that_are_offered_are_taken_and_no_others() -> None:
    async with a_server(says("hello")) as server:
        schemas = (await document(server))["components"]["schemas"]
        prompt = schemas["CompletionBody"]["properties"]["prompt"]
        for value in PROMPTS:
            reply = await server.complete(prompt=value, max_tokens=1)
            assert (reply.status == 200) == conforms(value, prompt, schemas), value
        role = schemas["MessageBody"]["properties"]["role"]
        for name in (*role["enum"], "foo", "", "User"):
            messages = [{"role": name, "content": "say"}]
            taken = (await server.chat(messages=messages, max_tokens=1)).status == 200
            assert taken == conforms(name, role, schemas), name


FIELDS = {"text": "a", "refusal": "a", "content": "a", "role": "user", "name": "f", "output": "a"}
KINDS: list[tuple[str, str, dict[str, Any]]] = [
    ("ContentPart", "/v1/chat/completions", {"messages": [{"role": "user", "content": ["HERE"]}]}),
    ("InputItem", "/v1/responses", {"input": ["HERE"]}),
    ("InputPart", "/v1/responses", {"input": [{"role": "user", "content": ["HERE"]}]}),
]


@pytest.mark.parametrize(("name", "path", "body"), KINDS)
async def test_kinds_of_parts_that_are_offered_are_taken_and_no_others(
    name: str, path: str, body: dict[str, Any]
) -> None:
    async with a_server(says("hello")) as server:
        schemas = (await document(server))["components"]["schemas"]
        kinds = schemas[name]["properties"]["type"]["enum"]
        for kind in (*kinds, "foo", "", "image_url", "input_image"):
            part = json.dumps({"type": kind, **FIELDS})
            asked = json.dumps(body).replace('"HERE"', part).encode()
            reply = await server.post(path, asked)
            assert (reply.status == 200) == (kind in kinds), (kind, reply.body)

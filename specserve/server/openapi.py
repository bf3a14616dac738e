"""GET /openapi.json: what this server takes and gives, as OpenAPI 3.1, made from what it runs.

Types come from the Structs that bodies are decoded into and replies are encoded from; ranges from
the tables that admission checks against, and from this server's model and options. Nothing is said
twice, so nothing can drift. Fields that are refused (declared as `object`) are left out.
"""

from __future__ import annotations

import functools
from typing import get_args

import msgspec
from aiohttp import web
from msgspec import UNSET

import specserve
from specserve import admission
from specserve.admission import Limits
from specserve.server import (
    errors,
    events,
    message_replies,
    params,
    replies,
    response_replies,
    wire,
)
from specserve.server.errors import ErrorReply, MessagesError
from specserve.server.events import EngineWindow
from specserve.server.keys import OPEN_ROUTES
from specserve.server.message_wire import BLOCK_TYPES, CountTokensBody, MessagesBody
from specserve.server.middleware import REQUEST_ID_PATTERN
from specserve.server.prompts import ROLES, TEMPLATE_SWITCHES
from specserve.server.response_wire import ITEM_TYPES, PART_TYPES, ResponsesBody
from specserve.server.sse import DONE_MARKED, NAMED, Framing
from specserve.server.state import STATE
from specserve.server.tools import MAX_TOOLS, NAME_PATTERN

Json = dict[str, "JsonValue"]
JsonValue = str | int | float | bool | None | list["JsonValue"] | Json
_REF = "#/components/schemas/{name}"


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One route: the body it takes, the reply it gives, and the events of its stream."""

    summary: str
    body: type[msgspec.Struct] | None = None
    reply: type[msgspec.Struct] | None = None  # None: text
    events: tuple[type[msgspec.Struct], ...] = ()
    framing: Framing = DONE_MARKED
    error: type[msgspec.Struct] = ErrorReply
    required: tuple[str, ...] = ()  # fields of the body that null cannot stand for


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/completions"): Operation(
        summary="Continue prompts",
        body=wire.CompletionBody,
        reply=replies.Completion,
        events=(replies.Completion, ErrorReply),
        required=("prompt",),
    ),
    ("POST", "/v1/chat/completions"): Operation(
        summary="Reply in a conversation",
        body=wire.ChatBody,
        reply=replies.ChatCompletion,
        events=(replies.ChatChunk, ErrorReply),
        required=("messages",),
    ),
    ("POST", "/v1/responses"): Operation(
        summary="Reply in a conversation, item by item",
        body=ResponsesBody,
        reply=response_replies.Response,
        events=get_args(response_replies.ResponseEvent),
        framing=NAMED,
        required=("input",),
    ),
    ("POST", "/v1/messages"): Operation(
        summary="Reply in a conversation, as Anthropic's clients have it",
        body=MessagesBody,
        reply=message_replies.Message,
        events=(*get_args(message_replies.MessageEvent), MessagesError),
        framing=NAMED,
        error=MessagesError,
        required=("messages", "max_tokens"),
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        summary="How many tokens such a conversation has",
        body=CountTokensBody,
        reply=message_replies.TokenCount,
        error=MessagesError,
        required=("messages",),
    ),
    ("GET", "/v1/models"): Operation(summary="The model served", reply=replies.ModelList),
    ("GET", "/v1/models/{id}"): Operation(summary="One model by name", reply=replies.ModelCard),
    ("POST", "/tokenize"): Operation(
        summary="A prompt or messages as token ids",
        body=wire.TokenizeBody,
        reply=replies.TokenizeReply,
    ),
    ("POST", "/detokenize"): Operation(
        summary="Token ids as text",
        body=wire.DetokenizeBody,
        reply=replies.DetokenizeReply,
        required=("tokens",),
    ),
    ("GET", "/health"): Operation(summary="200 while the engine lives", reply=replies.Status),
    ("GET", "/ready"): Operation(summary="200 while new requests are taken", reply=replies.Status),
    ("GET", "/version"): Operation(summary="The version", reply=replies.Version),
    ("GET", "/metrics"): Operation(summary="Prometheus text"),
    ("GET", "/specserve/events"): Operation(
        summary="What the engine does, as it does it: numbers only",
        events=(EngineWindow,),
        framing=NAMED,
    ),
    ("GET", "/openapi.json"): Operation(summary="This document", reply=replies.OpenApi),
}


async def openapi(request: web.Request) -> web.Response:
    state = request.app[STATE]
    engine = state.engine
    body = _encoded(engine.limits, engine.model_name, state.settings.keys is not None)
    return web.Response(body=body, content_type="application/json")


@functools.lru_cache(maxsize=4)
def _encoded(limits: Limits, model_name: str, keyed: bool) -> bytes:
    return msgspec.json.encode(document(limits, model_name, keyed=keyed))


def document(limits: Limits, model_name: str, *, keyed: bool) -> Json:
    """keyed: whether API keys are asked for"""
    paths: dict[str, Json] = {}
    for (method, path), operation in OPERATIONS.items():
        described = _operation(operation, path)
        if keyed and path not in OPEN_ROUTES:
            described["security"] = [{"bearer": []}, {"x-api-key": []}]
        paths.setdefault(path, {})[method.lower()] = described
    components: Json = {"schemas": {**_schemas(limits, model_name)}}
    if keyed:
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "specserve", "version": specserve.__version__},
        "servers": [{"url": "/"}],
        "paths": {**paths},
        "components": components,
    }


def _reference(kind: type[msgspec.Struct]) -> Json:
    return {"$ref": _REF.format(name=kind.__name__)}


def _operation(operation: Operation, path: str) -> Json:
    content: Json = {"text/plain": {"schema": {"type": "string"}}}
    if operation.reply is not None:
        content = {"application/json": {"schema": _reference(operation.reply)}}
    if operation.events:
        content["text/event-stream"] = {"schema": _event(operation)}
    failed: Json = {"application/json": {"schema": _reference(operation.error)}}
    described: Json = {
        "summary": operation.summary,
        "responses": {
            "200": {"description": "OK", "content": content},
            "default": {"description": "Any failure", "content": failed},
        },
    }
    if operation.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _reference(operation.body)}},
        }
    if "{id}" in path:
        described["parameters"] = [
            {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return described


def _event(operation: Operation) -> Json:
    """One event of a stream, as OpenAPI 3.2 and its tools see it."""
    encoded: Json = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [_reference(kind) for kind in operation.events]},
    }
    if not operation.framing.named:
        encoded = {"anyOf": [{"const": "[DONE]"}, encoded]}
        return {"type": "object", "properties": {"data": encoded}, "required": ["data"]}
    names: Json = {"enum": [kind.__struct_config__.tag for kind in operation.events]}
    return {
        "type": "object",
        "properties": {"event": names, "data": encoded},
        "required": ["event", "data"],
    }


# ---- schemas ---------------------------------------------------------------------------------


_REFUSED = "x-refused"


def _schema_of_object(kind: type) -> Json:
    """`object` is the type of a field that is refused."""
    assert kind is object
    return {_REFUSED: True}


def _schemas(limits: Limits, model_name: str) -> dict[str, Json]:
    bodies = [one for one in OPERATIONS.values() if one.body is not None]
    kinds = [*(one.body for one in bodies), *(one.reply for one in OPERATIONS.values())]
    kinds += [kind for one in OPERATIONS.values() for kind in one.events]
    kinds += [one.error for one in OPERATIONS.values()]
    _, schemas = msgspec.json.schema_components(
        dict.fromkeys(kind for kind in kinds if kind is not None),
        schema_hook=_schema_of_object,
        ref_template=_REF,
    )
    _require_what_is_always_sent(schemas)
    _leave_out_refused(schemas)
    for operation in bodies:
        assert operation.body is not None
        schema = schemas[operation.body.__name__]
        _add_ranges(schema["properties"], body_ranges(limits, model_name))
        schema["required"] = [*operation.required]
    for name, ranges in struct_ranges(limits).items():
        _add_ranges(schemas[name]["properties"], ranges)
    return schemas


def _require_what_is_always_sent(schemas: dict[str, Json]) -> None:
    """To msgspec a field with a default is optional, but in a reply only UNSET is left out."""
    modules = (replies, response_replies, message_replies, errors, events)
    kinds = [kind for one in modules for kind in vars(one).values() if isinstance(kind, type)]
    for kind in kinds:
        if issubclass(kind, msgspec.Struct) and kind.__name__ in schemas:
            config = kind.__struct_config__
            required: list[JsonValue] = [] if config.tag_field is None else [config.tag_field]
            schemas[kind.__name__]["required"] = required + [
                field.encode_name
                for field in msgspec.structs.fields(kind)
                if field.default is not UNSET
            ]


def _leave_out_refused(schemas: dict[str, Json]) -> None:
    for schema in schemas.values():
        properties = schema["properties"]
        assert isinstance(properties, dict)
        schema["properties"] = {
            name: field
            for name, field in properties.items()
            if not (isinstance(field, dict) and _REFUSED in field)
        }


def _add_ranges(properties: Json, ranges: dict[str, Json]) -> None:
    """A keyword speaks of its own type only, so null stays what it is beside a minimum."""
    for name, keywords in ranges.items():
        schema = properties.get(name)
        if isinstance(schema, dict):
            schema.update(keywords)


def _between(low: float, high: float) -> Json:
    return {"minimum": low, "maximum": high}


def struct_ranges(limits: Limits) -> dict[str, dict[str, Json]]:
    """By Struct and field, where a field's name alone does not say what it may be."""
    token_ids: Json = {
        "type": "array",
        "items": {"type": "integer", **_between(0, limits.vocab_size - 1)},
        "minItems": 1,
        "maxItems": limits.max_model_len - 1,
    }
    text: Json = {"type": "string", "minLength": 1}
    several: Json = {"type": "array", "minItems": 1, "maxItems": params.MAX_PARALLEL}
    prompts: list[JsonValue] = [{**several, "items": {**kind}} for kind in (text, token_ids)]
    return {
        "CompletionBody": {
            "prompt": {"anyOf": [text, token_ids, *prompts]},
            "logprobs": _between(0, params.MAX_COMPLETION_LOGPROBS),  # a bool in chat
        },
        "MessageBody": {"role": {"enum": [*ROLES]}},
        "ContentPart": {"type": {"enum": ["text"]}},
        "InputItem": {"type": {"enum": [*ITEM_TYPES, None]}},
        "InputPart": {"type": {"enum": [*PART_TYPES]}},
        "InBlock": {"type": {"enum": [*BLOCK_TYPES]}},
        "FunctionBody": {"name": {"pattern": f"^{NAME_PATTERN}$"}},
        "ToolBody": {"type": {"enum": ["function"]}},
        "InTool": {"type": {"enum": ["custom", None]}, "name": {"pattern": f"^{NAME_PATTERN}$"}},
        "InMessage": {"role": {"enum": ["user", "assistant"]}},
        "ResponsesBody": {"input": {"minLength": 1, "minItems": 1}},
        "ResponseTool": {"type": {"enum": ["function"]}, "name": {"pattern": f"^{NAME_PATTERN}$"}},
        "StructuredOutputsBody": {
            "choice": {"minItems": 1},
            "regex": {"minLength": 1},
            "grammar": {"minLength": 1},
        },
        "SpeculationBody": {
            "drafter": {"enum": [*limits.drafters, None]},
            "max_draft_tokens": _between(0, limits.max_draft_tokens),
            "draft_width": _between(1, admission.MAX_DRAFT_WIDTH),
        },
    }


def body_ranges(limits: Limits, model_name: str) -> dict[str, Json]:
    """By field, the keywords that narrow its type on this server."""
    token_id = _between(0, limits.vocab_size - 1)
    output = _between(1, limits.max_model_len - 1)
    stop = {"minLength": 1, "maxLength": admission.MAX_STOP_CHARS}
    return {
        **{name: _between(low, high) for name, (low, high) in admission.RANGES.items()},
        "model": {"enum": [model_name, None]},
        "max_tokens": output,
        "max_completion_tokens": {**output},
        "max_output_tokens": {**output},
        "min_tokens": _between(0, limits.max_model_len - 1),
        "top_logprobs": _between(0, admission.MAX_LOGPROBS),
        "prompt_logprobs": _between(0, admission.MAX_LOGPROBS),
        "stop": {**stop, "maxItems": admission.MAX_STOP_STRINGS, "items": {**stop}},
        "stop_sequences": {"maxItems": admission.MAX_STOP_STRINGS, "items": {**stop}},
        "stop_token_ids": {"maxItems": admission.MAX_STOP_TOKEN_IDS, "items": {**token_id}},
        "allowed_token_ids": {"minItems": 1, "items": {**token_id}},
        "bad_words": {
            "maxItems": admission.MAX_BAD_WORDS,
            "items": {"minLength": 1, "maxLength": admission.MAX_BAD_WORD_CHARS},
        },
        "logit_bias": {
            "maxProperties": admission.MAX_LOGIT_BIAS,
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
            "additionalProperties": _between(*admission.LOGIT_BIAS_RANGE),
        },
        "cache_salt": {"minLength": 1, "maxLength": admission.MAX_SALT_CHARS},
        "request_id": {"pattern": f"^{REQUEST_ID_PATTERN}$"},
        "tokens": {"items": {**token_id}},
        "messages": {"minItems": 1},
        "tools": {"maxItems": MAX_TOOLS},
        "chat_template_kwargs": {
            "propertyNames": {"enum": [*TEMPLATE_SWITCHES]},
            "additionalProperties": {"type": ["boolean", "null"]},
        },
    }

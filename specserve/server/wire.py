"""Request bodies: decoded once, at the edge, into Structs whose every optional field takes null.

Types are checked here; ranges are checked where their limits live (admission, params, prompts).
Fields nobody reads are ignored (clients send many); fields that would change the answer but are
not supported yet are declared here so that they can be refused by name, never dropped in silence.
"""

from __future__ import annotations

import json
import re
from typing import Any, Literal, TypeVar  # Any: JSON that is passed on as it is

import msgspec

from specserve.errors import RequestError
from specserve.types import VerifyRule


class SpeculationBody(msgspec.Struct, frozen=True, kw_only=True):
    drafter: str | None = None
    max_draft_tokens: int | None = None
    draft_width: int | None = None
    verify: VerifyRule | None = None
    detailed: bool | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    text: str | None = None


class PredictionBody(msgspec.Struct, frozen=True, kw_only=True):
    """What the client expects the output to be, mostly: it is guessed from, and changes no text."""

    type: Literal["content"]
    content: str | list[ContentPart] | None = None


class JsonSchemaBody(msgspec.Struct, frozen=True, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormatBody(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaBody | None = None


class StructuredOutputsBody(msgspec.Struct, frozen=True, kw_only=True):
    """Exactly one of json, json_object, regex, choice, grammar; the names are vLLM's."""

    json: dict[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    structural_tag: object = None
    whitespace_pattern: object = None
    disable_additional_properties: object = None


class Extensions(msgspec.Struct, frozen=True, kw_only=True):
    """What every endpoint that generates takes, beside what it is asked."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None

    # Beyond the APIs that are spoken here; names follow vLLM.
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    speculation: SpeculationBody | None = None
    prediction: PredictionBody | None = None
    structured_outputs: StructuredOutputsBody | None = None


class GenerationBody(Extensions, frozen=True, kw_only=True):
    """What both of OpenAI's older endpoints take."""

    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_token_origins: bool | None = None
    response_format: ResponseFormatBody | None = None

    prompt_logprobs: int | None = None

    # Would change the answer; refused unless empty (params.refuse_unsupported).
    logits_processors: object = None
    use_beam_search: object = None
    length_penalty: object = None
    guided_json: object = None
    guided_regex: object = None
    guided_choice: object = None
    guided_grammar: object = None


Prompt = str | list[str | int | list[int]]


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    prompt: Prompt | None = None
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: object = None


class FunctionBody(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    function: FunctionBody | None = None


class FunctionName(msgspec.Struct, frozen=True, kw_only=True):
    name: str


class ToolChoiceBody(msgspec.Struct, frozen=True, kw_only=True):
    type: str
    function: FunctionName | None = None


class FunctionCallBody(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str | None = None


class ToolCallBody(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the assistant made earlier."""

    id: str | None = None
    type: str | None = None
    function: FunctionCallBody


class MessageBody(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, as some clients call it
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    function_call: object = None


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    messages: list[MessageBody] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    echo: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: list[ToolBody] | None = None
    tool_choice: str | ToolChoiceBody | None = None
    parallel_tool_calls: bool | None = None

    functions: object = None
    function_call: object = None
    chat_template: object = None
    documents: object = None
    audio: object = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """Either a prompt or messages, as in vLLM."""

    model: str | None = None
    prompt: str | None = None
    messages: list[MessageBody] | None = None
    tools: list[ToolBody] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[int] | None = None


Body = TypeVar("Body", bound=msgspec.Struct)

_AT_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_REQUIRED = re.compile(r"missing required field `(?P<name>\w+)`")


def parse_body(raw: bytes, kind: type[Body]) -> Body:
    """raw: the body, decompressed. Raises RequestError (400) that names the field where it can."""
    try:
        body = msgspec.json.decode(raw, type=kind)
        _refuse_duplicate_keys(raw)
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from None
    except RecursionError:
        raise _not_json("it is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _not_json(str(error)) from None
    return body


def convert_body(fields: dict[str, Any], kind: type[Body]) -> Body:
    """From what another endpoint's body means. Raises RequestError (400) that names the field."""
    try:
        return msgspec.convert(fields, kind, from_attributes=True)
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from None


def _not_json(why: str) -> RequestError:
    return RequestError(f"the request body is not valid JSON: {why}", code="invalid_json")


def _type_error(text: str) -> RequestError:
    at = _AT_PATH.search(text)
    path = at["path"] if at else ""
    reason = text[: at.start()] if at else text
    missing = _REQUIRED.search(reason)
    if missing:
        path = f"{path}.{missing['name']}".lstrip(".")
        reason = "this field is required"
    where = path or "request body"
    return RequestError(f"{where}: {reason}", param=path or None, code="invalid_type")


def _unique(pairs: list[tuple[str, object]]) -> Literal[None]:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise RequestError(
                f"{key[:64]} is given twice in the same JSON object: give it once",
                param=key[:64],
                code="duplicate_key",
            )
        seen.add(key)


def _skip_number(text: str) -> int:
    return 0


def _refuse_duplicate_keys(raw: bytes) -> None:
    """msgspec keeps the last of two equal keys; a proxy before us may have read the first."""
    json.loads(
        raw,
        object_pairs_hook=_unique,
        parse_int=_skip_number,  # valid already; and int() refuses very long ones
        parse_float=_skip_number,
    )

"""What a reply must look like, as it is asked for: response_format and structured_outputs.

`constrain` is the one way in, for whoever else wants a reply of a certain shape.
"""

from __future__ import annotations

from typing import Any, Final  # Any: a JSON schema

import msgspec
from aiohttp import web

from specserve.admission import constrained
from specserve.constraint import GrammarKind, GrammarSpec
from specserve.errors import RequestError
from specserve.server.job import Job
from specserve.server.state import STATE, timed_child
from specserve.server.thinking import CLOSES
from specserve.server.wire import GenerationBody, StructuredOutputsBody
from specserve.tokenizer import Tokenizer
from specserve_observability import names

_KINDS: Final[dict[str, GrammarKind]] = {
    "json": "json_schema",
    "json_object": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
_ANY_OBJECT: Final = '{"type":"object"}'


async def constrain(request: web.Request, job: Job, spec: GrammarSpec | None) -> Job:
    """The same job, its texts bound to `spec`; None: as it is. RequestError names spec.param."""
    if spec is None:
        return job
    compiler = request.app[STATE].compiler
    with timed_child(request, names.COMPILE_GRAMMAR):
        constraints = await compiler.constraints(spec, len(job.requests))
    return msgspec.structs.replace(
        job, requests=constrained(job.requests, constraints, param=spec.param)
    )


# ---- what was asked for ------------------------------------------------------------------


def format_of(body: GenerationBody) -> GrammarSpec | None:
    """RequestError names the field that cannot be what it is."""
    by_format = _of_response_format(body)
    if body.structured_outputs is None:
        return by_format
    if by_format is not None:
        raise RequestError(
            "response_format and structured_outputs both say what the text must look like: "
            "leave one out",
            param="structured_outputs",
        )
    return _of_structured_outputs(body.structured_outputs)


def schema_spec(schema: dict[str, Any] | str, *, param: str, compact: bool = False) -> GrammarSpec:
    """schema: as an object, or written out."""
    text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
    try:
        msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{param} is no JSON schema: {error}", param=param) from None
    return GrammarSpec(kind="json_schema", text=text, param=param, compact=compact)


def behind_reasoning(spec: GrammarSpec, tokenizer: Tokenizer) -> GrammarSpec:
    """The same for a reply that begins inside of reasoning: it holds from the closing mark on."""
    mark = tokenizer.token_id(CLOSES)
    if mark is None:
        raise RequestError(
            f"{spec.param} cannot be used with reasoning: this model has no token for {CLOSES}; "
            "switch reasoning off",
            param=spec.param,
            code="unsupported_parameter",
        )
    return msgspec.structs.replace(spec, after=mark)


def _of_response_format(body: GenerationBody) -> GrammarSpec | None:
    asked = body.response_format
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return GrammarSpec(kind="json_schema", text=_ANY_OBJECT, param="response_format")
    param = "response_format.json_schema"
    if asked.json_schema is None or asked.json_schema.schema is None:
        raise RequestError(
            "response_format is of type json_schema, so it must have json_schema.schema",
            param=param,
        )
    return schema_spec(asked.json_schema.schema, param=param)


def _of_structured_outputs(asked: StructuredOutputsBody) -> GrammarSpec:
    for name in ("structural_tag", "whitespace_pattern", "disable_additional_properties"):
        if getattr(asked, name):  # fields of the Struct
            raise RequestError(
                f"structured_outputs.{name} is not supported by this server: leave it out",
                param=f"structured_outputs.{name}",
                code="unsupported_parameter",
            )
    fields = msgspec.structs.asdict(asked)
    given = [name for name in _KINDS if fields[name] not in (None, False)]
    if len(given) != 1:
        raise RequestError(
            f"structured_outputs has {', '.join(given) or 'none'} of {', '.join(_KINDS)}: it must "
            "have exactly one",
            param="structured_outputs",
        )
    [name] = given
    param, value = f"structured_outputs.{name}", fields[name]
    compact = bool(asked.disable_any_whitespace)
    if name == "json":
        return schema_spec(value, param=param, compact=compact)
    if name == "json_object":
        return schema_spec(_ANY_OBJECT, param=param, compact=compact)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return GrammarSpec(kind=_KINDS[name], text=text, param=param)

"""One generation as asked over HTTP: the parsed body made into Requests and reply options."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from specserve.admission import make_requests
from specserve.engine import Engine
from specserve.errors import RequestError
from specserve.server.middleware import valid_request_id
from specserve.server.params import check_prompt_logprobs, speculation
from specserve.server.prompts import Beside
from specserve.server.replies import Usage
from specserve.server.state import CONTEXT, STATE
from specserve.server.tally import Tally
from specserve.server.wire import GenerationBody
from specserve.types import Request, SamplingParams
from specserve_observability import names
from specserve_observability.logs import rename_request


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """requests: prompt index * n + i. Each prompt's ids are kept once, in prompts."""

    reply_id: str
    created: int  # Unix seconds
    model: str
    prompts: list[list[int]]
    params: SamplingParams
    requests: list[Request]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    detailed: bool
    return_token_ids: bool
    return_token_origins: bool
    num_prompt_logprobs: int | None  # alternatives shown of each prompt token; None: none asked for
    only_prompt: bool = False  # what follows it is not shown

    def running_usage(self, tally: Tally) -> Usage | UnsetType | None:
        """Of a chunk that is not the usage chunk: counts, null, or no key, as was asked."""
        if self.continuous_usage:
            return tally.usage()
        return None if self.include_usage else UNSET


def check_model(engine: Engine, name: str | None) -> None:
    if name is not None and name != engine.model_name:
        raise RequestError(
            f"the model {name[:200]!r} does not exist here, this server has {engine.model_name!r}",
            param="model",
            code="model_not_found",
            status=404,
        )


def make_job(
    request: web.Request,
    body: GenerationBody,
    prompts: list[list[int]],
    params: SamplingParams,
    *,
    beside: Beside,
    prefix: str,
    default_max_tokens: int | None,
    param_names: Mapping[str, str],
) -> Job:
    """beside:             what was encoded beside the prompts
    prefix:             of the reply's id
    default_max_tokens: where max_tokens is not given; fewer where fewer fit. None: as many as fit
    param_names:        what this endpoint calls admission's fields
    """
    engine = request.app[STATE].engine
    adopt_request_id(request, body.request_id)
    # Made here: two live requests may well carry the same x-request-id.
    reply_id = f"{prefix}{uuid.uuid4().hex}"
    try:
        _check_queue(request, prompts, params.n)
        check_prompt_logprobs(body, params, sum(map(len, prompts)))
        requests = _requests(request, body, prompts, params, beside, reply_id, default_max_tokens)
    except RequestError as error:
        error.param = param_names.get(error.param or "", error.param)
        raise
    options = body.stream_options
    return Job(
        reply_id=reply_id,
        created=int(time.time()),
        model=engine.model_name,
        prompts=prompts,
        params=params,
        requests=requests,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        detailed=bool(body.speculation and body.speculation.detailed),
        return_token_ids=bool(body.return_token_ids),
        return_token_origins=bool(body.return_token_origins),
        num_prompt_logprobs=body.prompt_logprobs,
    )


def _check_queue(request: web.Request, prompts: Seq[Seq[int]], n: int) -> None:
    """They queue together, so more than the queue takes would get 429 for ever."""
    state = request.app[STATE]
    param = "prompt" if n == 1 else "n"
    max_waiting = state.engine.config.max_waiting
    if len(prompts) * n > max_waiting:
        raise RequestError(
            f"{len(prompts)} prompts with n = {n} make {len(prompts) * n} sequences, this server "
            f"queues at most {max_waiting}: ask for fewer, or start it with a larger --max-waiting",
            param=param,
        )
    num_tokens = sum(len(prompt_ids) for prompt_ids in prompts)
    max_tokens = state.settings.max_waiting_tokens
    if num_tokens * n > max_tokens:
        raise RequestError(
            f"{num_tokens} prompt tokens with n = {n} make {num_tokens * n} tokens, this server "
            f"queues at most {max_tokens}: ask for less, or start it with a larger "
            "--max-waiting-tokens",
            param=param,
        )


def _requests(
    request: web.Request,
    body: GenerationBody,
    prompts: Seq[Seq[int]],
    params: SamplingParams,
    beside: Beside,
    reply_id: str,
    default_max_tokens: int | None,
) -> list[Request]:
    context = request[CONTEXT]
    limits = request.app[STATE].engine.limits
    return [
        one
        for i, prompt_ids in enumerate(prompts)
        for one in make_requests(
            limits,
            prompt_ids,
            _with_default(params, default_max_tokens, limits.max_model_len - len(prompt_ids)),
            request_id=reply_id if len(prompts) == 1 else f"{reply_id}-p{i}",
            speculation=speculation(body),
            priority=0 if body.priority is None else body.priority,
            cache_salt=body.cache_salt,
            traceparent=context.span.traceparent,
            traffic_class=context.traffic_class,
            prediction_ids=beside.prediction,
            bad_word_ids=beside.bad_words,
            with_steps=bool(body.return_token_origins),
        )
    ]


def _with_default(params: SamplingParams, default: int | None, room: int) -> SamplingParams:
    """A default nobody asked for must not make a prompt too long that leaves room for some."""
    if params.max_tokens is not None or default is None:
        return params
    return msgspec.structs.replace(params, max_tokens=max(1, min(default, room)))


def adopt_request_id(request: web.Request, name: str | None) -> None:
    """vLLM's body field: used like the header, which wins."""
    if name is None:
        return
    if not valid_request_id(name):
        raise RequestError(
            "request_id must be 1 to 128 letters, digits or any of . _ : -", param="request_id"
        )
    if "x-request-id" not in request.headers:
        request[CONTEXT].request_id = name
        request[CONTEXT].attributes.pop(names.HTTP_RESPONSE_REQUEST_ID, None)  # was never sent
        rename_request(name)

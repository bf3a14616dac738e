"""POST /v1/completions: prompts in, one choice per prompt and n."""

from __future__ import annotations

import msgspec
from aiohttp import web
from msgspec import UNSET

from specserve.server.answer import answer
from specserve.server.body import read_body
from specserve.server.choices import ChoiceShape
from specserve.server.job import Job, check_model, make_job
from specserve.server.logprobs import completion_logprobs
from specserve.server.params import (
    DEFAULT_COMPLETION_TOKENS,
    check_parallel,
    check_stream_options,
    completion_params,
    refuse_unsupported,
)
from specserve.server.prompts import encode_beside, encode_prompts, split_prompts
from specserve.server.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    finish_reason,
)
from specserve.server.state import CONTEXT, STATE, timed_child
from specserve.server.structured import constrain, format_of
from specserve.server.tally import Tally
from specserve.server.wire import CompletionBody
from specserve.tokenizer import Tokenizer
from specserve.types import TokenChunk


async def completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    state.check_serving()
    body = await read_body(request, CompletionBody)
    check_model(state.engine, body.model)
    refuse_unsupported(body)
    check_stream_options(body)
    params = completion_params(body)
    text_format = format_of(body)
    prompts = split_prompts(body.prompt)
    check_parallel(len(prompts), params.n)
    request[CONTEXT].attributes["gen_ai.operation.name"] = "text_completion"
    with timed_child(request, "tokenize"):
        prompt_ids = await encode_prompts(
            state.engine, prompts, add_special_tokens=body.add_special_tokens is not False
        )
        beside = await encode_beside(state.engine, body)
    job = make_job(
        request,
        body,
        prompt_ids,
        params,
        beside=beside,
        prefix="cmpl-",
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        param_names={},
    )
    job = await constrain(request, job, text_format)
    return await answer(request, job, CompletionShape(job, state.engine.tokenizer))


class CompletionShape(ChoiceShape):
    """The last text and the finish reason share the last chunk."""

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        super().__init__(job)
        self._tokenizer = tokenizer
        self._started: set[int] = set()
        self._text_offsets = [0] * len(job.requests)

    def events(self, idx: int, chunk: TokenChunk, tally: Tally) -> list[msgspec.Struct]:
        choice = self._choice(idx, chunk)
        job = self._job
        says_nothing = not chunk.text and not choice.logprobs and not job.return_token_ids
        if says_nothing and chunk.finish_reason is None and idx in self._started:
            return []  # the token so far is only part of a character, or may begin a stop string
        self._started.add(idx)
        return [
            Completion(
                id=job.reply_id,
                created=job.created,
                model=job.model,
                choices=[choice],
                usage=job.running_usage(tally),
                metrics=tally.metrics() if tally.complete else UNSET,
            )
        ]

    def closing(self, tally: Tally) -> list[msgspec.Struct]:
        """One event with choices [], where stream_options.include_usage asks for it."""
        if not self._job.include_usage:
            return []
        usage = Completion(
            id=self._job.reply_id,
            created=self._job.created,
            model=self._job.model,
            choices=[],
            usage=tally.usage(),
            metrics=tally.metrics(),
        )
        return [usage]

    def whole(self, chunks: list[TokenChunk], tally: Tally) -> msgspec.Struct:
        return Completion(
            id=self._job.reply_id,
            created=self._job.created,
            model=self._job.model,
            choices=[self._choice(idx, chunk) for idx, chunk in enumerate(chunks)],
            usage=tally.usage(),
            metrics=tally.metrics(),
        )

    def _choice(self, idx: int, chunk: TokenChunk) -> CompletionChoice:
        with_ids = self._job.return_token_ids
        first = idx not in self._started
        return CompletionChoice(
            index=idx,
            text=chunk.text,
            logprobs=self._logprobs(idx, chunk),
            finish_reason=None if chunk.finish_reason is None else finish_reason(chunk),
            stop_reason=chunk.stop_reason,
            token_ids=list(chunk.token_ids) if with_ids else UNSET,
            prompt_token_ids=self._job.prompts[idx // self._job.params.n]
            if with_ids and first
            else UNSET,
        )

    def _logprobs(self, idx: int, chunk: TokenChunk) -> CompletionLogprobs | None:
        if self._job.params.logprobs is None:
            return None
        shaped, self._text_offsets[idx] = completion_logprobs(
            self._tokenizer, chunk.token_ids, chunk.logprobs, self._text_offsets[idx]
        )
        return shaped

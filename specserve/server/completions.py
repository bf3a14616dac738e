"""POST /v1/completions: prompts in, one choice per prompt and n."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import msgspec
from aiohttp import web
from msgspec import UNSET

from specserve.engine import Engine
from specserve.server.answer import answer
from specserve.server.body import read_body
from specserve.server.choices import ChoiceShape
from specserve.server.job import Job, check_model, make_job
from specserve.server.logprobs import (
    completion_logprobs,
    echo_offsets,
    output_offsets,
    prompt_logprobs,
)
from specserve.server.params import (
    DEFAULT_COMPLETION_TOKENS,
    asks_only_for_prompt,
    check_parallel,
    check_stream_options,
    completion_params,
    refuse_unsupported,
)
from specserve.server.prompts import encode_beside, encode_prompts, split_prompts, truncated
from specserve.server.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    finish_reason,
)
from specserve.server.state import CONTEXT, STATE, timed_child
from specserve.server.structured import constrain, format_of
from specserve.server.tally import Tally
from specserve.server.telling import tell_prompts
from specserve.server.wire import CompletionBody
from specserve.tokenizer import Tokenizer
from specserve.types import TokenChunk, TokenLogprobs
from specserve_observability import names


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
    request[CONTEXT].span.begin_operation("text_completion")
    with timed_child(request, names.TOKENIZE):
        encoded = await encode_prompts(
            state.engine, prompts, add_special_tokens=body.add_special_tokens is not False
        )
        limits, wanted = state.engine.limits, body.truncate_prompt_tokens
        prompt_ids = [truncated(token_ids, wanted, limits) for token_ids in encoded]
        echoes = await _echoes(state.engine, prompts, encoded, prompt_ids) if body.echo else None
        beside = await encode_beside(state.engine, body)
    tell_prompts(request, state.engine, prompts)  # once they have passed every check
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
    job = msgspec.structs.replace(job, only_prompt=asks_only_for_prompt(body))
    shape = CompletionShape(
        job,
        state.engine.tokenizer,
        num_choices=1 if body.n is None else body.n,
        num_logprobs=body.logprobs,
        echoes=echoes,
    )
    return await answer(request, job, shape)


async def _echoes(
    engine: Engine,
    prompts: Seq[str | list[int]],
    encoded: Seq[list[int]],
    used: Seq[list[int]],
) -> list[str]:
    """Each prompt as it was sent, or the text of its ids, where those were sent or cut."""

    def texts() -> list[str]:
        return [
            prompt if isinstance(prompt, str) and whole == ids else engine.tokenizer.decode(ids)
            for prompt, whole, ids in zip(prompts, encoded, used, strict=True)
        ]

    return await engine.run_off_loop(texts)


class CompletionShape(ChoiceShape):
    """The last text and the finish reason share the last chunk."""

    def __init__(
        self,
        job: Job,
        tokenizer: Tokenizer,
        *,
        num_choices: int,
        num_logprobs: int | None,
        echoes: Seq[str] | None,
    ) -> None:
        """num_choices:  n, of best_of sequences per prompt
        num_logprobs: alternatives shown of each token; None: no logprobs
        echoes:       by prompt, what its texts begin with
        """
        super().__init__(job, tokenizer)
        self._num_choices = num_choices
        self._num_logprobs = num_logprobs
        self._echoes = echoes
        self._started: set[int] = set()
        self._text_offsets = [0] * len(job.requests)

    def events(self, idx: int, chunk: TokenChunk, tally: Tally) -> list[msgspec.Struct]:
        choice = self._choice(idx, chunk)
        job = self._job
        shows_tokens = choice.logprobs or job.return_token_ids or job.return_token_origins
        says_nothing = not chunk.text and not shows_tokens
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
                # As in a chat: in one chunk of a stream and no more.
                metrics=tally.metrics() if tally.complete and not job.include_usage else UNSET,
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
            choices=[
                msgspec.structs.replace(self._choice(idx, chunks[idx]), index=place)
                for place, idx in enumerate(self._best(chunks))
            ],
            usage=tally.usage(),
            metrics=tally.metrics(),
        )

    def _best(self, chunks: list[TokenChunk]) -> list[int]:
        """Of every prompt's sequences the n with the highest log probability per token."""
        count = self._job.params.n
        if count == self._num_choices:
            return list(range(len(chunks)))
        best: list[int] = []
        for first in range(0, len(chunks), count):
            group = range(first, first + count)
            best += sorted(group, key=lambda idx: -_mean_logprob(chunks[idx]))[: self._num_choices]
        return best

    def _choice(self, idx: int, chunk: TokenChunk) -> CompletionChoice:
        with_ids = self._job.return_token_ids
        first = idx not in self._started
        prompt_idx = idx // self._job.params.n
        prompt_ids = self._job.prompts[prompt_idx]
        echo = self._echoes[prompt_idx] if self._echoes is not None and first else None
        return CompletionChoice(
            index=idx,
            text=(echo or "") + chunk.text,
            logprobs=self._logprobs(idx, chunk, echo),
            finish_reason=None if chunk.finish_reason is None else finish_reason(chunk),
            stop_reason=chunk.stop_reason,
            token_ids=list(chunk.token_ids) if with_ids else UNSET,
            token_origins=self._origins(idx, chunk),
            prompt_token_ids=prompt_ids if with_ids and first else UNSET,
            prompt_logprobs=prompt_logprobs(
                self._tokenizer, prompt_ids, chunk.prompt_logprobs, self._job.num_prompt_logprobs
            ),
        )

    def _logprobs(self, idx: int, chunk: TokenChunk, echo: str | None) -> CompletionLogprobs | None:
        """echo: the prompt's text, where the text begins with it"""
        if self._num_logprobs is None:
            return None
        token_ids: list[int] = []
        entries: list[TokenLogprobs | None] = []
        offsets: list[int] = []
        if echo is not None:
            token_ids += self._job.prompts[idx // self._job.params.n]
            entries += [None, *chunk.prompt_logprobs]
            offsets += echo_offsets(self._tokenizer, token_ids, echo)
            self._text_offsets[idx] = len(echo)
        own, self._text_offsets[idx] = output_offsets(
            self._tokenizer, chunk.token_ids, self._text_offsets[idx]
        )
        return completion_logprobs(
            self._tokenizer,
            [*token_ids, *chunk.token_ids],
            [*entries, *chunk.logprobs],
            [*offsets, *own],
            self._num_logprobs,
        )


def _mean_logprob(chunk: TokenChunk) -> float:
    values = [one.logprob for one in chunk.logprobs]
    return sum(values) / max(1, len(values))

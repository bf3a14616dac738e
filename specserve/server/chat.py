"""POST /v1/chat/completions: a conversation in, n replies of the assistant."""

from __future__ import annotations

import msgspec
from aiohttp import web
from msgspec import UNSET

from specserve.server.answer import answer
from specserve.server.body import read_body
from specserve.server.job import Job, check_model, make_job
from specserve.server.logprobs import chat_logprobs
from specserve.server.params import (
    chat_params,
    check_parallel,
    check_stream_options,
    refuse_unsupported,
)
from specserve.server.prompts import encode_chat, encode_prediction
from specserve.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    Delta,
    Usage,
)
from specserve.server.state import CONTEXT, STATE, timed_child
from specserve.server.tally import Tally
from specserve.server.wire import ChatBody
from specserve.tokenizer import Tokenizer
from specserve.types import TokenChunk


async def chat_completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    state.check_serving()
    body = await read_body(request, ChatBody)
    check_model(state.engine, body.model)
    refuse_unsupported(body)
    check_stream_options(body)
    params = chat_params(body)
    check_parallel(1, params.n)
    request[CONTEXT].attributes["gen_ai.operation.name"] = "chat"
    with timed_child(request, "tokenize"):
        prompt_ids = await encode_chat(
            state.engine,
            body.messages,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=bool(body.add_special_tokens),
        )
        prediction_ids = await encode_prediction(state.engine, body.prediction)
    names = {"prompt": "messages"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    job = make_job(
        request,
        body,
        [prompt_ids],
        params,
        prediction_ids=prediction_ids,
        prefix="chatcmpl",
        default_max_tokens=None,
        param_names=names,
    )
    return await answer(request, job, ChatShape(job, state.engine.tokenizer))


class ChatShape:
    """The role leaves with the first token, the finish chunk carries no text.

    Load generators take the first chunk with choices as the first token, so a role sent early
    would fake it; and some clients stop reading at finish_reason before they take its text.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._started: set[int] = set()

    def events(self, idx: int, chunk: TokenChunk, tally: Tally) -> list[msgspec.Struct]:
        events: list[msgspec.Struct] = []
        if idx not in self._started or self._says_something(chunk):
            events.append(self._chunk(self._content(idx, chunk), tally, first=not self._started))
            self._started.add(idx)
        if chunk.finish_reason is not None:
            finish = ChatChunkChoice(
                index=idx,
                delta=Delta(),
                finish_reason=chunk.finish_reason,
                stop_reason=chunk.stop_reason,
            )
            events.append(self._chunk(finish, tally, last=tally.complete))
        return events

    def _says_something(self, chunk: TokenChunk) -> bool:
        """A token may be only part of a character, or may begin a stop string."""
        wants_tokens = self._job.return_token_ids or self._job.params.logprobs is not None
        return bool(chunk.text) or (wants_tokens and bool(chunk.token_ids))

    def _content(self, idx: int, chunk: TokenChunk) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=idx,
            delta=Delta(role=UNSET if idx in self._started else "assistant", content=chunk.text),
            logprobs=self._logprobs(chunk),
            token_ids=list(chunk.token_ids) if self._job.return_token_ids else UNSET,
        )

    def _chunk(
        self, choice: ChatChunkChoice, tally: Tally, *, first: bool = False, last: bool = False
    ) -> ChatChunk:
        job = self._job
        return ChatChunk(
            id=job.reply_id,
            created=job.created,
            model=job.model,
            choices=[choice],
            usage=job.running_usage(tally),
            metrics=tally.metrics() if last else UNSET,
            prompt_token_ids=job.prompts[0] if first and job.return_token_ids else UNSET,
        )

    def usage_event(self, tally: Tally) -> msgspec.Struct:
        return ChatChunk(
            id=self._job.reply_id,
            created=self._job.created,
            model=self._job.model,
            choices=[],
            usage=tally.usage(),
            metrics=tally.metrics(),
        )

    def whole(self, chunks: list[TokenChunk], tally: Tally) -> msgspec.Struct:
        job = self._job
        usage: Usage = tally.usage()
        return ChatCompletion(
            id=job.reply_id,
            created=job.created,
            model=job.model,
            choices=[self._choice(idx, chunk) for idx, chunk in enumerate(chunks)],
            usage=usage,
            metrics=tally.metrics(),
            prompt_token_ids=job.prompts[0] if job.return_token_ids else UNSET,
        )

    def _choice(self, idx: int, chunk: TokenChunk) -> ChatChoice:
        assert chunk.finish_reason is not None
        return ChatChoice(
            index=idx,
            message=ChatMessage(content=chunk.text),
            logprobs=self._logprobs(chunk),
            finish_reason=chunk.finish_reason,
            stop_reason=chunk.stop_reason,
            token_ids=list(chunk.token_ids) if self._job.return_token_ids else UNSET,
        )

    def _logprobs(self, chunk: TokenChunk) -> ChatLogprobs | None:
        if self._job.params.logprobs is None:
            return None
        return chat_logprobs(self._tokenizer, chunk.token_ids, chunk.logprobs)

"""POST /v1/responses: a conversation in, the items of one reply out. Nothing is stored."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, ClassVar, Literal  # Any: JSON that is given back as it came

import msgspec
from aiohttp import web

from specserve.errors import RequestError
from specserve.server.answer import answer
from specserve.server.body import read_body
from specserve.server.conversation import Conversation, converse
from specserve.server.errors import error_type
from specserve.server.replies import ReasoningTokens, finish_reason
from specserve.server.response_items import Items
from specserve.server.response_replies import (
    IncompleteDetails,
    Response,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseText,
    ResponseUsage,
)
from specserve.server.response_wire import ResponsesBody, chat_of, in_own_words
from specserve.server.segments import Change, Segments
from specserve.server.sse import NAMED, Framing
from specserve.server.state import STATE
from specserve.server.tally import Tally
from specserve.server.text_logprobs import TextLogprobs
from specserve.tokenizer import Tokenizer
from specserve.types import TokenChunk

Status = Literal["in_progress", "completed", "incomplete", "failed"]


async def responses(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    state.check_serving()
    body = await read_body(request, ResponsesBody)
    asked = chat_of(body)
    try:
        chat = await converse(request, asked, prefix="resp_", param_names={})
    except RequestError as error:
        raise in_own_words(error) from None
    return await answer(request, chat.job, ResponseShape(chat, body, state.engine.tokenizer))


class ResponseShape:
    """One choice. Events are numbered; the last says all of the reply again."""

    framing: ClassVar[Framing] = NAMED

    def __init__(self, chat: Conversation, body: ResponsesBody, tokenizer: Tokenizer) -> None:
        self._job = chat.job
        self._body = body
        [self._voice] = chat.voices
        self._logprobs = None
        if self._job.params.logprobs is not None:
            skips = self._job.params.skip_special_tokens
            self._logprobs = TextLogprobs(tokenizer, skip_special_tokens=skips)
        self._segments = Segments(self._logprobs)
        self._items = Items()
        self._finished: TokenChunk | None = None

    def opening(self) -> list[msgspec.Struct]:
        response = self._response("in_progress")
        number = self._items.number
        return [
            ResponseCreated(sequence_number=number(), response=response),
            ResponseInProgress(sequence_number=number(), response=response),
        ]

    def events(self, idx: int, chunk: TokenChunk, tally: Tally) -> list[msgspec.Struct]:
        return self._items.events(self._read(chunk))

    def closing(self, tally: Tally) -> list[msgspec.Struct]:
        response = self._complete(tally)
        kind = ResponseCompleted if response.status == "completed" else ResponseIncomplete
        return [kind(sequence_number=self._items.number(), response=response)]

    def failure(self, error: RequestError) -> msgspec.Struct:
        failed = self._response("failed")
        reason = ResponseError(error.code or error_type(error.status), error.message)
        return ResponseFailed(
            sequence_number=self._items.number(),
            response=msgspec.structs.replace(failed, error=reason),
        )

    def whole(self, chunks: list[TokenChunk], tally: Tally) -> msgspec.Struct:
        self._read(chunks[0])
        return self._complete(tally)

    def _read(self, chunk: TokenChunk) -> Seq[Change]:
        if self._logprobs is not None:
            self._logprobs.push(chunk)
        changes = self._segments.push(self._voice.read(chunk))
        if chunk.finish_reason is not None:
            self._finished = chunk
            changes += self._segments.finish(cut=finish_reason(chunk) == "length")
        return changes

    def _complete(self, tally: Tally) -> Response:
        assert self._finished is not None
        cut = finish_reason(self._finished) == "length"
        response = self._response("incomplete" if cut else "completed")
        return msgspec.structs.replace(
            response,
            output=[self._items.item(segment) for segment in self._segments.all],
            incomplete_details=IncompleteDetails("max_output_tokens") if cut else None,
            usage=self._usage(tally),
            metrics=tally.metrics(),
        )

    def _usage(self, tally: Tally) -> ResponseUsage:
        usage = tally.usage()
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=usage.prompt_tokens_details,
            output_tokens=usage.completion_tokens,
            output_tokens_details=ReasoningTokens(self._voice.num_reasoning_tokens),
            total_tokens=usage.total_tokens,
        )

    def _response(self, status: Status) -> Response:
        body, job = self._body, self._job
        text = body.text.format if body.text else None
        return Response(
            id=job.reply_id,
            created_at=job.created,
            status=status,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=job.model,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            temperature=job.params.temperature,
            text=ResponseText({"type": "text"} if text is None else _given(text)),
            tool_choice=_given(body.tool_choice) or "auto",
            tools=[_given(tool) for tool in body.tools or ()],
            top_logprobs=job.params.logprobs or 0,
            top_p=job.params.top_p,
        )


def _given(value: Any) -> Any:
    """As it came, without what was left out."""
    if not isinstance(value, msgspec.Struct):
        return value
    return {key: part for key, part in msgspec.structs.asdict(value).items() if part is not None}

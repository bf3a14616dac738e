"""POST /v1/messages and its count_tokens: a conversation as Anthropic's clients have it."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from aiohttp import web

from specserve.errors import RequestError
from specserve.server.answer import answer, json_response
from specserve.server.body import read_body
from specserve.server.conversation import Conversation, converse, encode_conversation
from specserve.server.errors import messages_error
from specserve.server.message_replies import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Ending,
    InputMore,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    TextBlock,
    TextMore,
    ThinkingBlock,
    ThinkingMore,
    TokenCount,
    ToolUseBlock,
)
from specserve.server.message_wire import (
    CountTokensBody,
    MessagesBody,
    chat_of,
    counted_chat,
    in_own_words,
)
from specserve.server.replies import finish_reason
from specserve.server.segments import Change, Segment, Segments
from specserve.server.sse import NAMED, Framing
from specserve.server.state import CONTEXT, STATE
from specserve.server.tally import Tally
from specserve.types import TokenChunk


async def messages(request: web.Request) -> web.StreamResponse:
    request.app[STATE].check_serving()
    asked = chat_of(await read_body(request, MessagesBody))
    try:
        chat = await converse(request, asked, prefix="msg_", param_names={})
    except RequestError as error:
        raise in_own_words(error) from None
    return await answer(request, chat.job, MessageShape(chat, request[CONTEXT].request_id))


async def count_tokens(request: web.Request) -> web.Response:
    asked = counted_chat(await read_body(request, CountTokensBody))
    prompt_ids = await encode_conversation(request.app[STATE], asked)
    return json_response(TokenCount(len(prompt_ids)))


class MessageShape:
    """One choice, as blocks. The first event waits for the first token: what was cached is known
    only then."""

    framing: ClassVar[Framing] = NAMED

    def __init__(self, chat: Conversation, request_id: str) -> None:
        self._job = chat.job
        [self._voice] = chat.voices
        self._request_id = request_id
        self._segments = Segments()
        self._started = False
        self._finished: TokenChunk | None = None

    def opening(self) -> list[msgspec.Struct]:
        return []

    def events(self, idx: int, chunk: TokenChunk, tally: Tally) -> list[msgspec.Struct]:
        start: list[msgspec.Struct] = []
        if not self._started:
            self._started = True
            start.append(MessageStart(self._message([], tally)))
        return start + [_event(change) for change in self._read(chunk)]

    def closing(self, tally: Tally) -> list[msgspec.Struct]:
        delta = MessageDelta(delta=self._ending(), usage=_usage(tally), metrics=tally.metrics())
        return [delta, MessageStop()]

    def failure(self, error: RequestError) -> msgspec.Struct:
        return messages_error(error, self._request_id)

    def whole(self, chunks: list[TokenChunk], tally: Tally) -> msgspec.Struct:
        self._read(chunks[0])
        ending = self._ending()
        return msgspec.structs.replace(
            self._message([_block(segment) for segment in self._segments.all], tally),
            stop_reason=ending.stop_reason,
            stop_sequence=ending.stop_sequence,
            metrics=tally.metrics(),
        )

    def _read(self, chunk: TokenChunk) -> list[Change]:
        changes = self._segments.push(self._voice.read(chunk))
        if chunk.finish_reason is not None:
            self._finished = chunk
            changes += self._segments.finish(cut=finish_reason(chunk) == "length")
        return changes

    def _message(self, content: list[Block], tally: Tally) -> Message:
        return Message(
            id=self._job.reply_id,
            model=self._job.model,
            content=content,
            stop_reason=None,
            stop_sequence=None,
            usage=_usage(tally),
        )

    def _ending(self) -> Ending:
        assert self._finished is not None
        if finish_reason(self._finished) == "length":
            return Ending("max_tokens", None)
        if self._voice.calls:
            return Ending("tool_use", None)
        stop = self._finished.stop_reason
        return Ending("stop_sequence", stop) if isinstance(stop, str) else Ending("end_turn", None)


def _usage(tally: Tally) -> MessageUsage:
    usage = tally.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )


def _block(segment: Segment, *, begun: bool = True) -> Block:
    """begun: False: as it is when it opens, without content"""
    text = segment.text if begun else ""
    if segment.kind == "call":
        arguments = text if segment.whole else "{}"
        return ToolUseBlock(
            id=segment.call_id, name=segment.name, input=msgspec.Raw(arguments.encode())
        )
    return ThinkingBlock(text) if segment.kind == "reasoning" else TextBlock(text)


def _event(change: Change) -> msgspec.Struct:
    segment = change.segment
    if change.what == "closed":
        return BlockStop(segment.idx)
    if change.what == "opened":
        return BlockStart(index=segment.idx, content_block=_block(segment, begun=False))
    if segment.kind == "call":
        return BlockDelta(index=segment.idx, delta=InputMore(change.more))
    kind = ThinkingMore if segment.kind == "reasoning" else TextMore
    return BlockDelta(index=segment.idx, delta=kind(change.more))

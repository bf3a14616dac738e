"""POST /v1/chat/completions: a conversation in, n replies of the assistant."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import msgspec
from aiohttp import web
from msgspec import UNSET

from specserve.server.answer import answer
from specserve.server.body import read_body
from specserve.server.choices import ChoiceShape
from specserve.server.conversation import Conversation, Voice, converse
from specserve.server.logprobs import chat_logprobs, prompt_logprobs
from specserve.server.parts import CallArguments, CallStart, Part, Reasoning, Text, joined
from specserve.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatFinishReason,
    ChatLogprobs,
    ChatMessage,
    Delta,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    finish_reason,
)
from specserve.server.state import STATE
from specserve.server.tally import Tally
from specserve.server.wire import ChatBody
from specserve.tokenizer import Tokenizer
from specserve.types import TokenChunk


async def chat_completions(request: web.Request) -> web.StreamResponse:
    state = request.app[STATE]
    state.check_serving()
    body = await read_body(request, ChatBody)
    names = {"prompt": "messages"}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    chat = await converse(request, body, prefix="chatcmpl-", param_names=names)
    return await answer(request, chat.job, ChatShape(chat, state.engine.tokenizer))


class ChatShape(ChoiceShape):
    """The role leaves with the first token, the finish chunk carries no text.

    Load generators take the first chunk with choices as the first token, so a role sent early
    would fake it; and some clients stop reading at finish_reason before they take its text.
    """

    def __init__(self, chat: Conversation, tokenizer: Tokenizer) -> None:
        super().__init__(chat.job, tokenizer)
        self._voices = chat.voices
        self._started: set[int] = set()

    def events(self, idx: int, chunk: TokenChunk, tally: Tally) -> list[msgspec.Struct]:
        events: list[msgspec.Struct] = []
        voice = self._voices[idx]
        parts = voice.read(chunk)
        if idx not in self._started or parts or self._shows_tokens(chunk):
            content = self._content(idx, chunk, parts)
            events.append(self._chunk(content, tally, first=not self._started))
            self._started.add(idx)
        if chunk.finish_reason is not None:
            tally.add_reasoning(idx, voice.num_reasoning_tokens)
            finish = ChatChunkChoice(
                index=idx,
                delta=Delta(),
                finish_reason=_finish_reason(chunk, voice),
                stop_reason=chunk.stop_reason,
            )
            events.append(self._chunk(finish, tally, last=tally.complete))
        return events

    def _shows_tokens(self, chunk: TokenChunk) -> bool:
        """Even one that is only part of a character, or may begin a stop string or a call."""
        job = self._job
        asked = job.return_token_ids or job.return_token_origins or job.params.logprobs is not None
        return asked and bool(chunk.token_ids)

    def _content(self, idx: int, chunk: TokenChunk, parts: Seq[Part]) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=idx,
            delta=_delta(parts, first=idx not in self._started),
            logprobs=self._logprobs(chunk),
            token_ids=list(chunk.token_ids) if self._job.return_token_ids else UNSET,
            token_origins=self._origins(idx, chunk),
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
            # In one chunk of a stream and no more: clients drop them where they come twice.
            metrics=tally.metrics() if last and not job.include_usage else UNSET,
            prompt_token_ids=job.prompts[0] if first and job.return_token_ids else UNSET,
        )

    def closing(self, tally: Tally) -> list[msgspec.Struct]:
        """One event with choices [], where stream_options.include_usage asks for it."""
        if not self._job.include_usage:
            return []
        usage = ChatChunk(
            id=self._job.reply_id,
            created=self._job.created,
            model=self._job.model,
            choices=[],
            usage=tally.usage(),
            metrics=tally.metrics(),
        )
        return [usage]

    def whole(self, chunks: list[TokenChunk], tally: Tally) -> msgspec.Struct:
        job = self._job
        choices = [self._choice(idx, chunk) for idx, chunk in enumerate(chunks)]
        for idx, voice in enumerate(self._voices):
            tally.add_reasoning(idx, voice.num_reasoning_tokens)
        return ChatCompletion(
            id=job.reply_id,
            created=job.created,
            model=job.model,
            choices=choices,
            usage=tally.usage(),
            metrics=tally.metrics(),
            prompt_token_ids=job.prompts[0] if job.return_token_ids else UNSET,
            prompt_logprobs=prompt_logprobs(
                self._tokenizer, job.prompts[0], chunks[0].prompt_logprobs, job.num_prompt_logprobs
            ),
        )

    def _choice(self, idx: int, chunk: TokenChunk) -> ChatChoice:
        voice = self._voices[idx]
        return ChatChoice(
            index=idx,
            message=_message(voice.read(chunk)),
            logprobs=self._logprobs(chunk),
            finish_reason=_finish_reason(chunk, voice),
            stop_reason=chunk.stop_reason,
            token_ids=list(chunk.token_ids) if self._job.return_token_ids else UNSET,
            token_origins=self._origins(idx, chunk),
        )

    def _logprobs(self, chunk: TokenChunk) -> ChatLogprobs | None:
        if self._job.params.logprobs is None:
            return None
        return chat_logprobs(self._tokenizer, chunk.token_ids, chunk.logprobs)


def _finish_reason(chunk: TokenChunk, voice: Voice) -> ChatFinishReason:
    """tool_calls says that the calls are to be made: they are whole, and nothing cut the reply."""
    reason = finish_reason(chunk)
    return "tool_calls" if reason == "stop" and voice.calls else reason


def _message(parts: Seq[Part]) -> ChatMessage:
    reply = joined(parts)
    calls = [
        ToolCall(id=call.call_id, function=FunctionCall(call.name, call.arguments))
        for call in reply.calls
    ]
    return ChatMessage(
        content=reply.text or (None if calls or reply.reasoning else ""),
        reasoning_content=reply.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def _delta(parts: Seq[Part], *, first: bool) -> Delta:
    """All of one chunk's parts: pieces of one call are one entry."""
    text = "".join(part.text for part in parts if isinstance(part, Text))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls: dict[int, ToolCallDelta] = {}
    for part in parts:
        if isinstance(part, CallStart):
            calls[part.call_idx] = ToolCallDelta(
                index=part.call_idx,
                id=part.call_id,
                type="function",
                function=FunctionDelta(name=part.name),
            )
        elif isinstance(part, CallArguments):
            before = calls.get(part.call_idx)
            calls[part.call_idx] = _with_arguments(before, part)
    return Delta(
        role="assistant" if first else UNSET,
        reasoning_content=reasoning or UNSET,
        content=text if text or first else UNSET,
        tool_calls=[*calls.values()] or UNSET,
    )


def _with_arguments(before: ToolCallDelta | None, more: CallArguments) -> ToolCallDelta:
    if before is None:
        return ToolCallDelta(index=more.call_idx, function=FunctionDelta(arguments=more.text))
    function = before.function
    return msgspec.structs.replace(
        before, function=FunctionDelta(function.name, function.arguments + more.text)
    )

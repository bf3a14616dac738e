"""From a chat, however an endpoint spells it, to a job and to readers of its replies."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from aiohttp import web

from specserve.constraint import GrammarSpec
from specserve.errors import RequestError
from specserve.server.call_grammar import call_grammar
from specserve.server.job import Job, check_model, make_job
from specserve.server.params import (
    chat_params,
    check_parallel,
    check_stream_options,
    refuse_unsupported,
)
from specserve.server.parts import Part, Reader, Text
from specserve.server.prompts import encode_beside, encode_chat, text_of, truncated
from specserve.server.readers import reasoning_opened
from specserve.server.state import CONTEXT, STATE, ServerState, timed_child
from specserve.server.structured import behind_reasoning, constrain, format_of
from specserve.server.telling import tell_chat
from specserve.server.thinking import reasoning_tokens
from specserve.server.tools import ToolUse, tool_use
from specserve.server.wire import ChatBody
from specserve.tokenizer import Tokenizer
from specserve.types import TokenChunk
from specserve_observability import names


class Voice:
    """One of a conversation's replies: its chunks made parts.

    echo: text that the reply begins with, though it was given
    """

    def __init__(self, reader: Reader, tokenizer: Tokenizer, echo: str = "") -> None:
        self._echo: list[Part] = [Text(echo, 0)] if echo else []
        self._reader = reader
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []

    @property
    def calls(self) -> bool:
        """Whether the reply ends so that its calls are to be made."""
        return self._reader.calls

    def read(self, chunk: TokenChunk) -> list[Part]:
        self._token_ids += chunk.token_ids
        echo, self._echo = self._echo, []
        parts = echo + self._reader.push(chunk.text)
        return parts if chunk.finish_reason is None else parts + self._reader.finish()

    @property
    def num_reasoning_tokens(self) -> int:
        """So far."""
        return reasoning_tokens(self._tokenizer, self._token_ids, self._reader.reasoning_bytes)


class Conversation(msgspec.Struct, frozen=True):
    """voices: one for each of the job's requests"""

    job: Job
    voices: list[Voice]


async def converse(
    request: web.Request, body: ChatBody, *, prefix: str, param_names: Mapping[str, str]
) -> Conversation:
    """prefix: of the reply's id. param_names: what this endpoint calls a chat's own fields."""
    state = request.app[STATE]
    refuse_unsupported(body)
    check_stream_options(body)
    params = chat_params(body)
    check_parallel(1, params.n)
    tools = _tools(state, body)
    text_format = _format_of(state, body, tools)
    request[CONTEXT].span.begin_operation("chat")
    with timed_child(request, names.TOKENIZE):
        encoded = await _encode(state, body, tools)
        prompt_ids = truncated(encoded, body.truncate_prompt_tokens, state.engine.limits)
        beside = await encode_beside(state.engine, body)
    tell_chat(request, body.messages)  # once they have passed every check
    job = make_job(
        request,
        body,
        [prompt_ids],
        state.reply_format.readable(params, tools),
        beside=beside,
        prefix=prefix,
        default_max_tokens=None,
        param_names=param_names,
    )
    opened = reasoning_opened(state.engine.tokenizer, prompt_ids, _continued_text(body))
    if text_format is not None and state.reply_format.begins_with_reasoning(opened):
        text_format = behind_reasoning(text_format, state.engine.tokenizer)
    job = await constrain(request, job, text_format)
    tokenizer = state.engine.tokenizer
    readers = [state.reply_format.reader(tools, reasoning_opened=opened) for _ in job.requests]
    echo = _echo(body)
    return Conversation(job, [Voice(reader, tokenizer, echo) for reader in readers])


async def encode_conversation(state: ServerState, body: ChatBody) -> list[int]:
    """The prompt's token ids, for whoever wants no reply."""
    return await _encode(state, body, _tools(state, body))


def _tools(state: ServerState, body: ChatBody) -> ToolUse:
    check_model(state.engine, body.model)
    tools = tool_use(body)
    state.reply_format.check(tools)
    return tools


def _continued_text(body: ChatBody) -> str:
    """What the reply goes on with; "" where it begins anew."""
    if not body.continue_final_message or not body.messages:
        return ""
    return text_of(body.messages[-1].content or "", "messages")


def _echo(body: ChatBody) -> str:
    """As in vLLM the last message, where it is of the role that replies."""
    if not body.echo or not body.messages or body.messages[-1].role != "assistant":
        return ""
    return text_of(body.messages[-1].content or "", "messages")


def _format_of(state: ServerState, body: ChatBody, tools: ToolUse) -> GrammarSpec | None:
    spec = format_of(body)
    if spec is not None and tools.names:
        raise RequestError(
            f"{spec.param} leaves no room for calls of tools: set tool_choice to 'none', or leave "
            "one of them out",
            param=spec.param,
        )
    layout = state.reply_format.calls
    if not tools.forced or layout is None:
        return spec
    return call_grammar(layout, tools.forced, several=tools.max_calls is None)


async def _encode(state: ServerState, body: ChatBody, tools: ToolUse) -> list[int]:
    tell_in_text = state.reply_format.told_in_text
    try:
        return await encode_chat(state.engine, body, tools, tell_in_text=tell_in_text)
    except RecursionError:
        raise RequestError(
            "the tools, or the arguments of an earlier call, are nested too deeply", param="tools"
        ) from None

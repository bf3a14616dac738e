"""Replies and stream events of /v1/responses, as OpenAI spells them."""

from __future__ import annotations

from typing import Any, Literal  # Any: JSON that is given back as it came

import msgspec
from msgspec import UNSET, UnsetType

from specserve.server.replies import CachedTokens, Metrics, ReasoningTokens, TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[None] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    status: ItemStatus
    summary: list[None] = []
    content: list[ReasoningText]


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


Item = MessageItem | ReasoningItem | CallItem


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: Literal["max_output_tokens"]


class ResponseText(msgspec.Struct, frozen=True):
    format: Any


class ResponseReasoning(msgspec.Struct, frozen=True):
    """What was asked for of it changes nothing here."""

    effort: None = None
    summary: None = None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: ResponseReasoning = ResponseReasoning()
    store: Literal[False] = False
    temperature: float
    text: ResponseText
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    metrics: Metrics | UnsetType = UNSET


# ---- stream events ---------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=""):
    sequence_number: int


class ResponseCreated(Event, frozen=True, kw_only=True, tag="response.created"):
    response: Response


class ResponseInProgress(Event, frozen=True, kw_only=True, tag="response.in_progress"):
    response: Response


class ResponseCompleted(Event, frozen=True, kw_only=True, tag="response.completed"):
    response: Response


class ResponseIncomplete(Event, frozen=True, kw_only=True, tag="response.incomplete"):
    response: Response


class ResponseFailed(Event, frozen=True, kw_only=True, tag="response.failed"):
    response: Response


class ItemEvent(Event, frozen=True, kw_only=True, tag=""):
    output_index: int


class ItemAdded(ItemEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    item: Item


class ItemDone(ItemEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    item: Item


class ContentEvent(ItemEvent, frozen=True, kw_only=True, tag=""):
    item_id: str
    content_index: int = 0


class ContentAdded(ContentEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class ContentDone(ContentEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDelta(ContentEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprob] = []


class TextDone(ContentEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprob] = []


class ReasoningDelta(ContentEvent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(ContentEvent, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(
    ItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    item_id: str
    delta: str


class ArgumentsDone(
    ItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    item_id: str
    name: str
    arguments: str


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | ItemAdded
    | ItemDone
    | ContentAdded
    | ContentDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
)

"""Replies and stream events of /v1/messages, as Anthropic spells them."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from specserve.server.replies import Metrics

StopKind = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: Literal[""] = ""  # nothing is signed here


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """input: {} where the reply was cut inside it, which stop_reason says"""

    id: str
    name: str
    input: msgspec.Raw


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens are those that were computed, and beside them those that were known."""

    input_tokens: int
    cache_creation_input_tokens: Literal[0] = 0
    cache_read_input_tokens: int
    output_tokens: int


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopKind | None
    stop_sequence: str | None
    usage: MessageUsage
    metrics: Metrics | UnsetType = UNSET


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


# ---- stream events ---------------------------------------------------------------------------


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    message: Message


class BlockStart(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_start"
):
    index: int
    content_block: Block


class TextMore(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingMore(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputMore(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_delta"
):
    index: int
    delta: TextMore | ThinkingMore | InputMore


class BlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class Ending(msgspec.Struct, frozen=True):
    stop_reason: StopKind
    stop_sequence: str | None


class MessageDelta(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_delta"
):
    delta: Ending
    usage: MessageUsage
    metrics: Metrics


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    pass


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop

"""What one prompt is, whoever made it: a file, a trace, chance."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    prompt_id: str
    category: str
    messages: tuple[Message, ...]  # at least one
    later_turns: tuple[str, ...] = ()  # what the user says after each reply
    token_ids: tuple[int, ...] = ()  # sent to completions instead of text, where there are any
    max_tokens: int | None = None  # None: the run's
    arrival: float | None = None  # seconds after the first one of a trace

"""Compact records of engine and server; spans, metrics and logs are made from them afterwards.

A record costs about 2 us to create; a span with its links costs 65-120 us and would sit in the
step (observability.md 2.4). All times are time.time() seconds. Imports msgspec only.
"""

from __future__ import annotations

from typing import Any

import msgspec

# Any: msgspec has no type for "one of several kinds of list", which attributes may be.
Values = dict[str, Any]


class RowRecord(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's part of one step. Counts are after stop trimming."""

    request_id: str
    traceparent: str | None  # of the request's decode span
    drafter: str
    num_tokens: int  # known tokens computed (prefill chunk, or 1)
    num_draft_tokens: int
    num_accepted_tokens: int
    num_emitted_tokens: int
    is_prefill: bool = False
    predicted_accepted: float = 0.0  # guesses that were expected to be right
    no_draft_reason: str = ""  # why K = 0 although speculation was asked for


class StepRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One scheduling step: plan -> draft -> target_forward -> verify -> commit."""

    step_idx: int
    plan_start: float
    plan_end: float
    draft_start: float
    forward_start: float
    verify_start: float
    verify_end: float
    commit_end: float
    rows: tuple[RowRecord, ...]
    num_running: int
    num_waiting: int
    blocks_free: int
    blocks_cached: int
    blocks_live: int
    token_budget: int
    num_preempted: int
    error: str | None = None
    predicted_seconds: float = 0.0  # from draft_start to verify_end; 0: nothing was predicted
    failed_drafters: tuple[str, ...] = ()  # one entry per failure
    speculation_seconds: float = 0.0  # of the step, that it would not have taken without guesses


class PrefillChunk(msgspec.Struct, frozen=True, array_like=True):
    start: float
    end: float
    num_tokens: int


class QueuePeriod(msgspec.Struct, frozen=True, array_like=True):
    """A stay in the waiting queue. reason: what most of it was for: admission (a
    place among max_num_seqs, or the end of a step), token_budget (prompts ahead took it),
    kv_capacity, preempted."""

    start: float
    end: float
    reason: str


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One finished sequence, written once when it ends."""

    request_id: str
    traceparent: str | None  # the span that queue, prefill and decode are children of
    decode_span_id: str  # 16 hex digits, chosen at admission so that steps can link to it
    model: str
    arrival: float
    first_token: float | None
    finished: float
    queue: tuple[QueuePeriod, ...]
    prefill: tuple[PrefillChunk, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    finish_reason: str  # stop | length | abort | error
    drafters: tuple[str, ...]
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_steps: int  # that emitted a token
    drafted_per_position: tuple[int, ...]
    accepted_per_position: tuple[int, ...]
    num_spec_emitted_tokens: int = 0  # tokens the spec steps emitted, the extra one included
    inter_token_seconds: tuple[float, ...] = ()  # per emitted token after the first
    inter_chunk_seconds: tuple[float, ...] = ()  # per step that emitted, after the first
    traffic_class: str = "default"
    error: str | None = None


class ChildRecord(msgspec.Struct, frozen=True, array_like=True):
    """A part of an HTTP request that has ended. of_operation: it belongs to the operation's span"""

    name: str
    start: float
    end: float
    attributes: Values
    of_operation: bool


class OperationRecord(msgspec.Struct, frozen=True, array_like=True):
    """What a request asked of the model, from the parsed body on: GenAI's `chat {model}`."""

    name: str
    context: str  # traceparent
    start: float
    attributes: Values


class HttpRecord(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One HTTP request that ended."""

    context: str  # traceparent, as the next one
    parent: str | None  # of the caller's span
    trace_state: str
    method: str
    route: str
    start: float
    end: float
    status: int
    attributes: Values
    operation: OperationRecord | None
    children: tuple[ChildRecord, ...]

"""Step and request records as the engine would write them, for tests of what is made from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specserve_observability.records import (
    PrefillChunk,
    QueuePeriod,
    RequestRecord,
    RowRecord,
    StepRecord,
)

START = 1_800_000_000.0  # seconds since the epoch
STEP_SECONDS = 0.01


class Row(NamedTuple):
    """One row of a played step: which request, who guessed, how many, how many were right."""

    request_idx: int
    drafter: str = "ngram"
    drafted: int = 0
    accepted: int = 0


def decode_id(request_idx: int) -> str:
    return f"{request_idx + 1:016x}"


def trace_id(request_idx: int) -> str:
    return f"{0xABC000 + request_idx:032x}"


def server_traceparent(request_idx: int, *, sampled: bool = True) -> str:
    return f"00-{trace_id(request_idx)}-{0xF00 + request_idx:016x}-{'01' if sampled else '00'}"


def decode_traceparent(request_idx: int, *, sampled: bool = True) -> str:
    return f"00-{trace_id(request_idx)}-{decode_id(request_idx)}-{'01' if sampled else '00'}"


def a_row(
    request_idx: int = 0,
    *,
    drafter: str = "ngram",
    tokens: int = 1,
    drafted: int = 0,
    accepted: int = 0,
    emitted: int | None = None,
    traceparent: str | None = "",
) -> RowRecord:
    """traceparent "": the request's decode span; None: the engine knows of no trace."""
    return RowRecord(
        f"req-{request_idx}",
        decode_traceparent(request_idx) if traceparent == "" else traceparent,
        drafter,
        tokens,
        drafted,
        accepted,
        accepted + 1 if emitted is None else emitted,
        tokens > 1,
    )


def a_step(
    step_idx: int = 0,
    rows: Sequence[RowRecord] = (),
    *,
    start: float | None = None,
    seconds: float = STEP_SECONDS,
    preempted: int = 0,
    error: str | None = None,
    speculation_seconds: float = 0.0,
) -> StepRecord:
    """Phases take 10, 20, 50, 10 and 10 % of the step's time."""
    began = START + step_idx * STEP_SECONDS if start is None else start
    return StepRecord(
        step_idx=step_idx,
        plan_start=began,
        plan_end=began + 0.1 * seconds,
        draft_start=began + 0.1 * seconds,
        forward_start=began + 0.3 * seconds,
        verify_start=began + 0.8 * seconds,
        verify_end=began + 0.9 * seconds,
        commit_end=began + seconds,
        rows=tuple(rows),
        num_running=len(rows),
        num_waiting=2,
        blocks_free=100,
        blocks_cached=20,
        blocks_live=8,
        token_budget=512,
        num_preempted=preempted,
        error=error,
        speculation_seconds=speculation_seconds,
    )


def a_request(
    request_idx: int = 0,
    *,
    traceparent: str | None = "",
    prompt: int = 12,
    cached: int = 4,
    finish_reason: str = "stop",
    started: bool = True,
    error: str | None = None,
    rows: Sequence[RowRecord] = (),
    traffic_class: str = "default",
) -> RequestRecord:
    """rows: its rows in decode steps, which all its sums come from."""
    drafting = [row for row in rows if row.num_draft_tokens]
    num_output = sum(row.num_emitted_tokens for row in rows)
    chunks = (PrefillChunk(START + 0.2, START + 0.3, 6), PrefillChunk(START + 0.3, START + 0.4, 2))
    return RequestRecord(
        request_id=f"req-{request_idx}",
        traceparent=server_traceparent(request_idx) if traceparent == "" else traceparent,
        decode_span_id=decode_id(request_idx),
        model="demo",
        arrival=START,
        first_token=START + 0.4 if started else None,
        finished=START + 1.0,
        queue=(QueuePeriod(START, START + 0.2, "admission"),),
        prefill=chunks if started else (),
        num_prompt_tokens=prompt,
        num_cached_tokens=cached,
        num_output_tokens=num_output,
        num_preemptions=0,
        finish_reason=finish_reason,
        drafters=tuple(dict.fromkeys(row.drafter for row in drafting)),
        num_spec_steps=len(drafting),
        num_draft_tokens=sum(row.num_draft_tokens for row in drafting),
        num_accepted_draft_tokens=sum(row.num_accepted_tokens for row in drafting),
        num_steps=len(rows),
        drafted_per_position=_per_position([row.num_draft_tokens for row in drafting]),
        accepted_per_position=_per_position([row.num_accepted_tokens for row in drafting]),
        num_spec_emitted_tokens=sum(row.num_emitted_tokens for row in drafting),
        inter_token_seconds=(0.02,) * max(0, num_output - 1),
        inter_chunk_seconds=(0.04,) if num_output > 1 else (),
        traffic_class=traffic_class,
        error=error,
    )


def play(script: Sequence[Sequence[Row]]) -> tuple[list[StepRecord], list[RequestRecord]]:
    """The records of a run: one inner sequence per step, at most one row per request in each."""
    steps = []
    rows_by_request: dict[int, list[RowRecord]] = {}
    for step_idx, planned in enumerate(script):
        rows = []
        for row in planned:
            record = a_row(
                row.request_idx, drafter=row.drafter, drafted=row.drafted, accepted=row.accepted
            )
            rows.append(record)
            rows_by_request.setdefault(row.request_idx, []).append(record)
        steps.append(a_step(step_idx, rows))
    requests = [a_request(idx, rows=rows) for idx, rows in rows_by_request.items()]
    return steps, requests


def _per_position(counts: list[int]) -> tuple[int, ...]:
    return tuple(
        sum(count > position for count in counts) for position in range(max(counts, default=0))
    )

"""StepRecords -> spans of engine windows and of the steps worth keeping.

Outcomes per request are events on the step's span: viewers drop the attributes of links.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

from opentelemetry.trace import SpanContext
from opentelemetry.util.types import AttributeValue

from . import names
from .context import child_context, root_context, sampled_context
from .records import RowRecord, StepRecord
from .sampling import StepSampler
from .spans import (
    MAX_LINKS,
    Attributes,
    DecodeBook,
    Event,
    SharedAttributes,
    Span,
    SpanFactory,
    to_ns,
)

WINDOW_STEPS = 256
WINDOW_SECONDS = 5.0


class _Window:
    def __init__(self, window_idx: int, start: float) -> None:
        self.window_idx = window_idx
        self.context = root_context()
        self.start = start
        self.end = start
        self.num_steps = 0
        self.num_kept = 0
        self.num_preempted = 0
        self.decodes: dict[int, SpanContext] = {}  # span id -> context, in order of first step


class EngineSpans:
    """StepRecords in order -> spans of engine windows and kept steps."""

    def __init__(self, factory: SpanFactory, sampler: StepSampler, book: DecodeBook) -> None:
        self._factory = factory
        self._sampler = sampler
        self._book = book
        self._window: _Window | None = None
        self._num_windows = 0
        self.num_sampled_out = 0

    def add(self, step: StepRecord) -> Iterator[Span]:
        yield from self.close_window(now=step.plan_start)
        if self._window is None:
            self._window = _Window(self._num_windows, step.plan_start)
            self._num_windows += 1
        window = self._window
        window.num_steps += 1
        window.end = max(window.end, step.commit_end)
        window.num_preempted += step.num_preempted
        rows = _sampled_rows(step.rows)
        decodes = [decode for decode, _ in rows[:MAX_LINKS]]
        reason = self._sampler.reason_to_keep(step)
        context = child_context(window.context) if reason is not None else None
        for row_idx, (decode, row) in enumerate(rows):
            span_id = decode.span_id
            notes = self._book.of(span_id)
            if not row.is_prefill:
                notes.add_row(row, step.plan_start, step.commit_end)
            if row_idx >= MAX_LINKS:
                continue
            if span_id not in window.decodes and len(window.decodes) < MAX_LINKS:
                window.decodes[span_id] = decode
                notes.add_window(window.context)
            if context is not None:
                notes.add_step(context)
        if reason is None or context is None:
            self.num_sampled_out += 1
            return
        window.num_kept += 1
        yield from self._step_spans(step, reason, context, window.context, decodes)

    def close_window(self, now: float | None = None) -> Iterator[Span]:
        """The window's span, if it is full, if `now` is past its length, or if now is None."""
        window = self._window
        if window is None:
            return
        full = window.num_steps >= WINDOW_STEPS
        if not full and now is not None and now - window.start < WINDOW_SECONDS:
            return
        self._window = None
        yield self._factory.span(
            names.ENGINE_WINDOW,
            window.context,
            None,
            window.start,
            window.end,
            {
                names.WINDOW_INDEX: window.window_idx,
                names.WINDOW_STEPS: window.num_steps,
                names.WINDOW_SAMPLED_STEPS: window.num_kept,
                names.PREEMPTIONS: window.num_preempted,
            },
            links=list(window.decodes.values()),
        )

    def _step_spans(
        self,
        step: StepRecord,
        reason: str,
        context: SpanContext,
        window: SpanContext,
        decodes: list[SpanContext],
    ) -> Iterator[Span]:
        attributes = _step_attributes(step)
        attributes[names.STEP_SAMPLE_REASON] = reason
        outcome_time = to_ns(step.commit_end)
        yield self._factory.span(
            names.ENGINE_STEP,
            context,
            window,
            step.plan_start,
            step.commit_end,
            attributes,
            links=decodes,
            events=[
                *(
                    Event(names.DRAFTER_FAILURE, {names.SPEC_DRAFTER: name}, outcome_time)
                    for name in step.failed_drafters
                ),
                *(
                    Event(
                        names.REQUEST_OUTCOME,
                        _outcome(row) if row.num_draft_tokens else _plain_outcome(row),
                        outcome_time,
                    )
                    for row in step.rows[:MAX_LINKS]
                ),
            ],
            error=step.error,
        )
        phases = (
            (names.PLAN, step.plan_start, step.plan_end),
            (names.DRAFT, step.draft_start, step.forward_start),
            (names.TARGET_FORWARD, step.forward_start, step.verify_start),
            (names.VERIFY, step.verify_start, step.verify_end),
            (names.COMMIT, step.verify_end, step.commit_end),
        )
        for name, start, end in phases:
            yield self._factory.child(name, context, start, end, {})


def _sampled_rows(rows: Sequence[RowRecord]) -> list[tuple[SpanContext, RowRecord]]:
    """Rows of requests that are traced, with the contexts of their decode spans."""
    return [
        (context, row)
        for row in rows
        if row.traceparent and (context := sampled_context(row.traceparent)) is not None
    ]


def _outcome(row: RowRecord) -> Attributes:
    outcome: dict[str, AttributeValue] = {
        names.REQUEST_ID: row.request_id,
        names.BATCH_TOKENS: row.num_tokens,
        names.SPEC_DRAFTER: row.drafter,
        names.SPEC_DRAFT_TOKENS: row.num_draft_tokens,
        names.SPEC_ACCEPTED_TOKENS: row.num_accepted_tokens,
        names.SPEC_PREDICTED_ACCEPTED: row.predicted_accepted,
        names.GENERATED_TOKENS: row.num_emitted_tokens,
    }
    if row.no_draft_reason:
        outcome[names.SPEC_NO_DRAFT_REASON] = row.no_draft_reason
    return outcome


@lru_cache(4096)
def _plain_outcome(row: RowRecord) -> SharedAttributes:
    """Without guesses: the same in each step of a request."""
    return SharedAttributes(_outcome(row))


def _step_attributes(step: StepRecord) -> dict[str, AttributeValue]:
    num_prefill = sum(row.num_tokens for row in step.rows if row.is_prefill)
    num_known = sum(row.num_tokens for row in step.rows)
    num_drafted = sum(row.num_draft_tokens for row in step.rows)
    num_decode = num_known - num_prefill
    kind = (
        "mixed"
        if num_prefill and num_decode
        else "prefill"
        if num_prefill
        else "decode"
        if num_decode
        else "empty"
    )
    attributes: dict[str, AttributeValue] = {
        names.STEP_INDEX: step.step_idx,
        names.STEP_KIND: kind,
        names.BATCH_REQUESTS: len(step.rows),
        names.BATCH_TOKENS: num_known + num_drafted,
        names.BATCH_PREFILL_TOKENS: num_prefill,
        names.BATCH_DECODE_TOKENS: num_decode,
        names.BATCH_TOKEN_BUDGET: step.token_budget,
        names.SPEC_DRAFT_TOKENS: num_drafted,
        names.SPEC_ACCEPTED_TOKENS: sum(row.num_accepted_tokens for row in step.rows),
        names.SPEC_EMITTED_TOKENS: sum(
            row.num_emitted_tokens for row in step.rows if row.num_draft_tokens
        ),
        names.SPEC_PREDICTED_ACCEPTED: sum(row.predicted_accepted for row in step.rows),
        names.SPEC_SECONDS: step.speculation_seconds,
        names.GENERATED_TOKENS: sum(row.num_emitted_tokens for row in step.rows),
        names.REQUESTS_RUNNING: step.num_running,
        names.REQUESTS_WAITING: step.num_waiting,
        names.KV_BLOCKS_FREE: step.blocks_free,
        names.KV_BLOCKS_CACHED: step.blocks_cached,
        names.KV_BLOCKS_LIVE: step.blocks_live,
        names.PREEMPTIONS: step.num_preempted,
    }
    if step.predicted_seconds:
        attributes[names.STEP_SECONDS] = step.verify_end - step.draft_start
        attributes[names.STEP_PREDICTED_SECONDS] = step.predicted_seconds
    if step.error is not None:
        attributes[names.ERROR_TYPE] = "step_failed"
    return attributes

"""What the engine remembers of one running request, and the record and chunks made from it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence as Seq

import msgspec

from specserve.output import OutputProcessor, Stop
from specserve.sequence import Sequence
from specserve.stream import RequestStream
from specserve.types import (
    LOSSY_RULES,
    FinishReason,
    PromptLogprobs,
    Request,
    RequestTimes,
    RowPlan,
    RowResult,
    SpecStats,
    StepTrace,
    TokenChunk,
)
from specserve.waiting import WaitClock
from specserve_observability.records import PrefillChunk, QueuePeriod, RequestRecord, RowRecord


class LiveRequest:
    """One writer: the engine's loop. Counts are after stop trimming, each token counted once."""

    def __init__(
        self,
        request: Request,
        seq: Sequence,
        output: OutputProcessor,
        stream: RequestStream,
        waits: WaitClock,
    ) -> None:
        self.request = request
        self.seq = seq
        self.output = output
        self.stream = stream
        self.decode_span_id = secrets.token_hex(8)
        self._waiting_since: float | None = request.arrival_time
        self._waits = waits
        self._waits_before = waits.read(time.time())
        self._queue: list[QueuePeriod] = []
        self._prefill: list[PrefillChunk] = []
        self._first_token: float | None = None
        self._last_token: float | None = None
        self._scheduled: float | None = None
        self._inter_token: list[float] = []
        self._inter_chunk: list[float] = []
        self._drafters: list[str] = []
        self._per_step_drafted: list[int] = []
        self._per_step_accepted: list[int] = []
        self._spec_emitted = 0
        self._num_steps = 0
        self._prompt_logprobs: list[PromptLogprobs] = []  # not sent yet, of the second token on

    # ---- events --------------------------------------------------------------------------

    def on_scheduled(self, now: float) -> None:
        if self._waiting_since is None:
            return
        self._queue.append(self._stay(self._waiting_since, now))
        self._waiting_since = None
        if self._scheduled is None:
            self._scheduled = now

    def _stay(self, since: float, now: float) -> QueuePeriod:
        """In the queue; after the first, only preemption leads there."""
        if self._queue:
            return QueuePeriod(since, now, "preempted")
        return QueuePeriod(since, now, self._waits.longest(self._waits_before, now, "admission"))

    def on_preempted(self, now: float) -> None:
        if self._waiting_since is None:
            self._waiting_since = now

    def on_row(
        self, row: RowPlan, result: RowResult, start: float, end: float
    ) -> tuple[list[int], Stop | None, RowRecord]:
        """Apply one row's result: tokens kept, the stop if there is one, the row's record."""
        kept: list[int] = []
        stop: Stop | None = None
        for token_id in result.token_ids:
            kept.append(token_id)
            stop = self.output.push(token_id)
            if stop is not None:
                break
        if row.num_scored:  # again from the beginning, where it was preempted meanwhile
            self._prompt_logprobs[row.start :] = result.prompt_logprobs
        accepted = min(result.num_accepted, len(kept))
        if row.is_prefill:
            self._prefill.append(PrefillChunk(start, end, row.num_tokens))
        if kept:
            self._count(result, kept, accepted, end)
        record = RowRecord(
            self.request.request_id,
            self._traceparent_of_decode(),
            result.drafter,
            row.num_tokens,
            result.num_draft_tokens,
            accepted,
            len(kept),
            row.is_prefill,
            result.predicted_accepted,
            result.no_draft_reason,
        )
        return kept, stop, record

    def _count(self, result: RowResult, kept: list[int], accepted: int, now: float) -> None:
        self._num_steps += 1
        if self._first_token is None:
            self._first_token = now
        elif self._last_token is not None:
            gap = now - self._last_token
            self._inter_chunk.append(gap)
            self._inter_token.extend([gap / len(kept)] * len(kept))
        self._last_token = now
        if not result.num_draft_tokens:
            return
        if result.drafter not in self._drafters:
            self._drafters.append(result.drafter)
        self._per_step_drafted.append(result.num_draft_tokens)
        self._per_step_accepted.append(accepted)
        self._spec_emitted += len(kept)

    # ---- what leaves ---------------------------------------------------------------------

    def chunk(self, token_ids: list[int], result: RowResult | None) -> TokenChunk:
        prompt_logprobs, self._prompt_logprobs = tuple(self._prompt_logprobs), []
        return TokenChunk(
            request_id=self.request.request_id,
            text=self.output.take_text(),
            token_ids=tuple(token_ids),
            logprobs=result.logprobs[: len(token_ids)] if result else (),
            prompt_logprobs=prompt_logprobs,
            steps=self._steps(len(token_ids), result),
            num_prompt_tokens=self.seq.num_prompt_tokens,
            num_cached_tokens=self.seq.num_cached_tokens,
            num_output_tokens=self.output.num_output_tokens,
            num_preemptions=self.seq.num_preemptions,
        )

    def _steps(self, num_tokens: int, result: RowResult | None) -> tuple[StepTrace, ...]:
        if result is None or result.guesses is None or not num_tokens:
            return ()
        step = StepTrace(
            step_idx=self._num_steps - 1,
            num_tokens=num_tokens,
            num_accepted=min(result.num_accepted, num_tokens),
            drafter=result.drafter if result.num_draft_tokens else "none",
            reason=result.no_draft_reason,
            guesses=result.guesses,
        )
        return (step,)

    def last_chunk(
        self,
        token_ids: list[int],
        result: RowResult | None,
        finish_reason: FinishReason,
        now: float,
        *,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> TokenChunk:
        return msgspec.structs.replace(
            self.chunk(token_ids, result),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            stats=self._stats(),
            times=RequestTimes(
                arrival=self.request.arrival_time,
                scheduled=self._scheduled,
                first_token=self._first_token,
                finished=now,
            ),
            error=error,
            unfollowable=result is not None and result.unfollowable,
        )

    def record(
        self, model: str, finish_reason: FinishReason, now: float, error: str | None
    ) -> RequestRecord:
        queue = list(self._queue)
        if self._waiting_since is not None:
            queue.append(self._stay(self._waiting_since, now))
        stats = self._stats()
        num_positions = max(self._per_step_drafted, default=0)
        return RequestRecord(
            request_id=self.request.request_id,
            traceparent=self.request.traceparent,
            decode_span_id=self.decode_span_id,
            model=model,
            arrival=self.request.arrival_time,
            first_token=self._first_token,
            finished=now,
            queue=tuple(queue),
            prefill=tuple(self._prefill),
            num_prompt_tokens=self.seq.num_prompt_tokens,
            num_cached_tokens=self.seq.num_cached_tokens,
            num_output_tokens=self.output.num_output_tokens,
            num_preemptions=self.seq.num_preemptions,
            finish_reason=finish_reason,
            drafters=stats.drafters,
            num_spec_steps=stats.num_spec_steps,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_draft_tokens=stats.num_accepted_draft_tokens,
            num_spec_emitted_tokens=stats.num_spec_emitted_tokens,
            num_steps=stats.num_steps,
            drafted_per_position=at_each_position(self._per_step_drafted, num_positions),
            accepted_per_position=at_each_position(self._per_step_accepted, num_positions),
            inter_token_seconds=tuple(self._inter_token),
            inter_chunk_seconds=tuple(self._inter_chunk),
            traffic_class=self.request.traffic_class,
            error=error,
        )

    def _stats(self) -> SpecStats:
        return SpecStats(
            drafters=tuple(self._drafters),
            max_draft_tokens=self.request.max_draft_tokens,
            num_spec_steps=len(self._per_step_drafted),
            num_draft_tokens=sum(self._per_step_drafted),
            num_accepted_draft_tokens=sum(self._per_step_accepted),
            num_spec_emitted_tokens=self._spec_emitted,
            num_steps=self._num_steps,
            per_step_drafted=tuple(self._per_step_drafted),
            per_step_accepted=tuple(self._per_step_accepted),
            lossy=self.request.verify in LOSSY_RULES,
        )

    def _traceparent_of_decode(self) -> str | None:
        """The W3C traceparent that names this request's decode span, for links from steps."""
        parent = self.request.traceparent
        if parent is None:
            return None
        version, trace_id, _, flags = parent.split("-")
        return f"{version}-{trace_id}-{self.decode_span_id}-{flags}"


def at_each_position(per_step: Seq[int], num_positions: int) -> tuple[int, ...]:
    """How many steps reached each of num_positions: [3, 1], 4 -> (2, 1, 1, 0)."""
    return tuple(sum(1 for count in per_step if count > at) for at in range(num_positions))

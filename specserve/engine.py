"""The loop: plan -> execute -> commit. A coroutine owns all state, one thread owns all tensors.

Everything here runs on the event loop except Runner.execute and what run_off_loop is given.
Aborts that arrive while a step runs are applied in its commit. When one row fails, that request
fails alone; when the step fails, every stream gets the error and the engine stays dead and says so.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar

import msgspec

from specserve.admission import Limits
from specserve.config import EngineConfig
from specserve.errors import EngineError, RequestError
from specserve.live import LiveRequest
from specserve.output import OutputProcessor
from specserve.scheduler import Scheduler
from specserve.stream import RequestStream
from specserve.tokenizer import Tokenizer
from specserve.types import (
    BatchPlan,
    FinishReason,
    Request,
    RowPlan,
    RowResult,
    StepResult,
    StepTimings,
    TokenChunk,
)
from specserve.waiting import WaitClock
from specserve_observability.logs import bound_request, get_logger
from specserve_observability.records import RequestRecord, RowRecord, StepRecord

P = ParamSpec("P")
T = TypeVar("T")


class Runner(Protocol):
    """Turns a plan into tokens, on the one worker thread."""

    def execute(self, plan: BatchPlan, forward_begins: Callable[[], None]) -> StepResult:
        """forward_begins: to be called, from that thread, when Python has little left to do."""
        ...


class Recorder(Protocol):
    """Where finished steps and requests are written down; must return in microseconds."""

    def record_step(self, record: StepRecord) -> None: ...

    def record_request(self, record: RequestRecord) -> None: ...


class EngineSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    num_running: int
    num_waiting: int
    blocks_free: int
    blocks_cached: int
    blocks_live: int
    blocks_total: int


class Engine:
    """Requests in by submit(), tokens out by RequestStream."""

    def __init__(
        self,
        *,
        model_name: str,
        config: EngineConfig,
        runner: Runner,
        tokenizer: Tokenizer,
        limits: Limits,
        recorder: Recorder,
    ) -> None:
        self.model_name = model_name
        self.created = int(time.time())
        self.config = config
        self.tokenizer = tokenizer
        self.limits = limits
        self.error: str | None = None
        self._runner = runner
        self._recorder = recorder
        self._scheduler = Scheduler(config)
        self._live: dict[int, LiveRequest] = {}
        self._seq_ids: dict[str, int] = {}
        self._aborted: set[str] = set()
        self._outbox: list[tuple[RequestStream, TokenChunk]] = []
        self._waits = WaitClock()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self._num_empty_plans = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="specserve-step")
        self._helpers = ThreadPoolExecutor(2, thread_name_prefix="specserve-text")
        self._log = get_logger("specserve.engine")

    # ---- life ----------------------------------------------------------------------------

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="specserve-engine")

    async def stop(self) -> None:
        """End the loop; whoever still runs gets finish_reason abort. Stopping twice is fine."""
        self._stopping = True
        self._wake.set()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        self._end_all("abort", None)
        # On another thread: to wait here for a long tokenization would block the loop.
        await asyncio.to_thread(self._worker.shutdown)
        await asyncio.to_thread(self._helpers.shutdown, cancel_futures=True)

    def snapshot(self) -> EngineSnapshot:
        pool = self._scheduler.pool
        return EngineSnapshot(
            num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting,
            blocks_free=pool.num_free,
            blocks_cached=pool.num_cached,
            blocks_live=pool.num_live,
            blocks_total=pool.num_total,
        )

    def waiting_by_reason(self) -> dict[str, int]:
        """Looks at every request that waits: for a scrape, not for every step."""
        return self._scheduler.waiting_by_reason()

    async def run_off_loop(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run text work (tokenizing, templates) on a helper thread, context variables included."""
        context = contextvars.copy_context()

        def call() -> T:
            return context.run(function, *args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._helpers, call)

    # ---- requests ------------------------------------------------------------------------

    def submit(self, request: Request) -> RequestStream:
        """Queue a request. RequestError 429 when the queue is full, 503 when the engine is dead."""
        if self.error is not None or self._stopping:
            why = self.error or "it is shutting down"
            raise RequestError(f"the engine is not running: {why}", code="engine_dead", status=503)
        if self._scheduler.num_waiting >= self.config.max_waiting:
            raise RequestError(
                f"{self._scheduler.num_waiting} requests wait already, the limit is "
                f"{self.config.max_waiting} (--max-waiting): try again later",
                code="queue_full",
                status=429,
            )
        if request.request_id in self._seq_ids:
            raise ValueError(f"request id {request.request_id} is already running")
        decoder = self.tokenizer.stream_decoder(
            skip_special_tokens=request.params.skip_special_tokens
        )
        stream = RequestStream(request.request_id, lambda: self.abort(request.request_id))
        seq = self._scheduler.add(request)
        self._live[seq.seq_id] = LiveRequest(
            request, seq, OutputProcessor(request, decoder), stream, self._waits
        )
        self._seq_ids[request.request_id] = seq.seq_id
        self._wake.set()
        return stream

    def abort(self, request_id: str) -> None:
        """Stop a request wherever it is, before the next step; unknown or finished ids are fine."""
        if request_id in self._seq_ids:
            self._aborted.add(request_id)
            self._wake.set()

    # ---- the loop ------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while not self._stopping:
                self._apply_aborts()
                if not self._scheduler.has_work:
                    self._deliver()
                    self._scheduler.check()  # nothing is lost: milliseconds, while nobody waits
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                await self._step()
        except Exception as error:  # the engine must never die silently
            self.error = f"{type(error).__name__}: {error}"
            self._log.exception("engine_failed")
            self._end_all("error", "the engine failed while this request was running")

    async def _step(self) -> None:
        plan_start = time.time()
        plan = self._scheduler.plan()
        num_preempted = self._scheduler.num_preempted_last
        planned = (plan_start, time.time())
        self._check_progress(plan)
        self._note_planned(plan, planned[1], num_preempted)
        context = contextvars.copy_context()
        loop = asyncio.get_running_loop()

        def forward_begins() -> None:
            loop.call_soon_threadsafe(self._deliver)

        try:
            result = await loop.run_in_executor(
                self._worker, context.run, self._runner.execute, plan, forward_begins
            )
        except Exception as error:
            now = time.time()
            timings = StepTimings(
                draft_start=planned[1], forward_start=planned[1], verify_start=now, end=now
            )
            self._record_step(plan, timings, [], planned, num_preempted, error=repr(error))
            raise
        self._apply_aborts()
        rows = [
            record
            for row, row_result in zip(plan.rows, result.rows, strict=True)
            if (record := self._commit_row(row, row_result, result)) is not None
        ]
        self._scheduler.note_guesses(
            sum(
                row_result.num_draft_tokens
                for row, row_result in zip(plan.rows, result.rows, strict=True)
                if row.request.drafter == "auto"
            )
        )
        self._record_step(plan, result.timings, rows, planned, num_preempted, result=result)

    def _deliver(self) -> None:
        """Hand out the last step's tokens: while the next forward runs, or when there is none.

        At once, the handlers' Python would hold the interpreter while the worker waits to begin.
        """
        outbox, self._outbox = self._outbox, []
        for stream, chunk in outbox:
            stream.put(chunk)

    def _check_progress(self, plan: BatchPlan) -> None:
        """An empty plan is a plan (all were preempted); several in a row mean a deadlock."""
        self._num_empty_plans = 0 if plan.rows else self._num_empty_plans + 1
        if self._num_empty_plans > 2:
            raise EngineError("the scheduler found nothing to run three times although work waits")

    def _note_planned(self, plan: BatchPlan, now: float, num_preempted: int) -> None:
        for row in plan.rows:
            self._live[row.seq_id].on_scheduled(now)
        self._waits.planned(self._scheduler.blocked_by, now)
        if num_preempted:
            for seq_id in plan.released:
                if seq_id in self._live:
                    self._live[seq_id].on_preempted(now)

    def _commit_row(
        self, row: RowPlan, row_result: RowResult, result: StepResult
    ) -> RowRecord | None:
        live = self._live.get(row.seq_id)
        if live is None:
            return None  # aborted while the step ran
        if row_result.error is not None:
            self._finish(live, [], row_result, "error", error=row_result.error)
            return None
        timings = result.timings
        try:
            kept, stop, record = live.on_row(row, row_result, timings.draft_start, timings.end)
        except Exception as error:  # one request's text work must not end the others
            with bound_request(row.request.request_id, row.request.traceparent):
                self._log.exception("commit_failed")
            why = f"its output could not be processed: {type(error).__name__}"
            self._finish(live, [], None, "error", error=why)
            return None
        self._scheduler.commit_row(row, kept, row_result.draft_kv_lens)
        if stop is not None:
            self._finish(live, kept, row_result, stop.finish_reason, stop_reason=stop.stop_reason)
        elif kept:
            self._outbox.append((live.stream, live.chunk(kept, row_result)))
        return record

    def _record_step(
        self,
        plan: BatchPlan,
        timings: StepTimings,
        rows: list[RowRecord],
        planned: tuple[float, float],
        num_preempted: int,
        *,
        result: StepResult | None = None,
        error: str | None = None,
    ) -> None:
        now = self.snapshot()
        self._recorder.record_step(
            StepRecord(
                step_idx=plan.step_idx,
                plan_start=planned[0],
                plan_end=planned[1],
                draft_start=timings.draft_start,
                forward_start=timings.forward_start,
                verify_start=timings.verify_start,
                verify_end=timings.end,
                commit_end=time.time(),
                rows=tuple(rows),
                num_running=now.num_running,
                num_waiting=now.num_waiting,
                blocks_free=now.blocks_free,
                blocks_cached=now.blocks_cached,
                blocks_live=now.blocks_live,
                token_budget=self.config.max_num_batched_tokens,
                num_preempted=num_preempted,
                error=error,
                predicted_seconds=result.predicted_seconds if result else 0.0,
                failed_drafters=result.failed_drafters if result else (),
                speculation_seconds=result.speculation_seconds if result else 0.0,
            )
        )

    # ---- endings -------------------------------------------------------------------------

    def _apply_aborts(self) -> None:
        aborted, self._aborted = self._aborted, set()
        for request_id in aborted:
            seq_id = self._seq_ids.get(request_id)
            if seq_id is not None:
                self._finish(self._live[seq_id], [], None, "abort")

    def _end_all(self, reason: FinishReason, error: str | None) -> None:
        for live in list(self._live.values()):
            self._finish(live, [], None, reason, error=error)
        self._deliver()

    def _finish(
        self,
        live: LiveRequest,
        token_ids: list[int],
        result: RowResult | None,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> None:
        now = time.time()
        self._scheduler.finish(live.seq)
        del self._live[live.seq.seq_id]
        del self._seq_ids[live.request.request_id]
        last = live.last_chunk(token_ids, result, reason, now, stop_reason=stop_reason, error=error)
        self._outbox.append((live.stream, last))
        self._recorder.record_request(live.record(self.model_name, reason, now, error))

"""Counters of one engine. families.py says what they are called outside.

Plain ints with one writer each: the event loop, except where a comment names the thread. What a
step did is counted when it is committed, what a request took when it ends. Series exist at 0 from
the start, and label values are bounded: a drafter or traffic class that was not announced counts as
`other`, and a position past the largest K counts nowhere.

Rejected: prometheus_client. An increment through a label costs 2.5 us against 0.1 us here, and a
step of 8 rows makes about 40 of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from .context import parse_traceparent
from .histogram import Histogram
from .http_counters import HttpCounters
from .net_gain import NetGain
from .records import RequestRecord, RowRecord, StepRecord

FINISH_REASONS: Final = ("stop", "length", "abort", "error")
WAIT_REASONS: Final = ("admission", "token_budget", "kv_capacity", "preempted")
PHASES: Final = ("plan", "draft", "target_forward", "verify", "commit")
OTHER: Final = "other"
DEFAULT_CLASS: Final = "default"  # of requests that belong to no traffic class

# Seconds. The first follows the gen_ai.server.* histograms, the second spans one decode step on a
# laptop, the third a step's phases from microseconds of planning to seconds of prefill.
_TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 10.0)
_ITL_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
_PHASE_BOUNDS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_E2E_BOUNDS = (0.01, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
# Tokens, rows, and a ratio.
_LENGTH_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000)
_ROWS_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_RATIO_BOUNDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """What is true at the moment of a scrape. waiting: sequences by WAIT_REASONS"""

    num_running: int
    waiting: Mapping[str, int]
    blocks_free: int
    blocks_cached: int
    blocks_live: int
    engine_up: bool

    @property
    def num_waiting(self) -> int:
        return sum(self.waiting.values())

    @property
    def blocks_total(self) -> int:
        return self.blocks_free + self.blocks_cached + self.blocks_live


class SpecCounters:
    """One drafter's rows that had guesses.

    Rows are counted by how many guesses they had, how many were accepted and how many tokens came
    out; "accepted at position i" is then the number of rows with more than i, summed only when
    scraped.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        self._max_draft_tokens = max_draft_tokens
        self.num_drafted = 0
        self.num_accepted = 0
        self.num_emitted = 0
        self.num_failures = 0
        self.predicted_accepted = 0.0
        self.rows_by_drafted = [0] * (max_draft_tokens + 1)  # [K+1]
        self.rows_by_accepted = [0] * (max_draft_tokens + 1)  # [K+1]
        self.emitted = Histogram(range(max_draft_tokens + 2))

    def add(self, row: RowRecord) -> None:
        drafted, accepted, emitted = (
            row.num_draft_tokens,
            row.num_accepted_tokens,
            row.num_emitted_tokens,
        )
        self.num_drafted += drafted
        self.num_accepted += accepted
        self.num_emitted += emitted
        self.predicted_accepted += row.predicted_accepted
        last = self._max_draft_tokens
        self.rows_by_drafted[drafted if drafted < last else last] += 1
        self.rows_by_accepted[accepted if accepted < last else last] += 1
        self.emitted.count(emitted)

    @property
    def num_steps(self) -> int:
        return sum(self.rows_by_drafted)

    @property
    def num_wasted(self) -> int:
        return self.num_drafted - self.num_accepted


class RequestCounters:
    """Ended sequences of one traffic class."""

    def __init__(self) -> None:
        self.num_finished = dict.fromkeys(FINISH_REASONS, 0)
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.prompt_tokens = Histogram(_LENGTH_BOUNDS)
        self.output_tokens = Histogram(_LENGTH_BOUNDS)
        self.acceptance_ratio = Histogram(_RATIO_BOUNDS)
        self.time_to_first_token = Histogram(_TTFT_BOUNDS)
        self.inter_token_latency = Histogram(_ITL_BOUNDS)
        self.inter_chunk_latency = Histogram(_ITL_BOUNDS)
        self.time_per_output_token = Histogram(_ITL_BOUNDS)
        self.request_duration = Histogram(_E2E_BOUNDS)
        self.queue = Histogram(_TTFT_BOUNDS)
        self.prefill = Histogram(_TTFT_BOUNDS)
        self.decode = Histogram(_E2E_BOUNDS)
        self.inference = Histogram(_E2E_BOUNDS)

    def add(self, request: RequestRecord) -> None:
        reason = request.finish_reason if request.finish_reason in FINISH_REASONS else "error"
        self.num_finished[reason] += 1
        self.num_prompt_tokens += request.num_prompt_tokens
        self.num_cached_tokens += request.num_cached_tokens
        self.prompt_tokens.observe(request.num_prompt_tokens)
        self.output_tokens.observe(request.num_output_tokens)
        if request.num_draft_tokens:
            ratio = request.num_accepted_draft_tokens / request.num_draft_tokens
            self.acceptance_ratio.observe(ratio)
        self._add_times(request)

    def _add_times(self, request: RequestRecord) -> None:
        trace_id, at = _sampled_trace(request.traceparent), request.finished
        if request.first_token is not None:
            ttft = request.first_token - request.arrival
            self.time_to_first_token.observe(ttft, trace_id=trace_id, at=at)
            decode = request.finished - request.first_token
            self.decode.observe(decode)
            if request.num_output_tokens > 1:
                tpot = decode / (request.num_output_tokens - 1)
                self.time_per_output_token.observe(tpot, trace_id=trace_id, at=at)
            if request.queue:
                self.prefill.observe(request.first_token - request.queue[0].end)
                self.inference.observe(request.finished - request.queue[0].end)
        self.inter_token_latency.observe_many(request.inter_token_seconds, trace_id=trace_id, at=at)
        self.inter_chunk_latency.observe_many(request.inter_chunk_seconds, trace_id=trace_id, at=at)
        duration = request.finished - request.arrival
        self.request_duration.observe(duration, trace_id=trace_id, at=at)
        queued = sum(stay.end - stay.start for stay in request.queue)
        self.queue.observe(queued, trace_id=trace_id, at=at)


class Metrics:
    """drafters: names announced at start, as in `--drafters` (what follows a colon is dropped);
    max_draft_tokens: the largest K a request may ask for, bounds the label `position`;
    traffic_classes: names announced at start, beside `default`.
    """

    def __init__(
        self,
        *,
        drafters: Sequence[str] = (),
        max_draft_tokens: int = 15,
        traffic_classes: Sequence[str] = (),
    ) -> None:
        names = dict.fromkeys(_drafter_label(name) for name in drafters if name != "none")
        self.spec = {name: SpecCounters(max_draft_tokens) for name in (*names, OTHER)}
        self._spec_of_row = dict(self.spec)  # row's spelling of the name -> its counters
        classes = (DEFAULT_CLASS, *traffic_classes, OTHER) if traffic_classes else (DEFAULT_CLASS,)
        self.requests = {name: RequestCounters() for name in classes}
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_generated_tokens = 0
        self.row_draft_tokens = Histogram(range(max_draft_tokens + 1))
        self.step_rows = Histogram(_ROWS_BOUNDS)
        self.net_gain = NetGain()
        self.http = HttpCounters()
        self.phases = {phase: Histogram(_PHASE_BOUNDS) for phase in PHASES}
        self.num_records_dropped = 0  # steps and requests that span building never saw
        self.num_step_spans_sampled_out = 0  # written by the drain thread
        self.num_spans_dropped_at_queue = 0  # written by the drain thread
        self.num_spans_dropped_at_export = 0  # written by the export thread

    def add_step(self, step: StepRecord) -> None:
        self.num_steps += 1
        self.num_preemptions += step.num_preempted
        phases = self.phases
        phases["plan"].observe(step.plan_end - step.plan_start)
        phases["draft"].observe(step.forward_start - step.draft_start)
        phases["target_forward"].observe(step.verify_start - step.forward_start)
        phases["verify"].observe(step.verify_end - step.verify_start)
        phases["commit"].observe(step.commit_end - step.verify_end)
        for name in step.failed_drafters:
            self._counters_of(name).num_failures += 1
        self.step_rows.observe(len(step.rows))
        num_emitted, has_prompt = 0, False
        for row in step.rows:
            num_emitted += row.num_emitted_tokens
            if row.is_prefill:
                has_prompt = True
            else:
                self.row_draft_tokens.count(row.num_draft_tokens)
            if row.num_draft_tokens:
                counters = self._spec_of_row.get(row.drafter)
                (counters or self._counters_of(row.drafter)).add(row)
        self.num_generated_tokens += num_emitted
        if not has_prompt:
            self.net_gain.add(step, num_emitted)

    def add_request(self, request: RequestRecord) -> None:
        mine = self.requests.get(request.traffic_class)
        (mine or self.requests.get(OTHER) or self.requests[DEFAULT_CLASS]).add(request)

    @property
    def num_spans_dropped(self) -> int:
        return self.num_spans_dropped_at_queue + self.num_spans_dropped_at_export

    def _counters_of(self, drafter: str) -> SpecCounters:
        return self.spec.get(_drafter_label(drafter), self.spec[OTHER])


def _drafter_label(name: str) -> str:
    """`synthetic:0.8,0.6` is the drafter `synthetic`: parameters would make labels without end."""
    return name.partition(":")[0]


def _sampled_trace(traceparent: str | None) -> str:
    """The id of a trace that is kept, in hex; else empty."""
    context = None if traceparent is None else parse_traceparent(traceparent)
    if context is None or not context.trace_flags.sampled:
        return ""
    return f"{context.trace_id:032x}"

"""`specserve study capacity`: the highest load at which enough requests keep their limits.

An open loop, so that a server that falls behind meets the next request all the same, and latencies
count from when a request should have left. The rate doubles until too few requests are good, then
the gap between the last rate that held and the first that did not is halved (on a log scale) until
it is narrow. Whether a level holds is decided by its share of good requests; its interval says how
sure that is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from specserve_loadgen import latency
from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.goodput import broken_limits, goodput
from specserve_loadgen.intervals import Interval, mean_interval, quantile_interval
from specserve_loadgen.prompts import Prompt
from specserve_loadgen.report import environment
from specserve_loadgen.run import RunResult, run_load
from specserve_loadgen.settings import OpenLoop, Settings, Slo
from specserve_loadgen.stats import percentile
from specserve_loadgen.studies.arms import Arm
from specserve_loadgen.studies.base import Study
from specserve_loadgen.studies.cells import Cell, Target, block_settings

SCHEMA: Final = "specserve.study.capacity/1"
LATE_SECONDS: Final = 0.05  # the client's own lateness (p99) above which a level proves nothing


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """share: of requests that must be good; precision: the gap that is narrow enough, as a factor;
    num_requests: of each level; seconds: no level begins after so many"""

    target: Target
    arm: Arm
    slo: Slo
    share: float = 0.9
    first_rate: float = 1.0
    most_rate: float = 1000.0
    precision: float = 1.1
    num_requests: int = 60
    temperature: float | None = None
    prompts_file: str | None = None
    seconds: float | None = None


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One rate that was tried. rate: as asked for, requests/s; good: share of requests that kept
    all limits; broken: requests over each limit"""

    rate: float
    good: Interval
    good_per_second: float
    output_tokens_per_second: float
    ttft_p50: Interval | None
    ttft_p99: Interval | None
    broken: dict[str, int]
    holds: bool
    late_seconds: float  # of this client itself, p99


class CapacityStudy(Study[Plan], frozen=True, kw_only=True):
    """capacity: the highest rate that held; None: not even the lowest tried; first_failing: the
    lowest rate that did not; None: every rate held"""

    capacity: float | None
    first_failing: float | None
    interrupted: bool
    levels: tuple[Level, ...]  # by rate
    notes: tuple[str, ...]


async def run_capacity(
    plan: Plan, prompts: Sequence[Prompt], say: Callable[[str], None], api_key: str | None = None
) -> CapacityStudy:
    started_at, began = time.time(), time.perf_counter()
    levels: list[Level] = []
    result: RunResult | None = None
    interrupted = False
    while (rate := next_rate(plan, levels)) is not None:
        if levels and plan.seconds is not None and time.perf_counter() - began > plan.seconds:
            break
        result = await run_load(_settings(plan, rate, len(levels)), prompts, api_key=api_key)
        if result.interrupted:
            interrupted = True
            break
        levels.append(_level(plan, rate, result))
        say(describe(levels[-1]))
    if result is None or not levels:
        raise LoadgenError("stopped before one rate was measured: nothing to report")
    low, high = bounds_of(levels)
    return CapacityStudy(
        schema=SCHEMA,
        started_at=started_at,
        seconds=time.perf_counter() - began,
        environment=environment(),
        plan=plan,
        model=result.model,
        server_version=result.server_version,
        capacity=low,
        first_failing=high,
        interrupted=interrupted,
        levels=tuple(sorted(levels, key=lambda level: level.rate)),
        notes=tuple(_notes(levels)),
    )


def bounds_of(levels: Sequence[Level]) -> tuple[float | None, float | None]:
    """(highest rate that held below any that failed, lowest that failed)"""
    high = min((level.rate for level in levels if not level.holds), default=None)
    held = [level.rate for level in levels if level.holds and (high is None or level.rate < high)]
    return max(held, default=None), high


def next_rate(plan: Plan, levels: Sequence[Level]) -> float | None:
    """None: the answer is known as well as was asked for."""
    if not levels:
        return plan.first_rate
    low, high = bounds_of(levels)
    if high is None:
        assert low is not None  # each level is either
        return None if low >= plan.most_rate else min(2 * low, plan.most_rate)
    if low is None:
        return high / 2 if high / 2 >= plan.first_rate / 64 else None
    return None if high / low <= plan.precision else math.sqrt(low * high)


def _settings(plan: Plan, rate: float, level_idx: int) -> Settings:
    settings = block_settings(
        plan.target,
        plan.arm,
        Cell(plan.temperature, 1),
        level_idx,
        plan.num_requests,
        0,
        "capacity",
    )
    return msgspec.structs.replace(
        settings,
        load=OpenLoop(rate),
        warmup=4 if not level_idx else 0,
        keep_output=False,
        slo=plan.slo,
    )


def _level(plan: Plan, rate: float, result: RunResult) -> Level:
    records = result.records
    starts = [r.sent if r.scheduled is None else r.scheduled for r in records]
    seconds = max(r.ended for r in records) - min(starts)
    counted = goodput(records, plan.slo, seconds)
    good = mean_interval([float(not broken_limits(r, plan.slo)) for r in records], is_share=True)
    assert good is not None  # there is at least one request
    ttfts = [v for r in records if (v := latency.ttft_from_schedule(r)) is not None]
    late = sorted(v for r in records if (v := latency.dispatch_delay(r)) is not None)
    return Level(
        rate=rate,
        good=good,
        good_per_second=counted.num_good / seconds,
        output_tokens_per_second=sum(r.num_output_tokens for r in records) / seconds,
        ttft_p50=quantile_interval(ttfts, 0.5),
        ttft_p99=quantile_interval(ttfts, 0.99),
        broken=counted.broken,
        holds=good.estimate >= plan.share,
        late_seconds=percentile(late, 0.99) if late else 0.0,
    )


def describe(level: Level) -> str:
    verdict = "holds" if level.holds else "too few"
    return f"{level.rate:.3g} requests/s: {level.good.estimate:.1%} good, {verdict}"


def _notes(levels: Sequence[Level]) -> list[str]:
    late = [level for level in levels if level.late_seconds > LATE_SECONDS]
    if not late:
        return []
    worst = max(late, key=lambda level: level.late_seconds)
    return [
        f"this client was late itself in {len(late)} of {len(levels)} levels (p99 "
        f"{worst.late_seconds * 1e3:.0f} ms at {worst.rate:.3g} requests/s): latencies include "
        "it, so the server may carry more"
    ]

"""`specserve loadgen --sweep`: 1, 2, 4, ... users, until more users bring no more tokens.

Speed is counted while every user is busy, from the first send of a level to its last: behind that
users leave one by one, and a level of many users would look slower than it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from specserve_loadgen import latency
from specserve_loadgen.client import Client
from specserve_loadgen.engines import KNOW_CACHE_SALTS
from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.goodput import broken_limits
from specserve_loadgen.intervals import Interval, mean_interval, quantile_interval, ratio_interval
from specserve_loadgen.prompt import Prompt
from specserve_loadgen.records import RequestRecord
from specserve_loadgen.report import Environment, environment, make_report
from specserve_loadgen.run import RunResult, run_load
from specserve_loadgen.settings import ClosedLoop, Settings

SCHEMA: Final = "specserve.loadgen.sweep/1"
ENOUGH: Final = 1.05  # a level that brings less than this factor more tokens ends the sweep
REQUESTS_PER_USER: Final = 4  # at least, where no duration is given
NUM_SLICES: Final = 10  # of a level's time: its speed varies over them


class SweepLevel(msgspec.Struct, frozen=True, kw_only=True):
    """tokens_per_second: while every user was busy; good: share that kept all limits; None: none
    were set"""

    users: int
    num_requests: int
    num_failed: int
    tokens_per_second: Interval | None
    ttft_p50: Interval | None
    ttft_p99: Interval | None
    itl: Interval | None  # seconds per token after the first, pooled
    good: Interval | None
    warnings: tuple[str, ...]


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """saturated_at: the fewest users that give within 5 % of the most tokens/s; None: it still rose
    at the last level"""

    schema: str
    started_at: float
    seconds: float
    environment: Environment
    settings: Settings
    most_users: int
    model: str
    server_version: str | None
    saturated_at: int | None
    interrupted: bool
    levels: tuple[SweepLevel, ...]
    notes: tuple[str, ...]


async def run_sweep(
    settings: Settings,
    most_users: int,
    prompts: Sequence[Prompt],
    say: Callable[[str], None],
    api_key: str | None = None,
) -> Sweep:
    """Ctrl-C ends it after the levels that are complete. LoadgenError: not even one is."""
    started_at, began = time.time(), time.perf_counter()
    engine = await _engine(settings, api_key)
    levels: list[SweepLevel] = []
    result: RunResult | None = None
    interrupted = False
    users = 1
    while users <= most_users and not is_saturated(levels):
        asked = _level_settings(settings, users, len(prompts), engine)
        result = await run_load(asked, prompts, api_key=api_key)
        if result.interrupted:
            interrupted = True
            break
        levels.append(_level(asked, users, result))
        say(describe(levels[-1]))
        if levels[-1].num_failed == levels[-1].num_requests:
            break  # more users will not help it
        users *= 2
    if result is None or not levels:
        raise LoadgenError("stopped before one level was measured: nothing to report")
    return Sweep(
        schema=SCHEMA,
        started_at=started_at,
        seconds=time.perf_counter() - began,
        environment=environment(),
        settings=settings,
        most_users=most_users,
        model=result.model,
        server_version=result.server_version,
        saturated_at=_saturated_at(levels) if is_saturated(levels) else None,
        interrupted=interrupted,
        levels=tuple(levels),
        notes=tuple(_notes(levels, engine)),
    )


async def _engine(settings: Settings, api_key: str | None) -> str:
    async with Client(settings, api_key, time.perf_counter) as client:
        await client.find_model()
        return client.engine


def is_saturated(levels: Sequence[SweepLevel]) -> bool:
    """The last level brought hardly more tokens than the best before it."""
    *before, last = [_speed(level) for level in levels] or [0.0]
    return bool(before) and last < ENOUGH * max(before)


def _saturated_at(levels: Sequence[SweepLevel]) -> int:
    most = max(_speed(level) for level in levels)
    return next(level.users for level in levels if ENOUGH * _speed(level) >= most)


def _speed(level: SweepLevel) -> float:
    return 0.0 if level.tokens_per_second is None else level.tokens_per_second.estimate


def _level_settings(settings: Settings, users: int, num_prompts: int, engine: str) -> Settings:
    fewest = max(settings.num_requests or num_prompts, REQUESTS_PER_USER * users)
    return msgspec.structs.replace(
        settings,
        load=ClosedLoop(users),
        num_requests=fewest if settings.duration is None else None,
        # The same prompts again: a prefix cached by the level before would be an unfair start.
        cache_salt=f"sweep/{settings.seed}/{users}" if engine in KNOW_CACHE_SALTS else None,
        warmup=settings.warmup if users == 1 else 0,
    )


def _level(settings: Settings, users: int, result: RunResult) -> SweepLevel:
    report = make_report(settings, result)
    done = [r for r in result.records if r.succeeded]
    ttfts = [value for r in done if (value := latency.ttft(r)) is not None]
    gaps = [latency.itl_per_token(r) for r in done]
    slo = settings.slo
    good = [] if slo is None else [float(not broken_limits(r, slo)) for r in result.records]
    return SweepLevel(
        users=users,
        num_requests=report.num_requests,
        num_failed=report.num_failed,
        tokens_per_second=busy_speed(result.records),
        ttft_p50=quantile_interval(ttfts, 0.5),
        ttft_p99=quantile_interval(ttfts, 0.99),
        itl=ratio_interval([sum(g) for g in gaps], [len(g) for g in gaps]),
        good=mean_interval(good, is_share=True) if good else None,
        warnings=report.warnings,
    )


def busy_speed(records: Sequence[RequestRecord]) -> Interval | None:
    """Tokens per second from the first send to the last, over equal slices of that time.

    None: all were sent at once, so at no time was it known that every user was busy
    """
    began = min((r.sent for r in records), default=0.0)
    seconds = (max((r.sent for r in records), default=0.0) - began) / NUM_SLICES
    if seconds <= 0:
        return None
    tokens = [0] * NUM_SLICES
    for record in records:
        for chunk in record.chunks:
            slice_idx = int((chunk.seconds - began) / seconds)
            if slice_idx < NUM_SLICES:
                tokens[slice_idx] += chunk.num_tokens
    return ratio_interval(tokens, [seconds] * NUM_SLICES)


def describe(level: SweepLevel) -> str:
    failed = f", {level.num_failed} failed" if level.num_failed else ""
    shown = "?" if level.tokens_per_second is None else f"{_speed(level):.1f}"
    who = "1 user" if level.users == 1 else f"{level.users} users"
    return f"{who}: {shown} output tokens/s{failed}"


def _notes(levels: Sequence[SweepLevel], engine: str) -> list[str]:
    notes = [f"{level.users} users: {warning}" for level in levels for warning in level.warnings]
    if engine not in KNOW_CACHE_SALTS:
        notes.append(
            "each level sent the same prompts, and this server was not told to keep them apart: "
            "with a prefix cache later levels start faster"
        )
    return notes

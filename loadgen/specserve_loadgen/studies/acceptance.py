"""`specserve study acceptance`: how long are accepted runs, where, and what does that buy?

Drafter x K x temperature x load, over prompts of several categories, and without speculation
beside them: the speed-up is over the same prompts and seeds in the same minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import product

import msgspec

from specserve_loadgen import latency
from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.intervals import (
    Interval,
    paired_ratio_interval,
    quantile_interval,
    ratio_interval,
)
from specserve_loadgen.prompts import Prompt
from specserve_loadgen.records import RequestRecord
from specserve_loadgen.report import Environment, environment
from specserve_loadgen.studies.arms import OFF, Arm
from specserve_loadgen.studies.cells import (
    BlockRun,
    Cell,
    StudyRequest,
    Target,
    blocks_of,
    check_arms,
    chosen_prompts,
    rotated,
    run_block,
    study_requests,
)
from specserve_loadgen.studies.summary import Summary, by_category, by_context, summarise
from specserve_loadgen.studies.watch import KWindow, Watch, watching

SCHEMA = "specserve.study.acceptance/1"


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """arms: the baseline first; per_category: at most so many prompts of each; None: all

    seconds: no block but the first begins after so many; None: until every prompt was asked
    """

    target: Target
    arms: tuple[Arm, ...]
    temperatures: tuple[float | None, ...] = (0.0,)
    concurrencies: tuple[int, ...] = (1,)
    prompts_file: str | None = None
    categories: tuple[str, ...] = ()
    per_category: int | None = None
    block_size: int = 8
    seconds: float | None = None

    def cells(self) -> list[Cell]:
        return [Cell(t, c) for t, c in product(self.temperatures, self.concurrencies)]


class Group(msgspec.Struct, frozen=True):
    """Some of a cell's requests: of one category, or of prompts of similar length."""

    label: str
    summary: Summary


class CellResult(msgspec.Struct, frozen=True, kw_only=True):
    """One arm at one temperature and load.

    speed_up:      output tokens per second over the baseline's, geometric mean of paired blocks
    num_different: replies whose tokens are not the baseline's; None: not compared
    phases:        seconds of the server's steps by phase; {}: not told
    """

    arm: Arm
    temperature: float | None
    concurrency: int
    num_blocks: int
    summary: Summary
    categories: tuple[Group, ...]
    contexts: tuple[Group, ...]
    tokens_per_second: Interval | None
    speed_up: Interval | None
    ttft_p50: Interval | None
    ttft_p99: Interval | None
    itl: Interval | None  # seconds per token after the first, pooled
    e2e_p50: Interval | None
    num_different: int | None
    phases: dict[str, float]


class AcceptanceStudy(msgspec.Struct, frozen=True, kw_only=True):
    schema: str
    started_at: float  # time.time()
    seconds: float
    environment: Environment
    plan: Plan
    model: str
    server_version: str | None
    num_prompts: int  # that there were
    num_asked: int  # that every arm was asked
    interrupted: bool
    cells: tuple[CellResult, ...]
    windows: tuple[KWindow, ...]
    requests: tuple[StudyRequest, ...]
    notes: tuple[str, ...]
    failure: str | None = None  # the request that ended it early; what is here came before


async def run_acceptance(
    plan: Plan, say: Callable[[str], None], api_key: str | None = None
) -> AcceptanceStudy:
    """Ctrl-C, or the end of its seconds, ends it after the blocks that are complete."""
    prompts = chosen_prompts(plan.prompts_file, plan.categories, plan.per_category)
    started_at, began = time.time(), time.perf_counter()
    await check_arms(plan.target, plan.arms, prompts, api_key)
    runs: list[BlockRun] = []
    interrupted = False
    failure: str | None = None
    blocks = blocks_of(prompts, plan.block_size)
    num_asked = 0
    async with watching(plan.target.url, api_key) as watch:
        await _warm_up(plan, blocks[0], api_key)
        for block_idx, block in enumerate(blocks):
            if runs and plan.seconds is not None and time.perf_counter() - began > plan.seconds:
                break
            try:
                found = await _run_all(plan, block_idx, block, num_asked, watch, api_key)
            except LoadgenError as error:
                if not runs:
                    raise
                failure = str(error)  # what is complete is worth showing
                break
            if any(run.interrupted for run in found):
                interrupted = True
                break
            runs += found
            num_asked += len(block)
            say(f"{num_asked} of {len(prompts)} prompts, {time.perf_counter() - began:.0f} s")
    if not runs:
        raise LoadgenError("stopped before one block of prompts was through: nothing to report")
    return AcceptanceStudy(
        schema=SCHEMA,
        started_at=started_at,
        seconds=time.perf_counter() - began,
        environment=environment(),
        plan=plan,
        model=runs[0].model,
        server_version=runs[0].server_version,
        num_prompts=len(prompts),
        num_asked=num_asked,
        interrupted=interrupted,
        cells=tuple(_results(plan, runs)),
        windows=tuple(watch.windows),
        requests=tuple(row for run in runs for row in study_requests(run, _baseline(run, runs))),
        notes=tuple(_notes(plan, runs, watch, num_asked, len(prompts))),
        failure=failure,
    )


async def _warm_up(plan: Plan, block: Sequence[Prompt], api_key: str | None) -> None:
    for arm in plan.arms:
        cell = Cell(plan.temperatures[0], max(plan.concurrencies))
        await run_block(
            plan.target, arm, cell, -1, block[:2], first_idx=0, api_key=api_key, salt="warm-up"
        )


async def _run_all(
    plan: Plan,
    block_idx: int,
    block: Sequence[Prompt],
    first_idx: int,
    watch: Watch,
    api_key: str | None,
) -> list[BlockRun]:
    """The block in every cell by every arm; it ends early with a run that was interrupted."""
    runs: list[BlockRun] = []
    for cell in plan.cells():
        for arm in rotated(plan.arms, block_idx):
            watch.label = arm.name
            run = await run_block(
                plan.target, arm, cell, block_idx, block, first_idx=first_idx, api_key=api_key
            )
            runs.append(run)
            if run.interrupted:
                return runs
    return runs


def _baseline(run: BlockRun, runs: Sequence[BlockRun]) -> BlockRun | None:
    """The same block without speculation; None for the baseline itself and where there is none."""
    if run.arm == OFF:
        return None
    return next(
        (
            other
            for other in runs
            if (other.arm, other.cell, other.block_idx) == (OFF, run.cell, run.block_idx)
        ),
        None,
    )


def _results(plan: Plan, runs: Sequence[BlockRun]) -> list[CellResult]:
    return [
        _result(arm, cell, [run for run in runs if run.arm == arm and run.cell == cell], runs)
        for cell in plan.cells()
        for arm in plan.arms
    ]


def _result(arm: Arm, cell: Cell, mine: Sequence[BlockRun], runs: Sequence[BlockRun]) -> CellResult:
    records = [record for run in mine for record in run.records]
    compared = [(run, base) for run in mine if (base := _baseline(run, runs)) is not None]
    rows = [row for run, base in compared for row in study_requests(run, base)]
    known = [row for row in rows if row.same_output is not None]
    phases: dict[str, float] = {}
    for run in mine:
        for name, seconds in run.phases.items():
            phases[name] = phases.get(name, 0.0) + seconds
    ttfts = [value for r in records if (value := latency.ttft(r)) is not None]
    return CellResult(
        arm=arm,
        temperature=cell.temperature,
        concurrency=cell.concurrency,
        num_blocks=len(mine),
        summary=summarise(records),
        categories=tuple(Group(*group) for group in by_category(records)),
        contexts=tuple(Group(*group) for group in by_context(records)),
        tokens_per_second=ratio_interval(
            [run.num_output_tokens for run in mine], [run.seconds for run in mine]
        ),
        speed_up=paired_ratio_interval(
            [run.tokens_per_second for run, _ in compared],
            [base.tokens_per_second for _, base in compared],
        ),
        ttft_p50=quantile_interval(ttfts, 0.5),
        ttft_p99=quantile_interval(ttfts, 0.99),
        itl=_pooled_itl(records),
        e2e_p50=quantile_interval([latency.e2e(r) for r in records], 0.5),
        num_different=sum(not row.same_output for row in known) if known else None,
        phases=phases,
    )


def _pooled_itl(records: Sequence[RequestRecord]) -> Interval | None:
    gaps = [latency.itl_per_token(r) for r in records]
    return ratio_interval([sum(values) for values in gaps], [len(values) for values in gaps])


def _notes(
    plan: Plan, runs: Sequence[BlockRun], watch: Watch, num_asked: int, num_prompts: int
) -> list[str]:
    notes = []
    if num_asked < num_prompts:
        notes.append(f"stopped after {num_asked} of {num_prompts} prompts; every arm had the same")
    if not any(run.phases for run in runs):
        notes.append("the server tells no step phases (/metrics): where its time went is unknown")
    if not watch.windows:
        notes.append("the server tells no events (/specserve/events): K over time is unknown")
    if OFF not in plan.arms:
        notes.append("no arm without speculation: no speed-up, and texts were not compared")
    spec = [r.speculative for run in runs for r in run.records if r.speculative is not None]
    if not spec:
        notes.append("the replies carry no speculation metrics: acceptance is unknown")
    elif any(s.per_step_drafted is None for s in spec):
        notes.append("the replies do not tell single steps: conditional rates are unknown")
    return notes

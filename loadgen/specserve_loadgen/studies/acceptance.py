"""`specserve study acceptance`: how long are accepted runs, where, and what does that buy?

Drafter x K x temperature x load, over prompts of several categories, and without speculation
beside them: the speed-up is over the same prompts and seeds in the same minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

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
from specserve_loadgen.report import environment
from specserve_loadgen.studies.arms import OFF, Arm
from specserve_loadgen.studies.base import Study
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
from specserve_loadgen.studies.resume import BlockFile, FinishedBlock
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


class AcceptanceStudy(Study[Plan], frozen=True, kw_only=True):
    num_prompts: int  # that there were
    num_asked: int  # that every arm was asked
    interrupted: bool
    cells: tuple[CellResult, ...]
    windows: tuple[KWindow, ...]
    requests: tuple[StudyRequest, ...]
    notes: tuple[str, ...]
    failure: str | None = None  # the request that ended it early; what is here came before


class _Progress(msgspec.Struct):
    """What is through so far, and why it went no further. One writer: `run_acceptance`."""

    runs: list[BlockRun] = []
    windows: list[KWindow] = []
    num_asked: int = 0
    seconds: float = 0.0  # in all, of earlier calls too
    interrupted: bool = False
    failure: str | None = None

    def add(self, block: FinishedBlock, num_prompts: int) -> None:
        self.runs += block.runs
        self.windows += block.windows
        self.seconds = block.seconds
        self.num_asked += num_prompts


async def run_acceptance(
    plan: Plan,
    say: Callable[[str], None],
    api_key: str | None = None,
    resume: Path | None = None,
) -> AcceptanceStudy:
    """Ctrl-C, or the end of its seconds, ends it after the blocks that are complete.

    resume: where finished blocks are kept; those that are there already are not asked again
    """
    prompts = chosen_prompts(plan.prompts_file, plan.categories, plan.per_category)
    blocks = blocks_of(prompts, plan.block_size)
    started_at = time.time()
    kept = BlockFile(resume, msgspec.structs.replace(plan, seconds=None), prompts)
    done = _Progress()
    finished = kept.read()
    for block, through in zip(blocks, finished, strict=False):
        done.add(through, len(block))
    if len(finished) < len(blocks):
        await check_arms(plan.target, plan.arms, prompts, api_key)
        await _ask(plan, blocks, len(finished), done, kept, say, api_key)
    if not done.runs:
        raise LoadgenError("stopped before one block of prompts was through: nothing to report")
    return AcceptanceStudy(
        schema=SCHEMA,
        started_at=started_at,
        seconds=done.seconds,
        environment=environment(),
        plan=plan,
        model=done.runs[0].model,
        server_version=done.runs[0].server_version,
        num_prompts=len(prompts),
        num_asked=done.num_asked,
        interrupted=done.interrupted,
        cells=tuple(_results(plan, done.runs)),
        windows=tuple(done.windows),
        requests=tuple(
            row for run in done.runs for row in study_requests(run, _baseline(run, done.runs))
        ),
        notes=tuple(_notes(plan, done, len(prompts))),
        failure=done.failure,
    )


async def _ask(
    plan: Plan,
    blocks: Sequence[Sequence[Prompt]],
    first_block: int,
    done: _Progress,
    kept: BlockFile,
    say: Callable[[str], None],
    api_key: str | None,
) -> None:
    """Every block from the first that is not through, until the end or what comes before it."""
    num_prompts = sum(len(block) for block in blocks)
    before, began = done.seconds, time.perf_counter()
    async with watching(plan.target.url, api_key, since=before) as watch:
        await _warm_up(plan, blocks[0], api_key)
        for block_idx, block in list(enumerate(blocks))[first_block:]:
            spent = time.perf_counter() - began
            if block_idx > first_block and plan.seconds is not None and spent > plan.seconds:
                break
            try:
                found = await _run_all(plan, block_idx, block, done.num_asked, watch, api_key)
            except LoadgenError as error:
                if not done.runs:
                    raise
                done.failure = str(error)  # what is complete is worth showing
                break
            if any(run.interrupted for run in found):
                done.interrupted = True
                break
            through = FinishedBlock(
                seconds=before + time.perf_counter() - began,
                runs=tuple(found),
                windows=tuple(watch.take_windows()),
            )
            kept.add(through)
            done.add(through, len(block))
            say(f"{done.num_asked} of {num_prompts} prompts, {done.seconds:.0f} s")


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


def _notes(plan: Plan, done: _Progress, num_prompts: int) -> list[str]:
    notes = []
    if done.num_asked < num_prompts:
        notes.append(
            f"stopped after {done.num_asked} of {num_prompts} prompts; every arm had the same"
        )
    if not any(run.phases for run in done.runs):
        notes.append("the server tells no step phases (/metrics): where its time went is unknown")
    if not done.windows:
        notes.append("the server tells no events (/specserve/events): K over time is unknown")
    if OFF not in plan.arms:
        notes.append("no arm without speculation: no speed-up, and texts were not compared")
    spec = [r.speculative for run in done.runs for r in run.records if r.speculative is not None]
    if not spec:
        notes.append("the replies carry no speculation metrics: acceptance is unknown")
    elif any(s.per_step_drafted is None for s in spec):
        notes.append("the replies do not tell single steps: conditional rates are unknown")
    return notes

"""`specserve study ab`: two servers, or two settings of one, on the same prompts and seeds.

Blocks of prompts go to A and B in turn, and which goes first alternates, so that what both have in
common (prompts, the machine's minute) cancels in each pair. Every number is the geometric mean of
B / A over pairs of blocks, with a 95 % interval from drawing pairs again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import fmean

import msgspec

from specserve_loadgen import latency
from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.intervals import Interval, paired_ratio_interval
from specserve_loadgen.prompts import Prompt
from specserve_loadgen.records import RequestRecord
from specserve_loadgen.report import environment
from specserve_loadgen.studies.arms import Arm
from specserve_loadgen.studies.base import Study
from specserve_loadgen.studies.cells import BlockRun, Cell, Target, blocks_of, check_arms, run_block
from specserve_loadgen.studies.difference import Difference, compare
from specserve_loadgen.studies.summary import Summary, summarise

SCHEMA = "specserve.study.ab/1"


class Side(msgspec.Struct, frozen=True):
    """name: A or B"""

    name: str
    target: Target
    arm: Arm


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """seconds: no pair but the first begins after so many; None: until every prompt was asked"""

    a: Side
    b: Side
    cell: Cell
    prompts_file: str | None
    block_size: int
    seconds: float | None = None

    @property
    def same_text_is_promised(self) -> bool:
        """One server under exact replay; two servers may hold other weights, or round otherwise."""
        rules = {side.arm.verify or "replay" for side in (self.a, self.b)}
        return self.a.target.url == self.b.target.url and rules == {"replay"}


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One measure. a, b: means over blocks; b_over_a: None where some block has no such number"""

    name: str
    unit: str
    a: float
    b: float
    b_over_a: Interval | None


class AbStudy(Study[Plan], frozen=True, kw_only=True):
    num_blocks: int
    num_requests: int  # of each side
    interrupted: bool
    measures: tuple[Measured, ...]
    a: Summary
    b: Summary
    texts: Difference

    @property
    def holds(self) -> bool:
        """Texts are equal where that is promised."""
        return not (self.plan.same_text_is_promised and self.texts.num_different_requests)


async def run_ab(
    plan: Plan, prompts: Sequence[Prompt], say: Callable[[str], None], api_key: str | None = None
) -> AbStudy:
    started_at, began = time.time(), time.perf_counter()
    for side in (plan.a, plan.b):
        await check_arms(side.target, [side.arm], prompts, api_key)
    blocks = blocks_of(prompts, plan.block_size)
    await _pair(plan, -1, blocks[0], 0, api_key)  # warm-up, in no number
    pairs: list[tuple[BlockRun, BlockRun]] = []
    interrupted, num_asked = False, 0
    for block_idx, block in enumerate(blocks):
        if pairs and plan.seconds is not None and time.perf_counter() - began > plan.seconds:
            break
        pair = await _pair(plan, block_idx, block, num_asked, api_key)
        if any(run.interrupted for run in pair):
            interrupted = True
            break
        pairs.append(pair)
        num_asked += len(block)
        say(f"{num_asked} of {len(prompts)} prompts, {time.perf_counter() - began:.0f} s")
    if not pairs:
        raise LoadgenError("stopped before one pair of blocks was through: nothing to report")
    a_records = [record for a, _ in pairs for record in a.records]
    b_records = [record for _, b in pairs for record in b.records]
    return AbStudy(
        schema=SCHEMA,
        started_at=started_at,
        seconds=time.perf_counter() - began,
        environment=environment(),
        plan=plan,
        model=pairs[0][0].model,
        server_version=pairs[0][0].server_version,
        num_blocks=len(pairs),
        num_requests=num_asked,
        interrupted=interrupted,
        measures=tuple(measures_of(pairs)),
        a=summarise(a_records),
        b=summarise(b_records),
        texts=compare(a_records, b_records),
    )


async def _pair(
    plan: Plan, block_idx: int, block: Sequence[Prompt], first_idx: int, api_key: str | None
) -> tuple[BlockRun, BlockRun]:
    """(A's run, B's run), in the order whose turn it is."""
    order = [plan.a, plan.b] if block_idx % 2 == 0 else [plan.b, plan.a]
    runs = {}
    for side in order:
        runs[side.name] = await run_block(
            side.target,
            side.arm,
            plan.cell,
            block_idx,
            block,
            first_idx=first_idx,
            api_key=api_key,
            salt=side.name,
        )
    return runs[plan.a.name], runs[plan.b.name]


def measures_of(pairs: Sequence[tuple[BlockRun, BlockRun]]) -> list[Measured]:
    """pairs: of A and B; a measure that some run lacks is taken over the pairs that have it"""
    measures: list[tuple[str, str, Callable[[BlockRun], float | None]]] = [
        ("output tokens/s", "", lambda run: run.tokens_per_second),
        ("TTFT", "s", lambda run: _mean(run.records, latency.ttft)),
        ("time per token after the first", "s", lambda run: _mean(run.records, latency.tpot)),
        ("E2E", "s", lambda run: _mean(run.records, latency.e2e)),
        ("tokens per target step", "", _tokens_per_step),
    ]
    found = []
    for name, unit, pick in measures:
        values = [(pick(a), pick(b)) for a, b in pairs]
        known = [(a, b) for a, b in values if a is not None and b is not None]
        if not known:
            continue
        found.append(
            Measured(
                name=name,
                unit=unit,
                a=fmean(a for a, _ in known),
                b=fmean(b for _, b in known),
                b_over_a=paired_ratio_interval([b for _, b in known], [a for a, _ in known]),
            )
        )
    return found


def _mean(
    records: Sequence[RequestRecord], pick: Callable[[RequestRecord], float | None]
) -> float | None:
    values = [value for record in records if (value := pick(record)) is not None]
    return fmean(values) if values else None


def _tokens_per_step(run: BlockRun) -> float | None:
    told = [r for r in run.records if r.specserve is not None]
    steps = sum(r.specserve.steps for r in told if r.specserve is not None)
    return sum(r.num_output_tokens for r in told) / steps if steps else None

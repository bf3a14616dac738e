"""The unit of every study: one block of prompts, sent once by one arm, and what came of it.

Arms of a cell send the same block with the same seeds, one after the other, in an order that
rotates from block to block: a drift of the machine meets all arms alike, and a study that is
stopped early has asked every arm nearly the same. Each run has a cache salt of its own, so that no
arm reads what another has computed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence

import msgspec

from specserve_loadgen import latency
from specserve_loadgen.client import Client
from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.prompts import Prompt, load_prompts
from specserve_loadgen.records import RequestRecord
from specserve_loadgen.run import RunResult, run_load
from specserve_loadgen.settings import ClosedLoop, Endpoint, Settings
from specserve_loadgen.studies.arms import Arm

_PHASE = re.compile(r'^specserve_step_phase_seconds_sum\{phase="([a-z_]+)"\}[ \t]+(\S+)', re.M)


MOST_ATTEMPTS = 3
STANDSTILL_SECONDS = 2.0  # by which the client's own event loop was late


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The server and what is the same for every request. The key is in no report."""

    url: str
    model: str | None = None
    endpoint: Endpoint = "chat"
    max_tokens: int = 128
    ignore_eos: bool = False
    seed: int = 0
    request_timeout: float = 600.0


class Cell(msgspec.Struct, frozen=True):
    """temperature None: the server's default"""

    temperature: float | None
    concurrency: int


class BlockRun(msgspec.Struct, frozen=True, kw_only=True):
    """seconds: from the first request sent to the last one ended

    phases: seconds of the server's step phases meanwhile, of all its requests; {}: not told
    """

    arm: Arm
    cell: Cell
    block_idx: int
    model: str
    server_version: str | None
    seconds: float
    phases: dict[str, float]
    records: tuple[RequestRecord, ...]
    interrupted: bool

    @property
    def num_output_tokens(self) -> int:
        return sum(r.num_output_tokens for r in self.records if r.succeeded)

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds if self.seconds else 0.0


class StudyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a study's file keeps of one request. Seconds; None: not told, or too short to have it.

    same_output: token for token as the baseline's with the same prompt and seed
    """

    arm: str
    temperature: float | None
    concurrency: int
    block_idx: int
    prompt_id: str
    category: str
    num_prompt_tokens: int | None
    num_output_tokens: int
    ttft: float | None
    tpot: float | None
    e2e: float
    steps: int | None
    per_step_drafted: list[int] | None
    per_step_accepted: list[int] | None
    same_output: bool | None


def chosen_prompts(
    file: str | None, categories: Sequence[str], per_category: int | None
) -> list[Prompt]:
    """Kinds interleaved, as `load_prompts` does; per_category: at most so many of each."""
    seen: dict[str, int] = {}
    kept = []
    for prompt in load_prompts(file, categories):
        seen[prompt.category] = seen.get(prompt.category, 0) + 1
        if per_category is None or seen[prompt.category] <= per_category:
            kept.append(prompt)
    return kept


def blocks_of(prompts: Sequence[Prompt], size: int) -> list[Sequence[Prompt]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def rotated(arms: Sequence[Arm], block_idx: int) -> Iterator[Arm]:
    first = block_idx % len(arms)
    yield from arms[first:]
    yield from arms[:first]


async def run_block(
    target: Target,
    arm: Arm,
    cell: Cell,
    block_idx: int,
    block: Sequence[Prompt],
    *,
    first_idx: int,
    api_key: str | None = None,
    salt: str = "",
) -> BlockRun:
    """LoadgenError when a request fails: a study compares answers, and a failure is none.

    A block in which this client stood still (a laptop that slept, a process that was stopped) is
    asked again: its times would be of the pause.

    first_idx: of the block's first prompt among all, so that a prompt's seed is the same in each
    arm; salt: tells runs of one block and arm apart
    """
    attempt = 0
    while True:
        attempt += 1
        own_salt = f"{salt}again {attempt}" if attempt > 1 else salt
        settings = block_settings(target, arm, cell, block_idx, len(block), first_idx, own_salt)
        before = await _phases(settings, api_key)
        result = await run_load(settings, block, api_key=api_key)
        after = await _phases(settings, api_key)
        stood_still = max(result.loop_lags, default=0.0) >= STANDSTILL_SECONDS
        if result.interrupted or not stood_still or attempt == MOST_ATTEMPTS:
            return _block_run(arm, cell, block_idx, result, before, after)


def _block_run(
    arm: Arm,
    cell: Cell,
    block_idx: int,
    result: RunResult,
    before: dict[str, float],
    after: dict[str, float],
) -> BlockRun:
    failed = [r for r in result.records if r.failure is not None and r.failure.kind != "cancelled"]
    if failed and failed[0].failure is not None:
        first = failed[0].failure
        raise LoadgenError(
            f"{arm.name}, prompt {failed[0].prompt_id}: {first.kind}: {first.message}"
        )
    done = [r for r in result.records if r.succeeded]
    began = min((r.sent for r in done), default=0.0)
    return BlockRun(
        arm=arm,
        cell=cell,
        block_idx=block_idx,
        model=result.model,
        server_version=result.server_version,
        seconds=max((r.ended for r in done), default=0.0) - began,
        phases={name: after[name] - before.get(name, 0.0) for name in after},
        records=tuple(done),
        interrupted=result.interrupted,
    )


def block_settings(
    target: Target,
    arm: Arm,
    cell: Cell,
    block_idx: int,
    num_prompts: int,
    first_idx: int,
    salt: str,
) -> Settings:
    asks = arm.drafter is not None
    own_salt = f"{target.seed}/{salt}/{cell.temperature}/{cell.concurrency}/{arm.name}/{block_idx}"
    return Settings(
        url=target.url,
        model=target.model,
        endpoint=target.endpoint,
        load=ClosedLoop(cell.concurrency),
        num_requests=num_prompts,
        max_tokens=target.max_tokens,
        temperature=cell.temperature,
        seed=target.seed + first_idx,
        ignore_eos=target.ignore_eos,
        drafter=arm.drafter,
        max_draft_tokens=arm.max_draft_tokens,
        verify=arm.verify,
        detailed=asks,
        keep_output=True,
        cache_salt=own_salt if asks else None,  # other servers know neither
        salt_per_request=asks,
        request_timeout=target.request_timeout,
    )


async def check_arms(
    target: Target, arms: Sequence[Arm], prompts: Sequence[Prompt], api_key: str | None
) -> None:
    """One token from every arm: what the server refuses is found out now, not in an hour."""
    short = msgspec.structs.replace(target, max_tokens=1)
    for arm in arms:
        salt = f"check {time.time()}"
        await run_block(
            short, arm, Cell(0.0, 1), 0, prompts[:1], first_idx=0, api_key=api_key, salt=salt
        )


def study_requests(run: BlockRun, baseline: BlockRun | None) -> list[StudyRequest]:
    """baseline: the same block by the arm whose texts are the measure; None: not compared"""
    said = {} if baseline is None else {r.request_idx: r.output for r in baseline.records}
    rows = []
    for r in run.records:
        spec = r.speculative
        known = said.get(r.request_idx)
        rows.append(
            StudyRequest(
                arm=run.arm.name,
                temperature=run.cell.temperature,
                concurrency=run.cell.concurrency,
                block_idx=run.block_idx,
                prompt_id=r.prompt_id,
                category=r.category,
                num_prompt_tokens=r.num_prompt_tokens,
                num_output_tokens=r.num_output_tokens,
                ttft=latency.ttft(r),
                tpot=latency.tpot(r),
                e2e=latency.e2e(r),
                steps=None if r.specserve is None else r.specserve.steps,
                per_step_drafted=None if spec is None else spec.per_step_drafted,
                per_step_accepted=None if spec is None else spec.per_step_accepted,
                same_output=None if known is None else known == r.output,
            )
        )
    return rows


async def _phases(settings: Settings, api_key: str | None) -> dict[str, float]:
    """Seconds of each phase of all steps so far, from /metrics; {} where it does not tell."""
    async with Client(settings, api_key, time.perf_counter) as client:
        text = await client.metrics_text()
    return {} if text is None else {name: float(value) for name, value in _PHASE.findall(text)}

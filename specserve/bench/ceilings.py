"""`specserve bench ceilings`: speculation against what its own cost table allows, acceptance given.

A drafter that knows the text (exact replay: a first pass without speculation tells it) is right at
every position with probability alpha, by a seeded coin, and costs next to nothing. Then B rows
with K guesses each emit (1 - alpha^(K+1)) / (1 - alpha) tokens per row and step, and

    ceiling = max over K, 0 included, of  that * forward(B rows) / forward(B (K + 1) rows)

by the costs that the server has measured itself. What is lost beneath it is drafting, choosing
tokens, the host, and choices of the controller. Timed are steps in which all B rows decode, from
the beginning of one to the beginning of the next.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
from collections.abc import Sequence as Seq
from itertools import pairwise
from pathlib import Path
from typing import Final

import msgspec
import torch

from specserve.admission import Limits, make_requests
from specserve.config import EngineConfig
from specserve.engine import Engine
from specserve.errors import ConfigError
from specserve.loading import (
    DTYPES,
    LoadedModel,
    check_backend,
    choose_dtype,
    load_model,
    use_threads,
)
from specserve.measuring import measure_profile
from specserve.runner import ModelRunner
from specserve.speculation.costs import Profile, VerifyCosts
from specserve.speculation.speculator import Speculator
from specserve.stream import RequestStream
from specserve.target import HostTarget
from specserve.types import SamplingParams, Speculation
from specserve_drafts import recorded
from specserve_drafts.known import KnowingDrafter
from specserve_observability.records import RequestRecord, StepRecord

GOAL: Final = 0.8  # of the ceiling
_MOST_GUESSES: Final = 15
_PROMPT_LEN: Final = 24
_BLOCK_SIZE: Final = 16
_BUDGET: Final = 512


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """One way to speculate: medians over rounds. milliseconds per step: all, forward, the drafter
    and who chooses guesses, verification"""

    arm: str  # off, auto, or K
    speed_up: float  # tokens per second over those of "off" in the same round
    tokens_per_second: float
    tokens_per_step: float
    step_ms: float
    forward_ms: float
    draft_ms: float
    verify_ms: float


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One acceptance rate at one batch. best_guesses: the K of the ceiling"""

    alpha: float
    batch: int
    ceiling: float
    best_guesses: int
    arms: tuple[Timed, ...]

    @property
    def best_fixed(self) -> Timed:
        fixed = [arm for arm in self.arms if arm.arm not in ("off", "auto")]
        return max(fixed, key=lambda arm: arm.speed_up)

    @property
    def auto(self) -> Timed:
        return next(arm for arm in self.arms if arm.arm == "auto")

    @property
    def holds(self) -> bool:
        return self.auto.speed_up >= GOAL * self.ceiling


class CeilingsReport(msgspec.Struct, frozen=True, kw_only=True):
    schema: str = "specserve.bench.ceilings/1"
    model: str
    dtype: str
    threads: int
    rounds: int
    cells: tuple[Cell, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `specserve bench ceilings`."""
    parser.add_argument("--model", default="demo", help="as for serve (default: demo)")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="as for serve")
    parser.add_argument("--backend", default="auto", help="as for serve (default: auto)")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--alpha", default="0.5,0.7,0.8,0.9", help="default: %(default)s")
    parser.add_argument("--batch", default="1,4,8,16", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=128, help="per row; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")


def run(options: argparse.Namespace) -> int:
    """Exit code 0: auto reaches 80 % of every ceiling. 1: not of all."""
    alphas = _numbers("--alpha", options.alpha, least=0.0, below=1.0)
    batches = [int(one) for one in _numbers("--batch", options.batch, least=1.0, below=257.0)]
    if options.tokens < 2 * _MOST_GUESSES or options.rounds < 1:
        raise ConfigError(f"--tokens must be at least {2 * _MOST_GUESSES}, --rounds at least 1")
    check_backend(options.backend)
    use_threads(options.threads)
    dtype = choose_dtype(options.dtype)
    loaded = load_model(options.model, dtype, options.backend, _say)
    cells = asyncio.run(bench(loaded, alphas, batches, options.tokens, options.rounds))
    report = CeilingsReport(
        model=options.model,
        dtype=dtype,
        threads=torch.get_num_threads(),
        rounds=options.rounds,
        cells=tuple(cells),
    )
    print(render(report))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return 0 if all(cell.holds for cell in cells) else 1


def _numbers(flag: str, text: str, *, least: float, below: float) -> list[float]:
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least or max(numbers) >= below:
        raise ConfigError(f"{flag} is {text!r}, it must be numbers from {least:g} to below {below}")
    return numbers


async def bench(
    loaded: LoadedModel, alphas: Seq[float], batches: Seq[int], num_tokens: int, rounds: int
) -> list[Cell]:
    """Every rate at every batch; progress goes to standard error."""
    _say("measuring forward costs ...")
    profile = measure_profile(loaded.decoder, block_size=_BLOCK_SIZE, max_tokens=_BUDGET)
    prompts = _prompts(max(batches), loaded.vocab_size)
    texts: dict[tuple[int, ...], list[int]] = {}
    cells = []
    for alpha in alphas:
        drafter = KnowingDrafter("synthetic", recorded(texts), [alpha], loaded.vocab_size)
        bed = _Bed(loaded, profile, drafter, max(batches), num_tokens)
        await bed.engine.start()
        try:
            if not texts:
                _say("a first pass without speculation tells the texts ...")
                texts |= await bed.run(prompts, "off")
            for batch in batches:
                cells.append(await _cell(bed, prompts[:batch], alpha, rounds))
                _say(describe(cells[-1]))
        finally:
            await bed.engine.stop()
    return cells


async def _cell(bed: _Bed, prompts: Seq[tuple[int, ...]], alpha: float, rounds: int) -> Cell:
    batch = len(prompts)
    await bed.run(prompts, "auto")  # the controller learns; what a server does all day
    best_guesses, _ = ceiling(alpha, bed.ladder(batch), batch)
    fixed = sorted({1, max(1, best_guesses // 2), max(1, best_guesses)})
    arms = ["off", "auto", *map(str, fixed)]
    found: dict[str, list[Timed]] = {arm: [] for arm in arms}
    for round_idx in range(rounds):
        first = round_idx % len(arms)
        this_round: dict[str, Timed] = {}
        for arm in [*arms[first:], *arms[:first]]:
            bed.steps.clear()
            await bed.run(prompts, arm)
            this_round[arm] = summarise(arm, bed.steps, batch)
        off = this_round["off"].tokens_per_second
        for arm, one in this_round.items():
            one = msgspec.structs.replace(one, speed_up=one.tokens_per_second / off)
            found[arm].append(one)
    best_guesses, limit = ceiling(alpha, bed.ladder(batch), batch)
    return Cell(
        alpha=alpha,
        batch=batch,
        ceiling=limit,
        best_guesses=best_guesses,
        arms=tuple(_median(many) for many in found.values()),
    )


def ceiling(alpha: float, ladder: Seq[float], batch: int) -> tuple[int, float]:
    """(K, speed-up) of the best K; ladder: forward seconds with 0, 1, ... guesses beside B rows"""
    return max(
        (
            (count, (1 - alpha ** (count + 1)) / (1 - alpha) * ladder[0] / ladder[batch * count])
            for count in range((len(ladder) - 1) // batch + 1)
        ),
        key=lambda one: one[1],
    )


class _Bed:
    """An engine with one knowing drafter; takes its own notes."""

    def __init__(
        self,
        loaded: LoadedModel,
        profile: Profile,
        drafter: KnowingDrafter,
        most_rows: int,
        num_tokens: int,
    ) -> None:
        length = _PROMPT_LEN + num_tokens
        config = EngineConfig(
            block_size=_BLOCK_SIZE,
            num_blocks=most_rows * (length // _BLOCK_SIZE + 2),
            max_model_len=length,
            max_num_seqs=most_rows,
            max_num_batched_tokens=max(_BUDGET, most_rows * (_MOST_GUESSES + 1)),
            enable_prefix_caching=False,
            max_draft_tokens=_MOST_GUESSES,
        )
        self._num_tokens = num_tokens
        self.steps: list[StepRecord] = []
        speculator = Speculator(
            {drafter.name: drafter}, vocab_size=loaded.vocab_size, profile=profile
        )
        self._costs: VerifyCosts = speculator.beliefs.verify_costs
        self.engine = Engine(
            model_name="bench",
            config=config,
            runner=ModelRunner(
                HostTarget(
                    loaded.decoder,
                    num_blocks=config.num_blocks,
                    block_size=config.block_size,
                    vocab_size=loaded.vocab_size,
                ),
                speculator,
            ),
            tokenizer=loaded.tokenizer,
            limits=Limits.of(
                config,
                vocab_size=loaded.vocab_size,
                eos_ids=loaded.tokenizer.eos_ids,
                drafters=("none", drafter.name),
            ),
            recorder=self,
        )

    def record_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def record_request(self, record: RequestRecord) -> None:
        return

    def ladder(self, batch: int) -> list[float]:
        """Forward seconds of B rows in the middle of their texts, with 0, 1, ... guesses."""
        context = _PROMPT_LEN + self._num_tokens / 2
        return self._costs.ladder(batch, batch, batch * context, context, batch * _MOST_GUESSES)

    async def run(
        self, prompts: Seq[tuple[int, ...]], arm: str
    ) -> dict[tuple[int, ...], list[int]]:
        """All prompts at once; their outputs."""
        drafter = {"off": "none", "auto": "auto"}.get(arm, "synthetic")
        guesses = {"off": 0, "auto": _MOST_GUESSES}.get(arm) if drafter != "synthetic" else int(arm)
        streams = []
        for idx, prompt in enumerate(prompts):
            (request,) = make_requests(
                self.engine.limits,
                prompt,
                SamplingParams(
                    max_tokens=self._num_tokens, temperature=0.0, seed=idx, ignore_eos=True
                ),
                request_id=f"bench-{idx}",
                speculation=Speculation(drafter=drafter, max_draft_tokens=guesses),
            )
            streams.append(self.engine.submit(request))
        outputs = await asyncio.gather(*(_read(stream) for stream in streams))
        return dict(zip(prompts, outputs, strict=True))


async def _read(stream: RequestStream) -> list[int]:
    token_ids: list[int] = []
    async for chunk in stream:
        token_ids += chunk.token_ids
    return token_ids


def _prompts(count: int, vocab_size: int) -> list[tuple[int, ...]]:
    rng = random.Random(0)
    return [tuple(rng.randrange(vocab_size) for _ in range(_PROMPT_LEN)) for _ in range(count)]


def summarise(arm: str, steps: Seq[StepRecord], batch: int) -> Timed:
    """Of the steps in which all rows decode and after which they still do."""
    full = [
        (step, following.plan_start - step.plan_start)
        for step, following in pairwise(steps)
        if all(
            len(one.rows) == batch and not any(row.is_prefill for row in one.rows)
            for one in (step, following)
        )
    ]
    if not full:
        raise ConfigError(f"no step had all {batch} rows decoding: raise --tokens")
    emitted = sum(row.num_emitted_tokens for step, _ in full for row in step.rows)
    seconds = sum(seconds for _, seconds in full)

    def ms(of: Seq[float]) -> float:
        return 1e3 * sum(of) / len(full)

    return Timed(
        arm=arm,
        speed_up=1.0,
        tokens_per_second=emitted / seconds,
        tokens_per_step=emitted / len(full),
        step_ms=ms([seconds for _, seconds in full]),
        forward_ms=ms([step.verify_start - step.forward_start for step, _ in full]),
        draft_ms=ms([step.forward_start - step.draft_start for step, _ in full]),
        verify_ms=ms([step.verify_end - step.verify_start for step, _ in full]),
    )


def _median(many: Seq[Timed]) -> Timed:
    fields = [name for name in Timed.__struct_fields__ if name != "arm"]
    middle = {name: statistics.median(getattr(one, name) for one in many) for name in fields}
    return Timed(arm=many[0].arm, **middle)


def describe(cell: Cell) -> str:
    """One line for a person who waits."""
    return (
        f"alpha {cell.alpha:g} batch {cell.batch}: ceiling {cell.ceiling:.2f} at K = "
        f"{cell.best_guesses}, auto {cell.auto.speed_up:.2f}, best fixed "
        f"{cell.best_fixed.speed_up:.2f} (K = {cell.best_fixed.arm})"
    )


def render(report: CeilingsReport) -> str:
    lines = [
        f"{report.model} as {report.dtype}, {report.threads} threads, medians of {report.rounds}",
        "alpha batch  ceiling at K |  auto  of it | fixed at K  of it | "
        "auto: tok/step  step ms  forward  draft  verify | off: step ms  forward",
    ]
    for cell in report.cells:
        auto, best = cell.auto, cell.best_fixed
        off = next(arm for arm in cell.arms if arm.arm == "off")
        lines.append(
            f"{cell.alpha:>5g} {cell.batch:>5} {cell.ceiling:>8.2f} {cell.best_guesses:>4} | "
            f"{auto.speed_up:>5.2f} {auto.speed_up / cell.ceiling:>6.0%} | "
            f"{best.speed_up:>5.2f} {best.arm:>4} {best.speed_up / cell.ceiling:>5.0%} | "
            f"{auto.tokens_per_step:>14.2f} {auto.step_ms:>8.2f} {auto.forward_ms:>8.2f} "
            f"{auto.draft_ms:>6.2f} {auto.verify_ms:>7.2f} | {off.step_ms:>12.2f} "
            f"{off.forward_ms:>8.2f}"
        )
    num_holding = sum(cell.holds for cell in report.cells)
    lines.append(
        f"auto reaches {GOAL:.0%} of the ceiling in {num_holding} of {len(report.cells)} cells"
    )
    return "\n".join(lines)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

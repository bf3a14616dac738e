"""`specserve study never-slower`: is speculation `auto` ever slower than off, or than one choice?

One server, one set of prompts per workload. In every round each arm (auto, off, each fixed drafter
and K) sends the same prompts with the same seeds, in an order that rotates, so that a drift of the
machine meets all arms alike. A round's ratio is of two neighbouring runs; a cell's is the typical
one of its rounds with an interval (paired_rounds.py), and where that interval does not tell yet
whether the cell holds, more rounds follow, up to `most_rounds`. Each run has a cache salt of its
own: no arm reads from the prefix cache or the suffix corpus what another arm has just computed.

The adversarial workload is for a server that has the drafter `anti` loaded, whose every guess is
wrong although it looks sure: `auto` has it among its choices there, in the other workloads, too.
"""

from __future__ import annotations

import random
import statistics
import string
import time
from collections.abc import Callable, Sequence

import msgspec

from specserve_loadgen.busy import busy_rate
from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.intervals import Interval
from specserve_loadgen.paired_rounds import rounds_interval
from specserve_loadgen.prompts import Message, Prompt, load_prompts
from specserve_loadgen.records import RequestRecord
from specserve_loadgen.run import RunResult, run_load
from specserve_loadgen.settings import ClosedLoop, Settings

SCHEMA = "specserve.study.never-slower/2"
AUTO_OVER_OFF, AUTO_OVER_BEST = 0.98, 0.97  # what the study asks of every cell
RANDOM = "random"
ADVERSARIAL = "adversarial"
WORKLOADS = ("chat", "summarise", "code", "edit", RANDOM)
_RANDOM_TEMPERATURE = 2.0  # nearly uniform: nobody guesses what comes


class Arm(msgspec.Struct, frozen=True):
    """drafter None: whatever the server picks (auto); K None: as the drafter's default."""

    name: str
    drafter: str | None
    max_draft_tokens: int | None


AUTO, OFF = Arm("auto", "auto", None), Arm("off", "none", 0)
ANTI = Arm("anti:3", "anti", 3)


class ArmResult(msgspec.Struct, frozen=True, kw_only=True):
    """Of one arm in one cell. tokens_per_second: one per round; tokens: output of all rounds."""

    arm: str
    tokens_per_second: tuple[float, ...]
    num_output_tokens: int
    acceptance_rate: float | None
    mean_acceptance_length: float | None


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """auto_over_*: typical ratios of output tokens per second, of rounds; *_range: min, max;
    *_interval: 95 %, None below six rounds.

    num_requests:       that each arm sent in a round
    same_output_tokens: every arm emitted as many tokens in every round, as exact replay demands
    """

    concurrency: int
    workload: str
    auto_over_off: float
    auto_over_off_range: tuple[float, float]
    auto_over_off_interval: tuple[float, float] | None
    best_fixed: str
    auto_over_best_fixed: float
    auto_over_best_fixed_interval: tuple[float, float] | None
    best_fixed_over_off: float
    num_requests: int
    same_output_tokens: bool
    arms: tuple[ArmResult, ...]

    @property
    def holds(self) -> bool:
        return self.auto_over_off >= AUTO_OVER_OFF and self.auto_over_best_fixed >= AUTO_OVER_BEST

    @property
    def is_sure(self) -> bool:
        """Whether the intervals leave no doubt about that."""
        off = _side(self.auto_over_off_interval, AUTO_OVER_OFF)
        best = _side(self.auto_over_best_fixed_interval, AUTO_OVER_BEST)
        return (off is True and best is True) or off is False or best is False


class Study(msgspec.Struct, frozen=True, kw_only=True):
    schema: str
    model: str
    server_version: str | None
    url: str
    rounds: int
    most_rounds: int
    max_tokens: int
    requests_per_user: int
    seconds_per_cell: float | None
    seconds: float  # of the whole study
    seed: int
    cells: tuple[Cell, ...]

    @property
    def num_failing(self) -> int:
        return sum(not cell.holds for cell in self.cells)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run. Each arm of a cell sends concurrency * requests_per_user requests in a round.

    seconds_per_cell: as many requests instead as fit into it, by the speed of the warm-up, rounds
                      and arms included; at least one per user. Rounds beyond `rounds` come on top
    most_rounds:      of a cell that its rounds do not decide
    """

    url: str
    fixed: tuple[Arm, ...]
    concurrencies: tuple[int, ...] = (1, 4, 8, 16, 32)
    workloads: tuple[str, ...] = WORKLOADS
    rounds: int = 6
    most_rounds: int = 18
    max_tokens: int = 96
    requests_per_user: int = 3
    seconds_per_cell: float | None = None
    temperature: float = 0.0
    seed: int = 0

    def arms(self, workload: str) -> list[Arm]:
        more = [ANTI] if workload == ADVERSARIAL and ANTI not in self.fixed else []
        return [AUTO, OFF, *self.fixed, *more]


async def run_study(plan: Plan, say: Callable[[Cell], None], api_key: str | None = None) -> Study:
    """All cells; LoadgenError when there is no server or a request fails."""
    cells = []
    started = time.perf_counter()
    await _check_arms(plan, api_key)
    info: RunResult | None = None
    for workload in plan.workloads:
        for concurrency in plan.concurrencies:
            cell, info = await _run_cell(plan, workload, concurrency, api_key)
            cells.append(cell)
            say(cell)
    if info is None:
        raise LoadgenError("the study has no cells: name at least one workload and concurrency")
    return Study(
        schema=SCHEMA,
        model=info.model,
        server_version=info.server_version,
        url=plan.url,
        rounds=plan.rounds,
        most_rounds=plan.most_rounds,
        max_tokens=plan.max_tokens,
        requests_per_user=plan.requests_per_user,
        seconds_per_cell=plan.seconds_per_cell,
        seconds=time.perf_counter() - started,
        seed=plan.seed,
        cells=tuple(cells),
    )


async def _check_arms(plan: Plan, api_key: str | None) -> None:
    """One token from every arm: a drafter that is not loaded is found out now, not in an hour."""
    arms = {arm.name: arm for workload in plan.workloads for arm in plan.arms(workload)}
    prompts = load_prompts(None, ["chat"])[:1]
    for arm in arms.values():
        settings = _settings(plan, arm, "check", 1, -1, 1)
        result = await run_load(
            msgspec.structs.replace(settings, max_tokens=1, shortest=None), prompts, api_key=api_key
        )
        if failure := next((r.failure for r in result.records if r.failure is not None), None):
            raise LoadgenError(
                f"the server refuses {arm.name} ({failure.message}): load {arm.drafter} with "
                "--drafters, or leave it out (--fixed; the adversarial workload needs anti)"
            )


async def _run_cell(
    plan: Plan, workload: str, concurrency: int, api_key: str | None
) -> tuple[Cell, RunResult]:
    runs = _Runs(plan, workload, concurrency, api_key)
    await runs.round(-1)  # warms the server up and is in no number
    num_rounds = max(plan.rounds, plan.most_rounds)
    for round_idx in range(num_rounds):
        await runs.round(round_idx)
        if round_idx + 1 >= plan.rounds and (cell := runs.cell()).is_sure:
            break
    else:
        cell = runs.cell()
    assert runs.result is not None
    return cell, runs.result


class _Runs:
    """What the arms of one cell did so far."""

    def __init__(self, plan: Plan, workload: str, concurrency: int, api_key: str | None) -> None:
        self._plan, self._workload, self._concurrency = plan, workload, concurrency
        self._api_key = api_key
        self._arms = plan.arms(workload)
        self._prompts = workload_prompts(workload, plan.seed)
        self._speeds: dict[str, list[float]] = {arm.name: [] for arm in self._arms}
        self._records: dict[str, list[RequestRecord]] = {arm.name: [] for arm in self._arms}
        self._outputs: set[int] = set()  # tokens of one arm's run
        self._num_requests = concurrency  # of the warm-up
        self.result: RunResult | None = None

    async def round(self, round_idx: int) -> None:
        """One run of each arm; LoadgenError where a request fails."""
        first = round_idx % len(self._arms)
        began = time.perf_counter()
        for arm in [*self._arms[first:], *self._arms[:first]]:
            settings = _settings(
                self._plan,
                arm,
                self._workload,
                self._concurrency,
                round_idx,
                self._num_requests,
            )
            result = await run_load(settings, self._prompts, api_key=self._api_key)
            self.result = result
            failed = [record for record in result.records if record.failure is not None]
            if failed or result.interrupted:
                why = failed[0].failure if failed else "it was interrupted"
                raise LoadgenError(f"{self._workload}, c{self._concurrency}, {arm.name}: {why}")
            if round_idx >= 0:
                self._speeds[arm.name].append(busy_rate(result.records))
                self._records[arm.name] += result.records
                self._outputs.add(sum(r.num_output_tokens for r in result.records))
        if round_idx < 0:
            seconds = time.perf_counter() - began
            self._num_requests = requests_per_round(self._plan, self._concurrency, seconds)

    def cell(self) -> Cell:
        names = [arm.name for arm in self._arms]
        return make_cell(
            self._concurrency,
            self._workload,
            [_arm_result(name, self._speeds[name], self._records[name]) for name in names],
            self._num_requests,
            same_output_tokens=len(self._outputs) == 1,
        )


def requests_per_round(plan: Plan, concurrency: int, warm_up_seconds: float) -> int:
    """Of each arm; the warm-up was one request per user from every arm."""
    if plan.seconds_per_cell is None:
        return concurrency * plan.requests_per_user
    left = plan.seconds_per_cell - warm_up_seconds
    return concurrency * max(1, int(left / plan.rounds / warm_up_seconds))


def _settings(
    plan: Plan, arm: Arm, workload: str, concurrency: int, round_idx: int, num_requests: int
) -> Settings:
    return Settings(
        url=plan.url,
        load=ClosedLoop(concurrency),
        num_requests=num_requests,
        max_tokens=plan.max_tokens,
        # Answers of one length march in step: whoever guesses nothing then gets all new prompts at
        # once, as no real load brings them.
        shortest=-(-plan.max_tokens // 2),
        temperature=_RANDOM_TEMPERATURE if workload == RANDOM else plan.temperature,
        seed=plan.seed,
        ignore_eos=True,
        drafter=arm.drafter,
        max_draft_tokens=arm.max_draft_tokens,
        cache_salt=f"{plan.seed}/{workload}/{concurrency}/{arm.name}/{round_idx}",
        salt_per_request=True,  # prompts come again, and a guesser must not have seen the answer
    )


def _arm_result(name: str, speeds: Sequence[float], records: Sequence[RequestRecord]) -> ArmResult:
    known = [r.speculative for r in records if r.speculative is not None]
    drafted = sum(s.num_draft_tokens for s in known)
    steps = sum(s.num_spec_steps for s in known)
    return ArmResult(
        arm=name,
        tokens_per_second=tuple(speeds),
        num_output_tokens=sum(r.num_output_tokens for r in records),
        acceptance_rate=(
            sum(s.num_accepted_draft_tokens for s in known) / drafted if drafted else None
        ),
        mean_acceptance_length=(
            sum(s.num_emitted_tokens for s in known) / steps if steps else None
        ),
    )


def make_cell(
    concurrency: int,
    workload: str,
    arms: Sequence[ArmResult],
    num_requests: int,
    *,
    same_output_tokens: bool,
) -> Cell:
    """The cell's ratios: of the same round, then the typical one. Needs auto, off, a fixed arm."""
    by_name = {arm.arm: arm for arm in arms}
    auto, off = by_name[AUTO.name], by_name[OFF.name]
    fixed = [arm for arm in arms if arm.arm not in (AUTO.name,)]  # off is a fixed choice, too
    best = max(fixed, key=lambda arm: statistics.median(arm.tokens_per_second))
    over_off = _ratios(auto, off)
    off_interval, best_interval = rounds_interval(over_off), rounds_interval(_ratios(auto, best))
    return Cell(
        concurrency=concurrency,
        workload=workload,
        auto_over_off=off_interval.estimate,
        auto_over_off_range=(min(over_off), max(over_off)),
        auto_over_off_interval=_bounds(off_interval),
        best_fixed=best.arm,
        auto_over_best_fixed=best_interval.estimate,
        auto_over_best_fixed_interval=_bounds(best_interval),
        best_fixed_over_off=rounds_interval(_ratios(best, off)).estimate,
        num_requests=num_requests,
        same_output_tokens=same_output_tokens,
        arms=tuple(arms),
    )


def _bounds(interval: Interval) -> tuple[float, float] | None:
    if interval.low is None or interval.high is None:
        return None
    return interval.low, interval.high


def _side(interval: tuple[float, float] | None, goal: float) -> bool | None:
    """Whether a ratio lies above its goal; None: its interval does not tell."""
    if interval is None or interval[0] < goal <= interval[1]:
        return None
    return interval[0] >= goal


def _ratios(one: ArmResult, other: ArmResult) -> list[float]:
    return [a / b for a, b in zip(one.tokens_per_second, other.tokens_per_second, strict=True)]


def workload_prompts(workload: str, seed: int) -> list[Prompt]:
    """Of the shipped pack's category, or of random syllables (`random`)."""
    if workload == ADVERSARIAL:
        workload = "chat"
    if workload != RANDOM:
        return load_prompts(None, [workload])
    rng = random.Random(seed)
    vowels, consonants = "aeiou", [c for c in string.ascii_lowercase if c not in "aeiou"]

    def word() -> str:
        return "".join(rng.choice(consonants) + rng.choice(vowels) for _ in range(3))

    return [
        Prompt(
            prompt_id=f"random-{idx}",
            category=RANDOM,
            messages=(Message("user", " ".join(word() for _ in range(30))),),
        )
        for idx in range(16)
    ]

"""`specserve study lossless`: does speculation change what is said?

Identity: under exact replay (the rule `replay`, and greedy decoding under `block` and `rejection`)
every reply is the one without speculation, token for token, with the same prompt and seed.

Law: other rules give other text of the same distribution. Many short replies to one prompt, with
and without speculation and all with seeds of their own, are compared by a permutation test: if both
have one law, then whose reply is whose does not matter, so the distance between the two groups lies
among those of groups drawn at random. The p-value is exact, whatever the vocabulary. A test that
finds nothing proves little unless it could have: the control compares two temperatures on the same
prompts, and the study says so where even that was not seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.prompts import Prompt
from specserve_loadgen.records import RequestRecord
from specserve_loadgen.report import environment
from specserve_loadgen.studies.arms import OFF, Arm
from specserve_loadgen.studies.base import Study
from specserve_loadgen.studies.cells import Cell, Target, check_arms, run_block
from specserve_loadgen.studies.difference import Difference, compare

SCHEMA: Final = "specserve.study.lossless/1"
NUM_PERMUTATIONS: Final = 2000
REFUTED: Final = 0.001  # a p-value below it: the laws differ
CONTROL_FACTOR: Final = 1.5  # of the temperature
_ELSEWHERE: Final = 1_000_000  # seeds of speculation's replies, none of which the baseline has


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """num_samples: replies of each group to one prompt; sample_tokens: their length;
    num_law_prompts: how many prompts the law is tested on"""

    target: Target
    arms: tuple[Arm, ...]
    temperatures: tuple[float, ...] = (0.0, 0.7)
    concurrency: int = 4
    prompts_file: str | None = None
    num_samples: int = 100
    sample_tokens: int = 6
    num_law_prompts: int = 4


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    arm: str
    temperature: float
    num_spec_steps: int  # with none of them nothing was put to the test
    difference: Difference


class Law(msgspec.Struct, frozen=True, kw_only=True):
    """p_value: how often groups drawn at random lie as far apart as these; control_p_value: the
    same of two temperatures, both without speculation"""

    arm: str
    temperature: float
    num_prompts: int
    num_samples: int  # of each group, of all prompts
    num_spec_steps: int
    p_value: float
    control_p_value: float

    @property
    def refuted(self) -> bool:
        return self.p_value < REFUTED

    @property
    def could_tell(self) -> bool:
        return self.control_p_value < 0.05


class LosslessStudy(Study[Plan], frozen=True, kw_only=True):
    identities: tuple[Identity, ...]
    laws: tuple[Law, ...]

    @property
    def num_different(self) -> int:
        return sum(one.difference.num_different for one in self.identities)

    @property
    def holds(self) -> bool:
        return not self.num_different and not any(law.refuted for law in self.laws)


async def run_lossless(
    plan: Plan, prompts: Sequence[Prompt], say: Callable[[str], None], api_key: str | None = None
) -> LosslessStudy:
    """LoadgenError when a request fails or the user stops it: half a proof is none."""
    started_at, began = time.time(), time.perf_counter()
    await check_arms(plan.target, (OFF, *plan.arms), prompts, api_key)
    lab = _Lab(plan, api_key)
    identities, laws = [], []
    for temperature in plan.temperatures:
        exact = [arm for arm in plan.arms if is_exact(arm, temperature)]
        if exact:
            plain = await lab.replies(OFF, temperature, prompts)
            for arm in exact:
                replies = await lab.replies(arm, temperature, prompts)
                one = Identity(
                    arm=arm.name,
                    temperature=temperature,
                    num_spec_steps=_spec_steps(replies),
                    difference=compare(plain, replies),
                )
                identities.append(one)
                say(f"{arm.name}, T = {temperature:g}: {one.difference.num_different} different")
        others = [arm for arm in plan.arms if not is_exact(arm, temperature)]
        if others:
            laws += await _laws(lab, others, temperature, prompts[: plan.num_law_prompts], say)
    return LosslessStudy(
        schema=SCHEMA,
        started_at=started_at,
        seconds=time.perf_counter() - began,
        environment=environment(),
        plan=plan,
        model=lab.model,
        server_version=lab.server_version,
        identities=tuple(identities),
        laws=tuple(laws),
    )


def is_exact(arm: Arm, temperature: float) -> bool:
    """Whether the rule promises the very tokens; `typical` promises nothing."""
    return (arm.verify or "replay") == "replay" or (temperature == 0 and arm.verify != "typical")


class _Lab:
    """Asks; remembers what the server said of itself."""

    def __init__(self, plan: Plan, api_key: str | None) -> None:
        self.plan = plan
        self._api_key = api_key
        self._num_runs = 0
        self.model = ""
        self.server_version: str | None = None

    async def replies(
        self,
        arm: Arm,
        temperature: float,
        prompts: Sequence[Prompt],
        *,
        first_seed: int = 0,
        max_tokens: int | None = None,
    ) -> list[RequestRecord]:
        self._num_runs += 1
        plan = self.plan
        target = plan.target
        if max_tokens is not None:
            target = msgspec.structs.replace(target, max_tokens=max_tokens)
        run = await run_block(
            target,
            arm,
            Cell(temperature, plan.concurrency),
            self._num_runs,
            prompts,
            first_idx=first_seed,
            api_key=self._api_key,
            salt="lossless",
        )
        if run.interrupted:
            raise LoadgenError("stopped: half a comparison proves nothing")
        self.model, self.server_version = run.model, run.server_version
        return list(run.records)


async def _laws(
    lab: _Lab,
    arms: Sequence[Arm],
    temperature: float,
    prompts: Sequence[Prompt],
    say: Callable[[str], None],
) -> list[Law]:
    async def group(arm: Arm, at: float, first_seed: int) -> list[RequestRecord]:
        many = [prompt for prompt in prompts for _ in range(lab.plan.num_samples)]
        length = lab.plan.sample_tokens
        return await lab.replies(arm, at, many, first_seed=first_seed, max_tokens=length)

    plain = await group(OFF, temperature, 0)
    hotter = await group(OFF, temperature * CONTROL_FACTOR, _ELSEWHERE)
    control = p_value_of_one_law(_by_prompt(plain, len(prompts)), _by_prompt(hotter, len(prompts)))
    laws = []
    for arm in arms:
        replies = await group(arm, temperature, _ELSEWHERE)
        law = Law(
            arm=arm.name,
            temperature=temperature,
            num_prompts=len(prompts),
            num_samples=len(replies),
            num_spec_steps=_spec_steps(replies),
            p_value=p_value_of_one_law(
                _by_prompt(plain, len(prompts)), _by_prompt(replies, len(prompts))
            ),
            control_p_value=control,
        )
        laws.append(law)
        say(f"{arm.name}, T = {temperature:g}: p = {law.p_value:.4f} (control {control:.4f})")
    return laws


def _by_prompt(records: Sequence[RequestRecord], num_prompts: int) -> list[list[tuple[int, ...]]]:
    """The token ids of each prompt's replies. LoadgenError where a server does not tell them."""
    ids = []
    for record in records:
        if record.output is None or record.output.token_ids is None:
            raise LoadgenError("this server tells no token ids: a law cannot be tested on its text")
        ids.append(record.output.token_ids)
    each = len(ids) // num_prompts
    return [ids[at * each : (at + 1) * each] for at in range(num_prompts)]


def _spec_steps(records: Sequence[RequestRecord]) -> int:
    return sum(r.speculative.num_spec_steps for r in records if r.speculative is not None)


# ---- the test ----------------------------------------------------------------------------------


def p_value_of_one_law(
    ones: Sequence[Sequence[tuple[int, ...]]], others: Sequence[Sequence[tuple[int, ...]]]
) -> float:
    """Of the hypothesis that, prompt by prompt, both groups of replies have one law.

    The distance is the two-sample chi-square over tokens at each place and pairs of neighbours, all
    prompts together; labels are drawn again within prompts.
    """
    rng = np.random.default_rng(0)
    total = np.zeros(NUM_PERMUTATIONS + 1)  # the first: as it was
    for one, other in zip(ones, others, strict=True):
        signs = np.concatenate([np.ones(len(one)), -np.ones(len(other))])
        drawn = rng.permuted(np.tile(signs, (NUM_PERMUTATIONS, 1)), axis=1)
        labels = np.vstack([signs, drawn])  # [1 + permutations, replies]
        for column in _columns([*one, *other]):
            total += _distances(labels, column, len(one), len(other))
    return float((total >= total[0] - 1e-9).mean())


def _columns(replies: Sequence[tuple[int, ...]]) -> list[NDArray[np.int64]]:
    """[replies] each: an id per kind of token at a place, or of pair of neighbours."""
    length = max(len(reply) for reply in replies)
    padded = np.array([reply + (-1,) * (length - len(reply)) for reply in replies])
    places = [padded[:, at] for at in range(length)]
    pairs = [padded[:, at] * 1_000_003 + padded[:, at + 1] for at in range(length - 1)]
    return [np.unique(column, return_inverse=True)[1] for column in (*places, *pairs)]


def _distances(
    labels: NDArray[np.float64], kinds: NDArray[np.int64], num_ones: int, num_others: int
) -> NDArray[np.float64]:
    """[rows of labels] the chi-square distance between those labelled 1 and those labelled -1."""
    hot = np.eye(kinds.max() + 1)[kinds]  # [replies, kinds]
    counts = hot.sum(axis=0)
    ones = (labels @ hot + counts) / 2
    expected = counts * num_ones / (num_ones + num_others)
    distances: NDArray[np.float64] = ((ones - expected) ** 2 / counts).sum(axis=1)
    return distances

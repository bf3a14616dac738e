"""A world without tensors for the speculator: texts, drafters of known worth, and a clock it owns.

Time passes only where a cost says so, with noise and rare outliers on what the speculator sees;
what is counted is the time without noise. So results repeat exactly and no machine disturbs them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from specserve.drafting import NO_DRAFT, Draft, DraftRow, Outcome, chain
from specserve.speculation.chosen import Learned, StepDrafts
from specserve.speculation.costs import Profile, SizeCost
from specserve.speculation.recording import Recording
from specserve.speculation.speculator import Speculator
from specserve.types import Request, RowPlan, SamplingParams, VerifyRule

VOCAB = 50_000
PROMPT = (1, 2, 3)


def truth(seq_id: int, position: int) -> int:
    """The text of a sequence: every token is its own."""
    return (seq_id * 7919 + position * 104_729 + 17) % (VOCAB - 1)


# (sequence, position, how deep, step) -> the chance that a guess is right if its parent is
Rate = Callable[[int, int, int, int], float]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0  # what the speculator reads
        self.spent = 0.0  # without noise

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float, noise: float = 1.0) -> None:
        self.now += seconds * noise
        self.spent += seconds


@dataclass
class CostTable:
    """Seconds of a forward: flat up to `free` tokens, then `per_tile` for every 16 more."""

    base: float = 0.020
    free: int = 16
    per_tile: float = 0.008
    per_token: float = 0.00005
    per_emitted: float = 0.0002
    host: float = 0.0005

    def seconds(self, num_tokens: int) -> float:
        tiles = max(0, -(-(num_tokens - self.free) // 16))
        return self.base + tiles * self.per_tile + num_tokens * self.per_token

    def profile(self, wrong_by: float = 1.0) -> Profile:
        sizes = (1, 2, 4, 8, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 192, 256, 257, 384, 512)
        return Profile(
            tuple(
                SizeCost(m, self.seconds(m) * wrong_by, self.seconds(m) * wrong_by) for m in sizes
            )
        )


@dataclass
class WorldDrafter:
    """A drafter whose guesses are right at a given rate, at a given price."""

    name: str
    rate: Rate
    clock: Clock
    rng: random.Random
    per_call: float = 0.0
    per_step: float = 0.0  # each level of guesses
    per_row: float = 0.000005
    keeps_kv: bool = False
    hidden_layers: tuple[int, ...] = ()
    scores: bool = False  # says its true chances, a little off
    sampled: bool = False  # gives the law its guesses were drawn from
    step_idx: int = 0
    asked: list[list[int]] = field(default_factory=list)  # K of the rows of each call

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        self.asked.append([row.max_tokens for row in rows if row.max_tokens])
        drafts = [self._guess(row) for row in rows]
        steps = max((len(draft.token_ids) for draft in drafts), default=0)
        seconds = self.per_call + self.per_step * steps + self.per_row * len(rows)
        self.clock.pass_by(seconds, self.rng.lognormvariate(0, 0.05))
        return drafts

    def _guess(self, row: DraftRow) -> Draft:
        if row.max_tokens == 0:
            return NO_DRAFT
        start, token_ids, scores = len(row.history), [], []
        # Of a model's tree siblings take places; here they are left out, for none would be right.
        width = row.width if self.keeps_kv else 1
        for depth in range(-(-row.max_tokens // width)):
            rate = self.rate(row.seq_id, start + depth, depth + 1, self.step_idx)
            right = self.rng.random() < rate
            token_ids.append(truth(row.seq_id, start + depth) + (not right))
            scores.append(min(1.0, rate**0.7))
        return chain(
            token_ids,
            probs=[None] * len(token_ids) if self.sampled else None,  # nobody reads them here
            scores=scores if self.scores else (),
            kv_len=len(row.history),
        )

    def observe(self, outcomes: Seq[Outcome]) -> None:
        self.step_idx += 1

    def forget(self, seq_id: int) -> None:
        return


@dataclass
class Step:
    """What one step chose, and what it led to."""

    drafts: StepDrafts
    num_guesses: list[int]
    num_accepted: list[int]
    seconds: float  # from draft() to the last verdict, with noise


@dataclass
class World:
    costs: CostTable
    clock: Clock
    speculator: Speculator
    rng: random.Random
    requests: dict[int, Request]
    histories: dict[int, list[int]]
    asked: dict[str, list[list[int]]]
    kv_lens: dict[int, Mapping[str, int]] = field(default_factory=dict)
    num_emitted: int = 0
    steps: list[Step] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Tokens per second, of the time without noise."""
        return self.num_emitted / self.clock.spent

    def run(self, num_steps: int) -> World:
        for _ in range(num_steps):
            self.step()
        return self

    def step(self) -> Step:
        started = self.clock.now
        plans = [self._plan(seq_id) for seq_id in self.requests]
        drafts = self.speculator.draft(plans)
        num_tokens = sum(1 + len(one.draft.token_ids) for one in drafts.rows)
        before = self.clock.now
        # A busy neighbour: one step in fifty takes five times as long.
        noise = self.rng.lognormvariate(0, 0.05) * (5.0 if self.rng.random() < 0.02 else 1.0)
        self.clock.pass_by(self.costs.seconds(num_tokens), noise)
        forward = self.clock.now - before
        outcomes, accepted = [], []
        for plan, one in zip(plans, drafts.rows, strict=True):
            emitted = self._verify(plan, one.draft)
            accepted.append(len(emitted) - 1)
            outcomes.append(
                Outcome(
                    seq_id=plan.seq_id,
                    request=plan.request,
                    start=plan.start,
                    token_ids=(plan.history[-1], *emitted),
                    num_computed=len(emitted),
                    drafter=one.drafter,
                    num_drafted=len(one.draft.token_ids),
                    num_accepted=len(emitted) - 1,
                )
            )
            self.num_emitted += len(emitted)
            self.kv_lens[plan.seq_id] = one.kv_lens
        choosing = self.costs.per_emitted * sum(count + 1 for count in accepted)
        self.clock.pass_by(choosing, self.rng.lognormvariate(0, 0.05))
        step = Step(
            drafts,
            [len(one.draft.token_ids) for one in drafts.rows],
            accepted,
            self.clock.now - started,
        )
        self.speculator.learn(
            Learned(
                outcomes=tuple(outcomes),
                num_emitted=sum(accepted) + len(accepted),
                forward_seconds=forward,
                verify_seconds=choosing,
            )
        )
        for plan, outcome in zip(plans, outcomes, strict=True):
            self.histories[plan.seq_id].extend(outcome.token_ids[1:])
        self.clock.pass_by(self.costs.host, self.rng.lognormvariate(0, 0.05))
        self.steps.append(step)
        return step

    def _plan(self, seq_id: int) -> RowPlan:
        request, history = self.requests[seq_id], self.histories[seq_id]
        return RowPlan(
            seq_id=seq_id,
            request=request,
            history=history,
            start=len(history) - 1,
            num_tokens=1,
            max_draft_tokens=request.max_draft_tokens,
            samples=True,
            is_prefill=False,
            block_table=(),
            draft_kv_lens=self.kv_lens.get(seq_id, {}),
        )

    def _verify(self, plan: RowPlan, draft: Draft) -> list[int]:
        position, node, emitted = len(plan.history), -1, list[int]()
        for idx, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
            if parent == node and token_id == truth(plan.seq_id, position + len(emitted)):
                emitted.append(token_id)
                node = idx
        return [*emitted, truth(plan.seq_id, position + len(emitted))]


@dataclass
class Kind:
    """How to make one drafter of a world."""

    rate: Rate | float
    per_call: float = 0.0
    per_step: float = 0.0
    per_row: float = 0.000005
    keeps_kv: bool = False
    scores: bool = False


def a_world(
    kinds: Mapping[str, Kind],
    *,
    num_seqs: int = 4,
    drafter: str = "auto",
    draft_tokens: int = 15,
    costs: CostTable | None = None,
    seed: int = 0,
    verify: VerifyRule = "replay",
    profile_wrong_by: float = 1.0,
    itl_target: float | None = None,
    sampled: bool = False,
    recording: Recording | None = None,
) -> World:
    table, clock, rng = costs or CostTable(), Clock(), random.Random(seed)
    drafters = {
        name: WorldDrafter(
            name,
            kind.rate if callable(kind.rate) else _constant(kind.rate),
            clock,
            random.Random(f"{seed} {name}"),
            per_call=kind.per_call,
            per_step=kind.per_step,
            per_row=kind.per_row,
            keeps_kv=kind.keeps_kv,
            scores=kind.scores,
            sampled=sampled,
        )
        for name, kind in kinds.items()
    }
    speculator = Speculator(
        drafters,
        vocab_size=VOCAB,
        profile=table.profile(profile_wrong_by),
        itl_target=itl_target,
        recording=recording,
        clock=clock,
    )
    requests = {
        seq_id: Request(
            request_id=f"{seq_id}",
            prompt_ids=PROMPT,
            params=SamplingParams(max_tokens=10**6),
            seed=seq_id,
            drafter=drafter,
            max_draft_tokens=draft_tokens,
            verify=verify,
        )
        for seq_id in range(num_seqs)
    }
    histories = {seq_id: [*PROMPT, truth(seq_id, 3)] for seq_id in requests}
    asked = {name: drafter.asked for name, drafter in drafters.items()}
    return World(table, clock, speculator, rng, requests, histories, asked)


def _constant(rate: float) -> Rate:
    return lambda seq_id, position, depth, step: rate

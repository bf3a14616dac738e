"""Asks drafters for guesses inside the step, and tells them what became of them.

Owns the drafters, the bench and the controller. The runner packs, forwards and verifies whatever
comes from here. A request names its drafter and K (obeyed to the letter) or leaves both to the
controller ("auto"). A drafter may fail in any way (raise, return nonsense, return too much): its
rows then have K = 0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

import msgspec

from specserve.drafting import NO_DRAFT, Draft, Drafter, num_levels, pruned
from specserve.speculation.beliefs import Beliefs
from specserve.speculation.chosen import (
    ChosenDraft,
    Learned,
    StepDrafts,
    StepFacts,
    draft_row,
    facts_of,
    no_draft,
    num_fed,
    without_guess,
)
from specserve.speculation.controller import Controller
from specserve.speculation.costs import UNMEASURED, Profile
from specserve.speculation.fitting import within_constraint
from specserve.speculation.offers import AutoRow, Call
from specserve.speculation.panel import Panel
from specserve.speculation.recording import Recording
from specserve.speculation.step_cost import StepCost
from specserve.speculation.survival import Judged
from specserve.types import Ended, RowPlan

_NOTHING = (NO_DRAFT, Judged(NO_DRAFT, [], (), [], 0))


class _Proposed(NamedTuple):
    """One row's proposal of this step, to be compared with what was emitted.

    beta: the sharpness it was made with; 0 where that can teach nothing
    """

    name: str
    judged: Judged
    width: int
    beta: float


class Speculator:
    """draft() and learn() alternate, once per step, on the worker thread."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        *,
        vocab_size: int,
        profile: Profile = UNMEASURED,
        itl_target: float | None = None,
        sharpness: float | None = None,
        recording: Recording | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """vocab_size: a guess beyond it (a drafter's padding) ends its draft

        itl_target: seconds a step should stay below, as far as guesses have a say in it
        sharpness:  beta of drafters with logits; None: learned
        recording:  where choices are kept for hindsight
        """
        self._panel = Panel(drafters, vocab_size=vocab_size)
        self._clock = clock
        self._recording = recording
        self.beliefs = Beliefs(self._panel.names, profile, sharpness=sharpness)
        self._is_model = {name: self._panel.is_model(name) for name in self._panel.names}
        self._controller = Controller(self.beliefs, self._is_model, itl_target=itl_target)
        self._overhead = self._controller.overhead
        self._step_idx = 0
        self._facts = StepFacts(0, 0, 0.0, 0.0, 0.0)
        self._proposed: dict[int, list[_Proposed]] = {}  # by seq_id
        self._met: set[int] = set()  # seq_ids of "auto" rows
        self._draft_seconds = 0.0
        self._paid_seconds = 0.0
        self._paid_name = ""
        self._started = 0.0
        self._step = StepCost()

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Every layer whose incoming residual stream some drafter wants to see, ascending."""
        return self._panel.hidden_layers

    @property
    def awaited(self) -> Collection[int] | None:
        """Of which sequences learn() wants to see the outcome, after draft(); None: of all."""
        return None if self._panel.has_observers else self._proposed.keys()

    @property
    def failed(self) -> tuple[str, ...]:
        """Drafters that failed since the last draft() began, once per failure."""
        return tuple(self._panel.failed)

    @property
    def extra_seconds(self) -> float:
        """Estimated, after learn(): what the last step would not have taken without guesses."""
        return self._step.extra

    # ---- draft ---------------------------------------------------------------------------

    def draft(self, rows: Seq[RowPlan]) -> StepDrafts:
        self._begin(rows)
        chosen = [no_draft(row) for row in rows]
        self._facts = facts_of(rows)
        self._step.attended = self._facts.attended
        auto, new, by_name = list[int](), list[RowPlan](), set[str]()  # auto: row indices
        for idx, row in enumerate(rows):
            name = row.request.drafter
            if name == "auto":
                if row.seq_id not in self._met:
                    new.append(row)
                if row.max_draft_tokens > 0:
                    auto.append(idx)
            elif name != "none":
                by_name.add(name)
        if new:
            self._meet(new)
        if by_name:
            recording = None if auto else self._recording
            facts = msgspec.structs.replace(self._facts) if recording else self._facts
            named = self._draft_by_name(by_name, rows, chosen, recording is not None)
            if recording is not None:
                nodes = {one.idx: range(len(one.judged.chances)) for one in named if one.judged}
                costs = self.beliefs.verify_costs
                recording.add(facts, named, nodes, costs, self._fixed_seconds, named=True)
        may_rest = auto and not by_name and self._recording is None
        if may_rest and self._controller.rests(self._step_idx, (rows[at].seq_id for at in auto)):
            for idx in auto:
                chosen[idx] = without_guess(chosen[idx], "no_proposal")
        elif auto:
            self._draft_by_choice(rows, [AutoRow(idx, rows[idx]) for idx in auto], chosen)
        costs, facts = self.beliefs.verify_costs, self._facts
        if facts.num_tokens:
            self._step.expected = costs.seconds(facts.num_tokens, facts.num_logits, facts.attended)
        seconds = self._clock() - self._started + costs.per_emitted * facts.emitted
        return StepDrafts(rows=chosen, seconds=seconds + self._step.expected)

    def _begin(self, rows: Seq[RowPlan]) -> None:
        self._step_idx += 1
        now = self._clock()
        last, self._step = self._step, StepCost()
        if rows:
            # A sequence that runs on waits for nothing: what lies between is our own work.
            self._step.last_seq = rows[-1].seq_id
            self._step.is_plain = not any(row.is_prefill for row in rows)
            if last.is_plain and any(row.seq_id == last.last_seq for row in rows):
                seconds = now - self._started - last.elsewhere
                self._overhead.observe(last.num_rows, last.num_asked, last.num_guesses, seconds)
        self._step.num_rows = len(rows)
        self._started, self._proposed = now, {}
        self._panel.begin(self._step_idx)
        self._draft_seconds = self._paid_seconds = 0.0

    def _meet(self, rows: Seq[RowPlan]) -> None:
        """Tell drafters of texts that they may have to guess later: the target's states of a prompt
        are gone once its step is over. A call for no guess, which reads nothing yet."""
        self._met.update(row.seq_id for row in rows)
        started = self._clock()
        for name in self._panel.readers_of_states:
            asked = [
                draft_row(row, name, 0, 1, 1.0)
                for row in rows
                if row.request.max_draft_tokens and self._panel.serves(name, row.request)
            ]
            if asked:
                self._panel.propose(name, asked)
        self._draft_seconds += self._clock() - started

    def _draft_by_name(
        self, names: set[str], rows: Seq[RowPlan], chosen: list[ChosenDraft], recorded: bool
    ) -> list[AutoRow]:
        """Rows whose request names a drafter: its K and width. What they got, where recorded."""
        named = list[AutoRow]()
        for name in names.intersection(self._panel.names):
            asked = [
                (idx, row.max_draft_tokens)
                for idx, row in enumerate(rows)
                if row.request.drafter == name
                and row.request.max_draft_tokens > 0  # K = 0 for good: nothing to keep up for
                and (row.max_draft_tokens or self._panel.keeps_kv(name))
            ]
            if not asked:
                continue
            widths = {rows[idx].request.draft_width for idx, _ in asked}
            for width in widths:  # nearly always one
                mine = [one for one in asked if rows[one[0]].request.draft_width == width]
                for idx, (draft, judged) in self._ask(name, rows, mine, width).items():
                    nodes = range(len(draft.token_ids))
                    self._choose(rows[idx], chosen, idx, name, draft, nodes, judged)
                    if recorded:
                        named.append(AutoRow(idx, rows[idx]))
                        named[-1].offer(name, judged)
        return named

    def _draft_by_choice(
        self, rows: Seq[RowPlan], auto: list[AutoRow], chosen: list[ChosenDraft]
    ) -> None:
        controller = self._controller
        names = [
            name
            for name in self._panel.names
            if self._panel.may_play(name)
            and any(self._panel.serves(name, row.plan.request) for row in auto)
        ]
        facts = msgspec.structs.replace(self._facts)
        controller.open(self._step_idx, facts, self._fixed_seconds)
        for call in controller.cheap_calls(auto, names):
            self._carry_out(call, rows, chosen)
        controller.fixed_seconds = self._fixed_seconds
        model = controller.model_call(auto, names)
        if model is not None:
            self._carry_out(model, rows, chosen)
            controller.fixed_seconds = self._fixed_seconds
        nodes: Mapping[int, Seq[int]] = {}
        if self._step.num_asked:
            nodes, _ = controller.admit(auto)
        else:
            controller.pass_by(auto, names)
        if self._recording is not None:
            costs = self.beliefs.verify_costs
            self._recording.add(self._facts, auto, nodes, costs, self._fixed_seconds)
        for row in auto:
            mine = nodes.get(row.idx)
            if mine is None or row.judged is None:
                reason = "no_proposal" if row.judged is None else "not_worth_it"
                chosen[row.idx] = without_guess(chosen[row.idx], reason)
            else:
                self._choose(
                    row.plan, chosen, row.idx, row.name, row.judged.draft, mine, row.judged
                )

    @property
    def _fixed_seconds(self) -> float:
        """What this step takes besides the forward and the choosing of tokens."""
        step, own = self._step, self._overhead
        return own.plain(step.num_rows) + own.per_ask * step.num_asked + self._draft_seconds

    def _carry_out(self, call: Call, rows: Seq[RowPlan], chosen: list[ChosenDraft]) -> None:
        before = self._draft_seconds
        asked = [(row.idx, num_guesses) for row, num_guesses in call.rows]
        answers = self._ask(call.name, rows, asked, call.width)
        self._controller.took(call, [answers[row.idx][1] for row, _ in call.rows])
        if self._panel.keeps_kv(call.name):
            for idx, (draft, _) in answers.items():
                kv_lens = {**chosen[idx].kv_lens, call.name: draft.kv_len}
                chosen[idx] = msgspec.structs.replace(chosen[idx], kv_lens=kv_lens)
        if call.is_paid:
            self._paid_seconds = self._draft_seconds - before
            self._paid_name = call.name

    def _choose(
        self,
        row: RowPlan,
        chosen: list[ChosenDraft],
        idx: int,
        name: str,
        draft: Draft,
        nodes: Seq[int],
        judged: Judged,
    ) -> None:
        """Let row idx verify these nodes of a draft."""
        kv_lens, reason, fed = chosen[idx].kv_lens, chosen[idx].reason, 0
        if self._panel.keeps_kv(name):
            kv_lens = {**kv_lens, name: draft.kv_len}
            fed = num_fed(row, draft)
        expected = sum(judged.chances[node] for node in nodes if node < len(judged.chances))
        kept = pruned(draft, nodes)
        chosen[idx] = ChosenDraft(
            draft=kept,
            drafter=name,
            expected=expected,
            reason="" if nodes else reason or "no_proposal",
            kv_lens=kv_lens,
            num_fed=fed,
        )
        self._step.num_guesses += len(nodes)
        self._facts.num_tokens += len(nodes)
        self._facts.num_logits += len(nodes)
        self._facts.emitted += expected
        self._facts.attended += len(nodes) * len(row.history)

    def _ask(
        self, name: str, rows: Seq[RowPlan], asked: Seq[tuple[int, int]], width: int
    ) -> dict[int, tuple[Draft, Judged]]:
        """By row index, what the drafter proposes; empty drafts if it is benched, fails, or has
        nothing to do with a row.

        asked: (row index, K)
        """
        answers = dict.fromkeys((idx for idx, _ in asked), _NOTHING)
        asked = [one for one in asked if self._panel.serves(name, rows[one[0]].request)]
        if not asked:
            return answers
        sharpness = self.beliefs.sharpness[name]
        betas = [sharpness.pick() if self._is_model[name] else 1.0 for _ in asked]
        self._step.num_asked += len(asked)
        draft_rows = [
            draft_row(rows[idx], name, num_guesses, width, beta)
            for (idx, num_guesses), beta in zip(asked, betas, strict=True)
        ]
        num_unread = 0
        if self._is_model[name]:
            num_unread = sum(self.beliefs.num_unread(rows[idx], name) for idx, _ in asked)
        started = self._clock()
        proposals = self._panel.propose(name, draft_rows)
        seconds = self._clock() - started
        self._draft_seconds += seconds
        if proposals is None:
            proposals = [Draft(kv_len=row.kv_len) for row in draft_rows]
        num_steps = 0
        for (idx, _), draft, beta in zip(asked, proposals, betas, strict=True):
            row = rows[idx]
            draft = self._panel.known_guesses(draft)
            draft = within_constraint(draft, row.request, row.history)
            judged = self.beliefs.judge(name, row.seq_id, draft)
            answers[idx] = draft, judged
            if not judged.chances:
                continue
            teaches = False
            if self._is_model[name]:
                num_steps = max(num_steps, num_levels(draft))
                self.beliefs.track(row.seq_id, name).num_read = row.start + row.num_tokens
                teaches = row.request.verify == "replay" and row.request.params.temperature > 0
            proposed = _Proposed(name, judged, width, beta if teaches else 0.0)
            self._proposed.setdefault(row.seq_id, []).append(proposed)
        self._learn_cost(name, len(asked), num_unread, width, num_steps, seconds)
        return answers

    def _learn_cost(
        self,
        name: str,
        num_rows: int,
        num_unread: int,
        width: int,
        num_steps: int,
        seconds: float,
    ) -> None:
        """num_unread: known tokens read before; num_steps: levels of the deepest draft"""
        costs = self.beliefs.draft_costs[name]
        if name in self._panel.failed or not self._panel.may_play(name):
            return
        if not self._is_model[name]:
            costs.observe(num_rows, 1, 0, seconds)
        elif num_steps:
            costs.observe(num_rows, num_steps, num_unread, seconds)
            if width > 1:
                self.beliefs.tree_depth[name][1 if width == 2 else 2].add(num_steps)

    # ---- learn ---------------------------------------------------------------------------

    def learn(self, learned: Learned) -> None:
        facts, costs = self._facts, self.beliefs.verify_costs
        self._step.set_extra(facts, learned, self._draft_seconds, costs, self._overhead)
        if facts.num_tokens:
            costs.observe(
                facts.num_tokens,
                facts.num_logits,
                facts.attended,
                learned.forward_seconds,
                expected=self._step.expected,
            )
        num_paid = 0
        for outcome in learned.outcomes:
            if outcome.num_computed == len(outcome.token_ids):
                continue  # a chunk that did not sample
            emitted = outcome.token_ids[-1 - outcome.num_accepted :]
            if outcome.drafter == self._paid_name:
                num_paid += outcome.num_accepted
            for name, judged, width, beta in self._proposed.get(outcome.seq_id, ()):
                right = self.beliefs.settle(name, outcome.seq_id, judged, width, emitted)
                if beta and right is not None:
                    self.beliefs.sharpness[name].learn(beta, right)
        costs.observe_choosing(learned.num_emitted, learned.verify_seconds)
        self._panel.observe(learned.outcomes)
        self._step.elsewhere = (
            learned.forward_seconds + learned.verify_seconds + self._draft_seconds
        )
        seconds = self._clock() - self._started
        self._controller.close(seconds, self._paid_seconds, num_paid)

    def forget(self, seq_ids: Seq[int], ended: Seq[Ended] = ()) -> None:
        """These sequences ended or were preempted; `ended`: those that will not come back."""
        for seq_id in seq_ids:
            self.beliefs.forget(seq_id)
            self._met.discard(seq_id)
        self._panel.forget(seq_ids, ended)

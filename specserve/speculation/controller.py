"""Per request and step: who guesses and how many tokens. K = 0 is an ordinary choice, and free.

1. Cheap drafters (n-gram, suffix: far below a step) propose first, as long as what they gain is
   worth what they cost; where they find nothing for long they are asked less and less often.
2. Drafters that run a model are decided about before they are called, from what such drafts were
   worth at each depth for requests that fared alike: for whom, how deep, chain or tree.
3. All guesses race for the step (admit.py).
What looks not worth it is tried now and then: models from an allowance of 0.5 % of the time, cheap
drafters for all rows in one call, so far apart that these calls take 0.2 %.

For sampled drafts under rules that need their law (rejection, block) K is fixed before the draft
exists: to drop a guess by its own value bends the law (verification.md 2.6).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Final

import msgspec

from specserve.speculation.admit import (
    HOPELESS,
    Candidate,
    Race,
    by_chance,
    net_share,
    race,
    race_with_calls,
)
from specserve.speculation.allowance import Allowance
from specserve.speculation.beliefs import Beliefs, Track
from specserve.speculation.chosen import StepFacts
from specserve.speculation.looks import Looks
from specserve.speculation.offers import AutoRow, Call
from specserve.speculation.overhead import Overhead
from specserve.speculation.survival import Judged

EXPLORE_EVERY: Final = 64  # steps
_TRIAL_DEPTH: Final = 3
_TRIAL_ROWS: Final = 4
_KNOWN: Final = 100  # outcomes from which a drafter is known
_REFRESH_EVERY: Final = 256  # steps with guesses before one without, to know what that costs
_NARROW: Final = 1.1  # where guesses gain less than this, such a step counts as 8 of them
_WORTH: Final = 1.01  # guesses must promise this much more than none: costs are known so well
_CHEAP: Final = 0.02  # of a step, all rows together
_MARGIN: Final = 1.005  # a call must promise this much more than going without
_SHAPE_WIDTH: Final = (1, 2, 4)  # children per node of the shapes in survival.py
_MOST_TREE_ROWS: Final = 8
_TREE_EVERY: Final = 16  # calls for chains
_SHAPE_KNOWN: Final = 24.0  # outcomes
_Nodes = Mapping[int, Seq[int]]  # by AutoRow.idx
_LONGEST_REST: Final = 8  # steps: how late what has become worth it is seen
_DEEPEST: Final = 10  # of a draft whose scores are not known yet


class Controller:
    """One step at a time: rests, or open, cheap_calls, model_call, admit or pass_by; close."""

    def __init__(
        self, beliefs: Beliefs, is_model: Mapping[str, bool], *, itl_target: float | None = None
    ) -> None:
        """is_model: drafters that keep KV or read hidden states, never cheap

        itl_target: seconds a step should stay below, as far as guesses have a say in it
        """
        self._beliefs = beliefs
        self._is_model = dict(is_model)
        self._limit = itl_target or 0.0
        self._facts = StepFacts(0, 0, 0.0, 0.0, 0.0)
        self._ladder: list[float] = []
        self._step_idx = 0
        self._seconds_per_token = 0.0
        self._allowance = Allowance()
        self._plain_seconds = 0.0  # of this step without any guess
        self._debt = 0.0  # of this step's paid call: seconds that verifying takes longer
        self._looks = Looks(is_model)
        self._called_at = dict.fromkeys(is_model, -EXPLORE_EVERY)
        self._since_plain = 0
        self._rests_until, self._resting = 0, set[int]()  # step index, and of whom: seq_ids
        self._most_chosen = 8.0  # guesses of one row in one step, lately
        self._num_chains = self._num_trees = 0
        self.overhead = Overhead()
        self.fixed_seconds = 0.0  # of this step: our own work, drafts made

    # ---- the step --------------------------------------------------------------------------

    def open(self, step_idx: int, facts: StepFacts, fixed_seconds: float) -> None:
        self._step_idx, self._rests_until = step_idx, 0
        self._facts = facts
        self._ladder = []
        self._debt = 0.0
        self.fixed_seconds = fixed_seconds
        self._plain_seconds = fixed_seconds + self._rungs(0)[0]

    def cheap_calls(self, rows: Seq[AutoRow], names: Seq[str]) -> list[Call]:
        """Whom to ask before anything is decided; nobody in a step that refreshes K = 0."""
        if self._is_refresh or not rows or not self.overhead.is_known:
            return []
        step = self._rungs(0)[0]
        calls = []
        for name in names:
            costs = self._beliefs.draft_costs[name]
            each = costs.seconds(len(rows), 1) / len(rows)
            if not self._is_cheap(name, each * len(rows), step):
                continue
            asked = self._due(rows, name, each + self.overhead.per_ask, step)
            if asked:
                most = int(2 * self._most_chosen) + 2  # what stands behind is hardly ever chosen
                pairs = tuple((row, min(row.cap, most)) for row in asked)
                calls.append(Call(name, pairs, self._cheap_width(rows)))
        return calls

    def took(self, call: Call, judged: Seq[Judged]) -> None:
        """What the rows of a call got. Remembers whether asking is worth it."""
        for (row, _), one in zip(call.rows, judged, strict=True):
            track = self._track(row, call.name)
            track.asked_at = self._step_idx
            row.asked.append(call.name)
            track.empty = 0 if one.chances else track.empty + 1
            if self._is_model[call.name] and track.empty:
                track.ask_at = self._step_idx + (2 ** min(track.empty, 6) if track.empty > 3 else 0)
                continue
            if self._is_model[call.name]:
                row.judged = None  # it was called because it is better than what was there
            row.offer(call.name, one)
            row.fixed = one.draft.probs is not None and not row.replay
            row.forced = call.is_trial

    def model_call(self, rows: Seq[AutoRow], names: Seq[str]) -> Call | None:
        """The drafter whose call promises most, if any promises more than going without."""
        if self._is_refresh or not rows:
            return None
        costly = [name for name in names if not self._is_cheap(name, self._cost(name, rows), None)]
        self._beliefs.decided.update(costly)
        looked_at = [name for name in costly if self._looks.is_due(name, self._step_idx)]
        due = [n for n in looked_at if self._is_known(n) or self._can_pay(n, rows)]
        best: Call | None = None
        if due:
            chances = sorted(
                (s for row in rows if row.judged for s in row.judged.chances), reverse=True
            )
            without = self._race(chances)
            bar = without.goodput * _MARGIN
            for name in due:
                call, goodput = self._best_call(name, rows)
                if call is not None and goodput > bar:
                    best, bar = call, goodput
                    self._looks.found(name)
                elif not without.num_chosen:
                    self._looks.missed(name, self._step_idx)
                else:  # what beat it is soon gone, but of many rows a look takes time
                    self._looks.put_off(name, self._step_idx, len(rows))
        call = best or self._trial(costly, rows)
        if call is None:
            return None
        self._called_at[call.name] = self._step_idx
        if call.is_trial or call.is_paid or not self._is_known(call.name):
            num_guesses = sum(count for _, count in call.rows)
            ladder = self._rungs(num_guesses)
            self._debt = max(0.0, ladder[num_guesses] - ladder[0])
            call = msgspec.structs.replace(call, is_paid=True)
        return call

    def admit(self, rows: Seq[AutoRow]) -> tuple[dict[int, list[int]], Race]:
        """By AutoRow.idx, the nodes to verify, ascending; rows without any are missing."""
        chosen: dict[int, list[int]] = {}
        open_nodes: list[tuple[float, int, int]] = []
        for at, row in enumerate(rows):
            if row.judged is None or not row.judged.chances:
                continue
            if row.fixed or row.forced:
                judged = row.judged
                nodes = list(range(len(judged.draft.token_ids if row.fixed else judged.chances)))
                chosen[row.idx] = nodes
                self._facts.num_tokens += len(nodes)
                self._facts.num_logits += len(nodes)
                self._facts.emitted += row.expected
                self._ladder = []
                continue
            for node, chance in enumerate(row.judged.chances):
                if chance >= HOPELESS:
                    open_nodes.append((-chance, at, node))
        open_nodes.sort()
        without = self._race(())
        won = self._race([-chance for chance, _, _ in open_nodes])
        if won.goodput < _WORTH * without.goodput:
            won = without
        for _, at, node in open_nodes[: won.num_chosen]:
            chosen.setdefault(rows[at].idx, []).append(node)
        self._most_chosen *= 0.95
        for nodes in chosen.values():
            nodes.sort()
            self._most_chosen = max(self._most_chosen, float(len(nodes)))
        self._beliefs.note_gains(rows, chosen, net_share(won, without))
        is_narrow = won.goodput < _NARROW * without.goodput
        self._since_plain = self._since_plain + (8 if is_narrow else 1) if chosen else 0
        self._seconds_per_token = 1.0 / won.goodput
        return chosen, won

    def pass_by(self, rows: Seq[AutoRow], names: Seq[str]) -> None:
        """In place of admit, where nobody was asked."""
        if self.overhead.is_known and not self._is_refresh:
            self._rests_until = self._looks.next_due(names, self._step_idx, _LONGEST_REST)
        self._since_plain, self._resting = 0, {row.plan.seq_id for row in rows}
        self._seconds_per_token = 1.0 / self._race(()).goodput

    def rests(self, step_idx: int, seq_ids: Iterable[int]) -> bool:
        """Whether nobody is due to be asked: then a step with these rows needs no call but this."""
        if step_idx >= self._rests_until or not self._resting.issuperset(seq_ids):
            return False
        self._step_idx, self._debt = step_idx, 0.0
        return True

    def close(self, seconds: float, paid_seconds: float, num_accepted: int) -> None:
        """paid_seconds: of a paid call's draft, which brought num_accepted tokens"""
        self._allowance.earn(seconds, self._plain_seconds)
        if paid_seconds:
            brought = num_accepted * self._seconds_per_token
            self._allowance.pay(paid_seconds + self._debt - brought)

    # ---- inside ----------------------------------------------------------------------------

    @property
    def _is_refresh(self) -> bool:
        return self._since_plain >= _REFRESH_EVERY

    def _can_pay(self, name: str, rows: Seq[AutoRow]) -> bool:
        """Whether the allowance lasts for a short draft of all rows, were all of it wrong."""
        return self._allowance.covers(
            self._beliefs.draft_costs[name].seconds(len(rows), _TRIAL_DEPTH)
        )

    def _is_known(self, name: str) -> bool:
        return self._beliefs.survival[name].num_learned >= _KNOWN

    def _track(self, row: AutoRow, name: str) -> Track:
        return self._beliefs.track(row.plan.seq_id, name)

    def _cost(self, name: str, rows: Seq[AutoRow]) -> float:
        return self._beliefs.draft_costs[name].seconds(len(rows), 1)

    def _is_cheap(self, name: str, seconds: float, step: float | None) -> bool:
        bound = _CHEAP * (self._rungs(0)[0] if step is None else step)
        return not self._is_model[name] and seconds < bound

    def _due(self, rows: Seq[AutoRow], name: str, each: float, step: float) -> Seq[AutoRow]:
        """Rows that asking is worth its cost for, and new ones; now and then all of them."""
        if self._looks.is_due(name, self._step_idx):
            self._looks.took(name, self._step_idx, each * len(rows), step)
            return rows
        track, bar = self._beliefs.track, each / max(self._seconds_per_token, 1e-9)
        tracks = ((row, track(row.plan.seq_id, name)) for row in rows)
        return [row for row, mine in tracks if mine.gain >= bar or mine.asked_at < 0]

    def _cheap_width(self, rows: Seq[AutoRow]) -> int:
        """Children per node: trees where rows are free, chains where they are not."""
        if len(rows) > _MOST_TREE_ROWS or not all(row.replay for row in rows):
            return 1
        room = self._free_room(len(rows) * 8) / len(rows)
        return 4 if room >= 7 else 2 if room >= 4 else 1

    def _free_room(self, most: int) -> int:
        """Guesses that fit before the forward costs a tenth more."""
        ladder = self._rungs(most)
        bound = 1.1 * ladder[0]
        return sum(1 for seconds in ladder[1 : most + 1] if seconds <= bound)

    def _rungs(self, most: int) -> list[float]:
        if len(self._ladder) <= most:
            facts = self._facts
            most = max(most, 40) if most else 0  # where nobody is asked, one rung is all
            ladder = self._beliefs.verify_costs.ladder(
                facts.num_tokens, facts.num_logits, facts.attended, facts.context, most
            )
            more = self.overhead.per_guess
            self._ladder = [seconds + more * count for count, seconds in enumerate(ladder)]
        return self._ladder

    def _race(self, chances: Seq[float]) -> Race:
        return race(
            chances,
            self._rungs(len(chances)),
            num_rows=self._facts.emitted,
            fixed=self.fixed_seconds,
            per_emitted=self._beliefs.verify_costs.per_emitted,
            limit=self._limit,
        )

    def _best_call(self, name: str, rows: Seq[AutoRow]) -> tuple[Call | None, float]:
        """The call of one drafter with the most tokens per second, and how many those are."""
        beliefs = self._beliefs
        survival, costs = beliefs.survival[name], beliefs.draft_costs[name]
        candidates: list[Candidate] = []
        reading = []
        for at, row in enumerate(rows):
            reading.append(beliefs.reading_seconds(row.plan, name) if self._is_model[name] else 0.0)
            track = self._track(row, name)
            hoped: list[float] = []
            if self._step_idx >= track.ask_at:
                most = min(row.cap, _DEEPEST if self._is_known(name) else _TRIAL_DEPTH)
                hoped = survival.marginal(track.habit.bin, most, hopeless=HOPELESS)
            if sum(hoped) > row.expected:
                candidates += [Candidate(s, at, depth) for depth, s in enumerate(hoped, start=1)]
            elif row.judged is not None:
                candidates += [Candidate(s, at, 0) for s in row.judged.chances]
        candidates.sort(key=by_chance)
        won = race_with_calls(
            candidates,
            self._rungs(len(candidates)),
            costs,
            num_rows=self._facts.emitted,
            fixed=self.fixed_seconds,
            per_emitted=beliefs.verify_costs.per_emitted,
            catch_up=reading,
            limit=self._limit,
        )
        depths: dict[int, int] = {}
        for candidate in candidates[: won.num_chosen]:
            if candidate.depth:
                depths[candidate.row] = max(depths.get(candidate.row, 0), candidate.depth)
        call = Call(name, tuple((rows[at], depth) for at, depth in depths.items()))
        best = (call, won.goodput) if depths else (None, 0.0)
        tree = self._best_tree(name, rows, sum(reading))
        if tree is not None and tree[1] > best[1]:
            self._num_trees += 1
            is_check = self._num_trees % _TREE_EVERY == 0 and best[0] is not None
            return best if is_check else tree  # what chains are worth must not be forgotten
        return (self._as_tree(best[0], rows), best[1]) if best[0] is not None else best

    def _as_tree(self, call: Call, rows: Seq[AutoRow]) -> Call:
        """Now and then a tree in place of a chain, where it costs little, to learn its worth."""
        self._num_chains += 1
        few = len(rows) <= _MOST_TREE_ROWS and all(row.replay for row in rows)
        if self._num_chains % _TREE_EVERY or not few:
            return call
        room = self._free_room(sum(row.cap for row in rows)) // len(rows)
        shape = 1 + self._num_chains // _TREE_EVERY % 2
        deepest = max(depth for _, depth in call.rows)
        levels = round(self._beliefs.tree_depth[call.name][shape].value)
        costs = self._beliefs.draft_costs[call.name]
        more = costs.seconds(len(rows), levels) - costs.seconds(len(call.rows), deepest)
        if room < 2 * deepest or not self._allowance.covers(more):
            return call
        width = _SHAPE_WIDTH[shape]
        asked = tuple((row, min(row.cap, room)) for row, _ in call.rows)
        return Call(call.name, asked, width, is_paid=True)

    def _best_tree(
        self, name: str, rows: Seq[AutoRow], reading: float
    ) -> tuple[Call, float] | None:
        """A tree for every row where that many guesses are nearly free."""
        if len(rows) > _MOST_TREE_ROWS or not all(row.replay for row in rows):
            return None
        beliefs, facts = self._beliefs, self._facts
        room = self._free_room(sum(row.cap for row in rows)) // len(rows)
        sizes = [min(row.cap, room) for row in rows]
        if min(sizes) < 3:
            return None
        best: tuple[Call, float] | None = None
        for shape in (1, 2):
            if beliefs.survival[name].num_of_shape(shape) < _SHAPE_KNOWN:
                continue
            emitted = facts.emitted
            num_steps = max(1, round(beliefs.tree_depth[name][shape].value))
            for row, size in zip(rows, sizes, strict=True):
                habit = self._track(row, name).habit.bin
                deepest = min(size, num_steps)
                emitted += sum(
                    beliefs.survival[name].marginal(habit, deepest, shape, hopeless=HOPELESS)
                )
            seconds = (
                self.fixed_seconds
                + reading
                + beliefs.draft_costs[name].seconds(len(rows), num_steps)
                + self._rungs(sum(sizes))[sum(sizes)]
                + beliefs.verify_costs.per_emitted * emitted
            )
            if (best is None or emitted / seconds > best[1]) and not 0 < self._limit < seconds:
                asked = tuple(zip(rows, sizes, strict=True))
                best = Call(name, asked, _SHAPE_WIDTH[shape]), emitted / seconds
        return best

    def _trial(self, names: Seq[str], rows: Seq[AutoRow]) -> Call | None:
        """A short draft for those that were not tried for long, if the allowance lasts."""
        for name in names:
            if not self._can_pay(name, rows[:_TRIAL_ROWS]):
                continue
            distance = EXPLORE_EVERY if self._is_known(name) else 8
            if self._step_idx - self._called_at[name] < distance:
                continue
            order = sorted(
                (row.expected > 1, self._track(row, name).asked_at, at)
                for at, row in enumerate(rows)
            )
            asked = [rows[at] for _, _, at in order[:_TRIAL_ROWS]]
            depths = tuple((row, min(row.cap, _TRIAL_DEPTH)) for row in asked)
            return Call(name, depths, is_trial=True)
        return None

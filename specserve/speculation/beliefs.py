"""What is known about drafters and costs, and how each request fares. The controller's memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Final

from specserve.drafting import Draft
from specserve.speculation.admit import HOPELESS
from specserve.speculation.costs import DraftCosts, Profile, RobustMean, VerifyCosts
from specserve.speculation.offers import AutoRow
from specserve.speculation.sharpness import Sharpness
from specserve.speculation.survival import MARGINAL, NUM_SHAPES, Habit, Judged, Survival
from specserve.types import RowPlan

_FIRST_GAIN: Final = 0.5  # accepted guesses per call, before anything is known
_AMORTISE: Final = 64  # steps that reading a text is spread over
_FOLLOW: Final = 0.2
_FOLLOW_ALL: Final = 0.02
_FIRST_DEPTH: Final = 4.0  # levels of a tree


class Track:
    """One request and one drafter.

    gain:     guesses that were worth something, per call, lately
    asked_at: step of the last call, -1: none; ask_at: step before which it is not asked
    empty:    calls in a row that brought no guess
    num_read: known tokens when it last guessed: it had read all that it can
    """

    __slots__ = ("ask_at", "asked_at", "empty", "gain", "habit", "num_read")

    def __init__(self, gain: float) -> None:
        """gain: what calls for other requests were worth"""
        self.habit = Habit()
        self.gain = gain
        self.asked_at = -1
        self.ask_at = 0
        self.empty = 0
        self.num_read = 0


class Beliefs:
    def __init__(
        self, names: Iterable[str], profile: Profile, *, sharpness: float | None = None
    ) -> None:
        """sharpness: beta of every drafter; None: learned"""
        known = tuple(names)
        self.verify_costs = VerifyCosts(profile)
        self.draft_costs = {name: DraftCosts() for name in known}
        self.survival = {name: Survival() for name in known}
        self.sharpness = {name: Sharpness(sharpness) for name in known}
        self.tree_depth = {
            name: [RobustMean(_FIRST_DEPTH, 0.1, weight=1) for _ in range(NUM_SHAPES)]
            for name in known
        }
        self.decided: set[str] = set()  # drafters that are decided about before they are called
        self._gain = dict.fromkeys(known, _FIRST_GAIN)  # of all requests, per call
        self._tracks: dict[str, dict[int, Track]] = {name: {} for name in known}

    def track(self, seq_id: int, name: str) -> Track:
        tracks = self._tracks[name]
        track = tracks.get(seq_id)
        if track is None:
            track = tracks[seq_id] = Track(self._gain[name])
        return track

    def num_unread(self, row: RowPlan, name: str) -> int:
        """Known tokens that a drafter would read before it guesses, the last one left out.

        Its KV alone does not tell: behind a gap, on a prefix hit that it has no part in, it is
        never valid although all has been read.
        """
        num_read = max(row.draft_kv_lens.get(name, 0), self.track(row.seq_id, name).num_read)
        return max(0, row.start + row.num_tokens - num_read - 1)

    def reading_seconds(self, row: RowPlan, name: str) -> float:
        """To read the text before guessing, spread over the steps that will profit."""
        unread = self.num_unread(row, name)
        if unread <= 1:
            return 0.0
        remaining = row.request.max_tokens - (len(row.history) - len(row.request.prompt_ids))
        per_token = self.draft_costs[name].per_catch_up
        return unread * per_token / max(1, min(_AMORTISE, remaining))

    def note_gains(
        self, rows: Iterable[AutoRow], chosen: Mapping[int, Seq[int]], share: float
    ) -> None:
        """What asking was worth: the expected tokens of guesses that won the race, net.

        chosen: by AutoRow.idx, nodes; share: what is left once verifying them is paid for
        """
        for row in rows:
            nodes = chosen.get(row.idx, ())
            for name in row.asked:
                value = 0.0
                if nodes and name == row.name and row.judged is not None:
                    chances = row.judged.chances
                    value = sum(chances[node] for node in nodes if node < len(chances)) * share
                track = self.track(row.plan.seq_id, name)
                track.gain += _FOLLOW * (value - track.gain)
                self._gain[name] += _FOLLOW_ALL * (value - self._gain[name])

    def forget(self, seq_id: int) -> None:
        for tracks in self._tracks.values():
            tracks.pop(seq_id, None)

    def judge(self, name: str, seq_id: int, draft: Draft) -> Judged:
        return self.survival[name].judge(draft, self.track(seq_id, name).habit.bin, HOPELESS)

    def settle(
        self, name: str, seq_id: int, judged: Judged, width: int, emitted: Seq[int]
    ) -> bool | None:
        """Walk what was emitted through what was proposed; whether the first guess was right."""
        survival, habit = self.survival[name], self.track(seq_id, name).habit
        token_ids, parents, cells = judged.draft.token_ids, judged.draft.parents, judged.cells
        is_decided = name in self.decided
        shape = MARGINAL + (0 if width == 1 else 1 if width == 2 else 2)
        node, depth, first = -1, 1, None
        extended: bool | None = None
        for idx, cell in enumerate(cells):
            if parents[idx] != node:
                continue
            right = token_ids[idx] == emitted[depth - 1]
            survival.learn(cell, right)
            if extended is None:
                habit.add(right)
                first = right if depth == 1 else first
            extended = right
            if right:
                if is_decided:
                    survival.learn(survival.cell(shape, judged.habit, depth), True)
                node, depth, extended = idx, depth + 1, None
                if depth > len(emitted):
                    break
        if extended is False and is_decided:
            survival.learn(survival.cell(shape, judged.habit, depth), False)
        return first

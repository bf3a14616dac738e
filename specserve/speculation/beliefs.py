"""What is known about drafters and costs, and how each request fares. The controller's memory."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Final

from specserve.drafting import Draft
from specserve.speculation.admit import HOPELESS
from specserve.speculation.costs import DraftCosts, Profile, RobustMean, VerifyCosts
from specserve.speculation.sharpness import Sharpness
from specserve.speculation.survival import MARGINAL, NUM_SHAPES, Habit, Judged, Survival

_FIRST_GAIN: Final = 0.5  # accepted guesses per call, before anything is known
_FIRST_DEPTH: Final = 4.0  # levels of a tree


class Track:
    """One request and one drafter.

    gain:     guesses that were worth something, per call, lately
    asked_at: step of the last call; ask_at, wait: when to ask again although it gains little
    empty:    calls in a row that brought no guess
    """

    __slots__ = ("ask_at", "asked_at", "empty", "gain", "habit", "wait")

    def __init__(self) -> None:
        self.habit = Habit()
        self.gain = _FIRST_GAIN
        self.asked_at = -1
        self.ask_at = 0
        self.wait = 1
        self.empty = 0


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
        self._tracks: dict[int, dict[str, Track]] = {}

    def track(self, seq_id: int, name: str) -> Track:
        tracks = self._tracks.setdefault(seq_id, {})
        track = tracks.get(name)
        if track is None:
            track = tracks[name] = Track()
        return track

    def forget(self, seq_id: int) -> None:
        self._tracks.pop(seq_id, None)

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

"""How likely a guess is to be right if its parent is: a drafter's opinion, corrected by outcomes.

Binned Beta means with decay, so that what is predicted is what was counted (calibration) and what
changes is followed. A guess falls into a cell of its drafter by

    kind   the drafter's raw score, or the guess's rank among its siblings where there is none
    habit  how its request has fared with this drafter lately
    depth  how deep it lies

and a cell with few outcomes leans on the same kind in all habits and depths. The chance
to survive is the product along the path, so a parent never survives less often than its child.
Whether a guess was right is known for every proposal, verified or not, as far as the text went on.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final, NamedTuple

from specserve.drafting import Draft, is_chain

_SCORE_BINS: Final = 20
_BLIND_BINS: Final = 3  # no score: first child, second child, later ones
# Rates before a call is made, when no score can be known: one kind per shape of draft.
MARGINAL: Final = _SCORE_BINS + _BLIND_BINS
NUM_SHAPES: Final = 3  # a chain, a tree of 2 children per node, a tree of more
_KINDS: Final = MARGINAL + NUM_SHAPES
_HABITS: Final = 9  # the last one: not known yet
_UNKNOWN: Final = _HABITS - 1
_DEPTHS: Final = 7
_DEPTH_BIN: Final = (0, 0, 1, 2, 3, 4, 4, 5, 5, 5, 5, *(6,) * 54)
_PER_KIND: Final = _HABITS * _DEPTHS
_LEAN: Final = 6.0  # outcomes that the wider count is worth in a cell
_FULL: Final = 256.0  # halve a cell's counts here: what was long ago matters less
_FIRST_HABIT: Final = 0.4
_HABIT_COUNTS: Final = 4  # outcomes that it is worth: three misses in a row make no bad request
_STALE: Final = 256  # outcomes after which all cells look again at the wider counts


def _edges() -> tuple[int, ...]:
    """64 steps of a score -> bin: finer at both ends, where odds change fastest."""
    bounds: tuple[float, ...] = (0.015, 0.03, 0.06, 0.1, 0.16, 0.22, 0.28, 0.34, 0.4, 0.46)
    bounds += (0.52, 0.58, 0.64, 0.7, 0.76, 0.82, 0.88, 0.93, 0.97)
    return tuple(sum(1 for bound in bounds if at / 64 >= bound) for at in range(65))


_BIN_OF: Final = _edges()


def _prior(kind: int) -> tuple[float, float]:
    """(chance, worth in outcomes) where nothing was seen: what the drafter itself says.

    Marginal chances begin hopefully: a drafter that is never called is never known.
    """
    if kind >= MARGINAL:
        return 0.8, 8.0
    if kind >= _SCORE_BINS:
        return 0.5, 4.0
    steps = [at for at, found in enumerate(_BIN_OF) if found == kind]
    return (steps[0] + steps[-1] + 1) / 130, 4.0


_PRIORS: Final = tuple(_prior(kind) for kind in range(_KINDS))
# By habit, then by 64 steps of a score: the first cell of its kind.
_OFFSETS: Final = tuple(
    tuple(_BIN_OF[at] * _PER_KIND + habit * _DEPTHS for at in range(65)) for habit in range(_HABITS)
)


class Habit:
    """How one request fares with one drafter: a mean of recent outcomes of first children."""

    __slots__ = ("bin", "count", "rate")

    def __init__(self) -> None:
        self.rate = _FIRST_HABIT
        self.count = 0
        self.bin = _UNKNOWN

    def add(self, right: bool) -> None:
        self.count += 1
        weight = max(0.06, 1.0 / (self.count + _HABIT_COUNTS))
        self.rate += weight * (right - self.rate)
        self.bin = min(int(self.rate * (_HABITS - 1)), _HABITS - 2)


class Judged(NamedTuple):
    """A draft's leading nodes, as far as they are worth a look.

    chances: to survive from the root, never above the parent's; depths: 1 for the root's children
    cells:   where each node's outcome will be counted
    """

    draft: Draft
    chances: list[float]
    depths: Seq[int]
    cells: list[int]
    habit: int

    @property
    def expected(self) -> float:
        """Guesses right, on average, if all are verified."""
        return sum(self.chances)


class Survival:
    """One drafter's cells. chance() of a cell; learn() an outcome."""

    def __init__(self) -> None:
        self._right = [0.0] * (_KINDS * _PER_KIND)
        self._tried = [0.0] * (_KINDS * _PER_KIND)
        self._right_of_kind = [0.0] * _KINDS
        self._tried_of_kind = [0.0] * _KINDS
        self._cached = [-1.0] * (_KINDS * _PER_KIND)
        self._since = 0
        self.num_learned = 0

    @staticmethod
    def cell(kind: int, habit: int, depth: int) -> int:
        """habit: Habit.bin; depth: 1 for what follows the last known token"""
        at = _DEPTH_BIN[min(depth, len(_DEPTH_BIN) - 1)]
        return kind * _PER_KIND + habit * _DEPTHS + at

    def chance(self, cell: int) -> float:
        cached = self._cached[cell]
        return cached if cached >= 0 else self._refresh(cell)

    def judge(self, draft: Draft, habit: int, hopeless: float) -> Judged:
        """A chain's guesses until one is as good as hopeless, and all guesses of a tree.

        The first one always: what becomes of it tells whether it still is.
        """
        if not is_chain(draft):
            return self._judge_tree(draft, habit)
        chances, cells, cached = list[float](), list[int](), self._cached
        bins = _OFFSETS[habit] if draft.scores else ()
        offset = _SCORE_BINS * _PER_KIND + habit * _DEPTHS
        alive = 1.0
        for idx in range(min(len(draft.token_ids), len(_DEPTH_BIN) - 1)):
            if bins:
                offset = bins[int(draft.scores[idx] * 64)]
            cell = offset + _DEPTH_BIN[idx + 1]
            chance = cached[cell]
            alive *= chance if chance >= 0 else self._refresh(cell)
            if alive < hopeless and idx:
                break
            chances.append(alive)
            cells.append(cell)
        return Judged(draft, chances, range(1, len(chances) + 1), cells, habit)

    def _judge_tree(self, draft: Draft, habit: int) -> Judged:
        chances, depths, cells = list[float](), list[int](), list[int]()
        parents = draft.parents
        for idx, parent in enumerate(parents):
            depth = 1 if parent < 0 else depths[parent] + 1
            if draft.scores:
                offset = _OFFSETS[habit][int(draft.scores[idx] * 64)]
            else:
                rank = min(parents[:idx].count(parent), _BLIND_BINS - 1)
                offset = (_SCORE_BINS + rank) * _PER_KIND + habit * _DEPTHS
            cell = offset + _DEPTH_BIN[min(depth, len(_DEPTH_BIN) - 1)]
            chance = self.chance(cell)
            chances.append(chance if parent < 0 else chance * chances[parent])
            depths.append(depth)
            cells.append(cell)
        return Judged(draft, chances, depths, cells, habit)

    def marginal(
        self, habit: int, most: int, shape: int = 0, *, hopeless: float = 0.0
    ) -> list[float]:
        """Chances to survive to depth 1, 2, ... of a draft that was not made yet, at most `most`
        and until one is as good as hopeless."""
        alive, out = 1.0, list[float]()
        kind = MARGINAL + shape
        for depth in range(1, most + 1):
            alive *= self.chance(self.cell(kind, habit, depth))
            if alive < hopeless:
                break
            out.append(alive)
        return out

    def num_of_shape(self, shape: int) -> float:
        """Outcomes, lately, of drafts of this shape."""
        return self._tried_of_kind[MARGINAL + shape]

    def learn(self, cell: int, right: bool) -> None:
        kind = cell // _PER_KIND
        self._tried[cell] += 1.0
        self._tried_of_kind[kind] += 1.0
        if right:
            self._right[cell] += 1.0
            self._right_of_kind[kind] += 1.0
        if self._tried[cell] > _FULL:
            self._tried[cell] *= 0.5
            self._right[cell] *= 0.5
        if self._tried_of_kind[kind] > 2 * _FULL:
            self._tried_of_kind[kind] *= 0.5
            self._right_of_kind[kind] *= 0.5
        self._cached[cell] = -1.0
        self.num_learned += 1
        self._since += 1
        if self._since >= _STALE:
            self._since = 0
            self._cached = [-1.0] * len(self._cached)

    def _refresh(self, cell: int) -> float:
        kind = cell // _PER_KIND
        first, weight = _PRIORS[kind]
        wide = (self._right_of_kind[kind] + weight * first) / (self._tried_of_kind[kind] + weight)
        chance = (self._right[cell] + _LEAN * wide) / (self._tried[cell] + _LEAN)
        self._cached[cell] = chance
        return chance

"""beta of a drafter: it proposes from softmax(beta * log q), and which beta hits most is learned.

Under `replay` a proposal may be anything, so sharpening is free (verification.md 2.4: +11 to 24 %
accepted). Most rows use the best beta so far, every eighth a neighbour on the grid; the best moves
where a neighbour's first guesses hit more often than chance explains. Greedy rows teach nothing.
"""

from __future__ import annotations

import math
from typing import Final

GRID: Final = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)
_START: Final = GRID.index(2.0)
_ENOUGH: Final = 60  # outcomes of a neighbour before it is believed
_FULL: Final = 2000.0
_CLEARLY: Final = 1.0  # standard errors


class Sharpness:
    def __init__(self, fixed: float | None = None) -> None:
        """fixed: use this beta and learn nothing"""
        self._fixed = fixed
        self._best = _START
        self._right = [0.0] * len(GRID)
        self._tried = [0.0] * len(GRID)
        self._num_picks = 0

    @property
    def best(self) -> float:
        return GRID[self._best] if self._fixed is None else self._fixed

    def pick(self) -> float:
        """For one row of one call."""
        if self._fixed is not None:
            return self._fixed
        self._num_picks += 1
        turn = self._num_picks % 16
        at = self._best + {0: 1, 8: -1}.get(turn, 0)
        return GRID[min(max(at, 0), len(GRID) - 1)]

    def learn(self, beta: float, right: bool) -> None:
        """Whether a first guess that was proposed with this beta was right."""
        if self._fixed is not None:
            return
        at = GRID.index(beta)
        self._tried[at] += 1
        self._right[at] += right
        if self._tried[at] > _FULL:
            self._tried[at] /= 2
            self._right[at] /= 2
        if at != self._best and self._tried[at] >= _ENOUGH and self._is_better(at):
            self._best = at

    def _is_better(self, at: int) -> bool:
        best = self._best
        if self._tried[best] < _ENOUGH:
            return False
        rate, known = self._right[at] / self._tried[at], self._right[best] / self._tried[best]
        both = (self._right[at] + self._right[best]) / (self._tried[at] + self._tried[best])
        error = math.sqrt(both * (1 - both) * (1 / self._tried[at] + 1 / self._tried[best]))
        return rate > known + _CLEARLY * error

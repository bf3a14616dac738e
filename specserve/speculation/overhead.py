"""What we do ourselves around a step's forward, measured as a whole: from one step to the next.

Only so everything counts that guessing makes longer: choosing, packing, verifying row by row,
commit, and the interpreter being shared with the event loop. Behind a forward Python finds none of
its code in the caches, so what a loop of it takes says nothing.

    seconds = plain * (rows + 7) + per_ask * rows asked + per_guess * guesses verified
"""

from __future__ import annotations

from typing import Final

from specserve.speculation.costs import RobustMean

_SLOW: Final = 0.05
_FOLLOW: Final = 0.02
_SHARED_ROWS: Final = 7  # a step costs as much as so many rows do (1 to 16 rows, measured)
_LEAST: Final = 1e-9  # a mean that has been 0 would stay there


class _Share:
    """What one of a step's asks or guesses costs, from what such steps take more than plain ones.

    Noise falls on both sides of that difference and is as large for one ask as for many, so sums
    are divided, and only what comes out is cut at 0.
    """

    def __init__(self) -> None:
        self._more = 0.0
        self._number = 0.0
        self._count = 0

    @property
    def value(self) -> float:
        return max(0.0, self._more / self._number) if self._count else 0.0

    def add(self, more: float, number: int, plain: float) -> None:
        """more: seconds beyond what else is known of the step; plain: of one without any"""
        self._count += 1
        most = plain / 2  # beyond that it is something else: a busy neighbour, a collection
        rate = max(_FOLLOW, 1.0 / self._count)
        self._more += rate * (min(max(more, -most), most) - self._more)
        self._number += rate * (number - self._number)


class Overhead:
    """Seconds of a step besides its forward, its drafters and the choosing of tokens."""

    def __init__(self) -> None:
        self._plain = RobustMean(0.0, _SLOW)
        self._per_ask = _Share()
        self._per_guess = _Share()

    @property
    def is_known(self) -> bool:
        """Whether a step without any ask was seen: what asking adds can be told only then."""
        return self._plain.count > 0

    @property
    def per_ask(self) -> float:
        """Of one proposal, its making left out."""
        return self._per_ask.value

    @property
    def per_guess(self) -> float:
        """Of one verified guess, its part of the forward left out."""
        return self._per_guess.value

    def plain(self, num_rows: int) -> float:
        """Of a step in which nobody is asked."""
        return self._plain.value * (num_rows + _SHARED_ROWS)

    def observe(self, num_rows: int, num_asked: int, num_guesses: int, seconds: float) -> None:
        if not num_asked:
            self._plain.add(max(_LEAST, seconds / (num_rows + _SHARED_ROWS)))
        elif not self.is_known:
            return
        elif not num_guesses:
            more = seconds - self.plain(num_rows)
            self._per_ask.add(more, num_asked, self.plain(num_rows))
        else:
            more = seconds - self.plain(num_rows) - self.per_ask * num_asked
            self._per_guess.add(more, num_guesses, self.plain(num_rows))

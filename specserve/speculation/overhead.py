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
_SHARED_ROWS: Final = 7  # a step costs as much as so many rows do (1 to 16 rows, measured)
_LEAST: Final = 1e-9  # a mean that has been 0 would stay there


class Overhead:
    """Seconds of a step besides its forward, its drafters and the choosing of tokens."""

    def __init__(self) -> None:
        self._plain = RobustMean(0.0, _SLOW)
        self._per_ask = RobustMean(0.0, _SLOW)
        self._per_guess = RobustMean(0.0, _SLOW)

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
            self._per_ask.add(max(_LEAST, more / num_asked))
        else:
            more = seconds - self.plain(num_rows) - self.per_ask * num_asked
            self._per_guess.add(max(_LEAST, more / num_guesses))

"""When drafters that were not worth it are looked at again: seldom, and never not at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_LONGEST_WAIT: Final = 16  # steps
_SHARE: Final = 0.002  # of the time
_ROWS_PER_STEP: Final = 4  # looked at: it takes 25 us per row (measured at 16 rows)
_LONGEST_SPREAD: Final = 32  # steps


class Looks:
    """One schedule per drafter, for all rows."""

    def __init__(self, names: Iterable[str]) -> None:
        self._wait = dict.fromkeys(names, 1)
        self._due_at = dict.fromkeys(self._wait, 0)  # step index

    def is_due(self, name: str, step_idx: int) -> bool:
        return step_idx >= self._due_at[name]

    def next_due(self, names: Iterable[str], step_idx: int, most: int) -> int:
        """The step index of the next look at any of them, `most` steps from now at the latest.

        Who is due already was passed by in this step: a model that nothing may be spent on yet.
        """
        coming = [self._due_at[name] for name in names if self._due_at[name] > step_idx]
        return min([*coming, step_idx + most])

    def found(self, name: str) -> None:
        """It was worth it: the next step looks again, too."""
        self._wait[name] = 1

    def missed(self, name: str, step_idx: int) -> None:
        """It was not: wait twice as long as the last time."""
        self._wait[name] = min(2 * self._wait[name], _LONGEST_WAIT)
        self._due_at[name] = step_idx + self._wait[name]

    def put_off(self, name: str, step_idx: int, num_rows: int) -> None:
        """It was not, and that says little: look again soon, but the later the longer it takes."""
        self._due_at[name] = step_idx + num_rows // _ROWS_PER_STEP + 1

    def took(self, name: str, step_idx: int, seconds: float, step_seconds: float) -> None:
        """A look takes `seconds`: the next one so much later that looks take _SHARE of the time."""
        wait = int(seconds / (_SHARE * step_seconds)) + 1
        self._due_at[name] = step_idx + min(wait, _LONGEST_SPREAD)

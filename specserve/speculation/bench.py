"""Who may guess: a drafter that fails sits out, longer each time, and is forgiven once it works.

A failure costs its step's guesses, never text. After the n-th failure in a row a drafter sits out
2^n steps, at most 256, so a broken one costs next to nothing and a repaired one comes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

LONGEST: Final = 256  # steps


class Bench:
    def __init__(self, names: Iterable[str]) -> None:
        self._failed_in_a_row = dict.fromkeys(names, 0)
        self._back_at = dict.fromkeys(self._failed_in_a_row, 0)  # step index

    def may_play(self, name: str, step_idx: int) -> bool:
        return step_idx >= self._back_at[name]

    def failed(self, name: str, step_idx: int) -> int:
        """Returns how many steps it sits out."""
        self._failed_in_a_row[name] += 1
        num_steps = int(min(2 ** self._failed_in_a_row[name], LONGEST))
        self._back_at[name] = step_idx + 1 + num_steps
        return num_steps

    def worked(self, name: str) -> None:
        self._failed_in_a_row[name] = 0

"""Time that may go into trying drafters that look not worth it, or are not known yet.

A small share of the time served, and a first credit of a few steps. Each try pays what it cost more
than it brought, so trying a good drafter is free and trying a bad one is bounded: that is what
"never slower" rests on.
"""

from __future__ import annotations

from typing import Final

SHARE: Final = 0.005
_CREDIT: Final = 4  # steps
_MOST: Final = 6  # steps that are saved up


class Allowance:
    def __init__(self) -> None:
        self._seconds: float | None = None  # None: no step is known yet
        self._most = 0.0

    def covers(self, seconds: float) -> bool:
        return self._seconds is None or self._seconds > seconds

    def earn(self, seconds: float, plain_seconds: float) -> None:
        """A step took `seconds`; it would have taken plain_seconds without guesses."""
        if self._seconds is None:
            self._most = _MOST * plain_seconds
            self._seconds = _CREDIT * plain_seconds
            return
        self._most = _MOST * plain_seconds
        self._seconds = min(self._seconds + SHARE * seconds, self._most)

    def pay(self, seconds: float) -> None:
        """What a try cost more than it brought; less than 0: it brought more, which is saved up."""
        if self._seconds is not None:
            self._seconds = min(self._seconds - seconds, self._most)

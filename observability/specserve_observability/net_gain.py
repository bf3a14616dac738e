"""What speculation is worth: decode time as it was, and as it would have been without guesses.

A step of n sequences that emitted e tokens took t seconds, x of them (the engine's estimate) for
the sake of guesses. Without speculation the same e tokens take e / n steps of t - x seconds. Steps
with a prompt in them are left out: what they take has little to do with guesses.
"""

from __future__ import annotations

from math import exp

from .records import StepRecord

_MEMORY_SECONDS = 60.0  # an alert must not wait long, nor go off for one hard paragraph


class NetGain:
    """One writer: the event loop."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.plain_seconds = 0.0  # estimated, without speculation
        self._recent = 0.0
        self._recent_plain = 0.0

    @property
    def ratio(self) -> float:
        """Estimated speed-up over the last minute of decoding; 1 where nothing was decoded yet."""
        return self._recent_plain / self._recent if self._recent else 1.0

    def add(self, step: StepRecord, num_emitted: int) -> None:
        """A step without a prompt in it. num_emitted: tokens of all its rows"""
        num_rows = len(step.rows)
        seconds = step.commit_end - step.plan_start
        if not num_emitted or seconds <= 0:
            return
        step_without = max(0.0, seconds - step.speculation_seconds)
        plain_seconds = step_without * num_emitted / num_rows
        self.seconds += seconds
        self.plain_seconds += plain_seconds
        fade = exp(-seconds / _MEMORY_SECONDS)
        self._recent = self._recent * fade + seconds
        self._recent_plain = self._recent_plain * fade + plain_seconds

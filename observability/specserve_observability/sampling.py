"""Which steps become spans: a steady few, and every step somebody would look for.

Two token buckets filled by the steps' own clock: ordinary steps share a small one, slow, preempting
and failed steps a larger one. So a burst of trouble is kept, and trouble without end is still
bounded.
"""

from __future__ import annotations

import math

from .records import StepRecord

ORDINARY_RATE = 20.0  # step spans per second in the long run
_BURST_SECONDS = 5.0  # their worth at once after a lull: a single request is kept whole
TAIL_RATE = 100.0  # slow, preempting and failed steps per second
SLOW_FACTOR = 3.0  # a step this many times the usual duration of its size is worth a look
_WARM_STEPS = 32  # steps seen before "usual" means anything
_MEAN_WEIGHT = 0.05


class _TokenBucket:
    def __init__(self, rate: float, burst: float) -> None:
        self._rate = rate  # per second
        self._burst = burst
        self._tokens = burst
        self._updated: float | None = None

    def take(self, now: float) -> bool:
        if math.isinf(self._rate):
            return True
        if self._updated is not None:
            gained = max(0.0, now - self._updated) * self._rate
            self._tokens = min(self._burst, self._tokens + gained)
        self._updated = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class StepSampler:
    """Decides step by step, in order, by the steps' own clock.

    rate: spans of ordinary steps per second; inf: every step, 0: slow and odd ones only
    """

    def __init__(self, rate: float = ORDINARY_RATE) -> None:
        self._ordinary = _TokenBucket(rate, max(1.0, rate * _BURST_SECONDS) if rate else 0.0)
        self._tail = _TokenBucket(TAIL_RATE, TAIL_RATE)
        self._mean_by_size: dict[int, tuple[int, float]] = {}  # size class -> (count, mean seconds)

    def reason_to_keep(self, step: StepRecord) -> str | None:
        """rate | slow | preempted | error; None: leave this step out."""
        slow = self._is_slow(step)
        tail_reason = (
            "error"
            if step.error is not None
            else "preempted"
            if step.num_preempted
            else "slow"
            if slow
            else None
        )
        if tail_reason is not None and self._tail.take(step.commit_end):
            return tail_reason
        return "rate" if self._ordinary.take(step.commit_end) else None

    def _is_slow(self, step: StepRecord) -> bool:
        """Against steps of about as many tokens: a full prefill chunk is long, not slow."""
        num_tokens = sum(row.num_tokens + row.num_draft_tokens for row in step.rows)
        size = num_tokens.bit_length()
        duration = step.commit_end - step.plan_start
        count, mean = self._mean_by_size.get(size, (0, duration))
        slow = count >= _WARM_STEPS and duration > SLOW_FACTOR * mean
        weight = max(_MEAN_WEIGHT, 1.0 / (count + 1))
        self._mean_by_size[size] = (count + 1, mean + weight * (duration - mean))
        return slow

"""A Prometheus histogram as plain ints: one bisect per value, nothing to lock."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


class Histogram:
    """Counts of values per bucket; bucket i holds bounds[i-1] < value <= bounds[i].

    Values are seconds >= 0; a clock set back gives a negative one, which counts as 0 so that the
    sum never goes down.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one is +Inf
        self.total = 0.0

    def observe(self, value: float) -> None:
        if value < 0.0:
            value = 0.0
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_many(self, values: Sequence[float]) -> None:
        """As observe for each. One sort in C: 2,000 token gaps must not hold up the event loop."""
        ordered = sorted(values)
        num_below = 0
        for i, bound in enumerate(self.bounds):
            num_within = bisect_right(ordered, bound)
            self.counts[i] += num_within - num_below
            num_below = num_within
        self.counts[-1] += len(ordered) - num_below
        first_positive = bisect_right(ordered, 0.0)
        self.total += sum(ordered[first_positive:])

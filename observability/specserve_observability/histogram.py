"""A Prometheus histogram as plain ints: one bisect per value, nothing to lock."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class Exemplar(NamedTuple):
    """A trace that one of a bucket's values belongs to; at: seconds since the epoch."""

    trace_id: str
    value: float
    at: float


class Histogram:
    """Counts of values per bucket; bucket i holds bounds[i-1] < value <= bounds[i].

    Values are >= 0; a clock set back gives a negative one, which counts as 0 so that the sum never
    goes down. Each bucket keeps the newest exemplar that fell into it.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)  # the last one is +Inf
        self.exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, *, trace_id: str = "", at: float = 0.0) -> None:
        """trace_id: of the value's trace, 32 hex digits; empty: none that anybody can look up"""
        if value < 0.0:
            value = 0.0
        idx = bisect_left(self.bounds, value)
        self.counts[idx] += 1
        self.total += value
        if trace_id:
            self.exemplars[idx] = Exemplar(trace_id, value, at)

    def count(self, value: int) -> None:
        """As observe, where the bounds are 0, 1, 2, ...: the bucket is the value."""
        self.counts[value if value < len(self.bounds) else -1] += 1
        self.total += value

    def observe_many(self, values: Sequence[float], *, trace_id: str = "", at: float = 0.0) -> None:
        """As observe for each; the largest is the exemplar. One sort in C: 2,000 token gaps must
        not hold up the event loop."""
        ordered = sorted(values)
        num_below = 0
        for i, bound in enumerate(self.bounds):
            num_within = bisect_right(ordered, bound)
            self.counts[i] += num_within - num_below
            num_below = num_within
        self.counts[-1] += len(ordered) - num_below
        first_positive = bisect_right(ordered, 0.0)
        self.total += sum(ordered[first_positive:])
        if trace_id and ordered:
            largest = max(0.0, ordered[-1])
            idx = bisect_left(self.bounds, largest)
            self.exemplars[idx] = Exemplar(trace_id, largest, at)

"""Percentiles, means and counts of plain lists."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from math import floor, fsum

import msgspec

SAMPLES_FOR = {"p50": 1, "p90": 10, "p99": 100}  # below this a percentile is the maximum or nearly


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """In the unit of the values; seconds wherever the field's name does not say otherwise."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    min: float
    max: float


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-quantile, 0 <= q <= 1, of ascending values, interpolated linearly as numpy does."""
    if not ordered:
        raise ValueError("a percentile of nothing")
    rank = q * (len(ordered) - 1)
    below = floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def distribution(values: Iterable[float]) -> Distribution | None:
    """None for no values: an absent number, not a zero."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Distribution(
        count=len(ordered),
        mean=fsum(ordered) / len(ordered),
        p50=percentile(ordered, 0.5),
        p90=percentile(ordered, 0.9),
        p99=percentile(ordered, 0.99),
        min=ordered[0],
        max=ordered[-1],
    )


def mean(values: Iterable[float]) -> float | None:
    known = list(values)
    return fsum(known) / len(known) if known else None


def ratio(numerator: float, denominator: float) -> float | None:
    """None where nothing was counted."""
    return numerator / denominator if denominator else None


def add_by_position(rows: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Sum of vectors of unequal length; missing places count 0."""
    return tuple(sum(column) for column in zip_longest(*rows, fillvalue=0))

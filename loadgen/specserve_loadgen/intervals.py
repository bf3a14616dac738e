"""95 % intervals by bootstrap over clusters: requests, or blocks of requests that ran together.

Tokens of one request are alike, so the request is what is drawn again, never the token. Every
measure here is a ratio of sums over clusters (accepted / drafted, seconds / tokens), or a mean over
pairs of clusters. The interval is bootstrap-t: each resample is measured in its own standard
errors, which keeps coverage near 95 % for skewed sums and few clusters, where plain percentiles
fall short (tests/test_study_intervals.py counts both). Fewer than `FEWEST` clusters give none.

Where all clusters agree on 0 or 1 a resample shows no spread at all. A share then gets the exact
binomial bound with one trial per cluster, which is wide and never wrong.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

LEVEL: Final = 0.95
FEWEST: Final = 6
NUM_RESAMPLES: Final = 2000
_TAIL: Final = (1 - LEVEL) / 2

Array = NDArray[np.float64]


class Interval(msgspec.Struct, frozen=True):
    """An estimate with its 95 % interval. low, high: None where there are too few clusters."""

    estimate: float
    low: float | None
    high: float | None
    num_clusters: int


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], *, is_share: bool = False
) -> Interval | None:
    """Of sum(numerators) / sum(denominators); None where the denominators sum to 0.

    numerators, denominators: [number of clusters]; clusters of denominator 0 say nothing
    is_share: it lies in 0..1
    """
    a, b = _known(numerators, denominators)
    if not len(b):
        return None
    estimate = float(a.sum() / b.sum())
    if len(b) < FEWEST:
        return Interval(estimate, None, None, len(b))
    counts = _resamples(len(b))  # [R, n]
    sums_b = counts @ b
    values = (counts @ a) / sums_b  # [R]
    squares = (
        counts @ (a * a) - 2 * values * (counts @ (a * b)) + values * values * (counts @ (b * b))
    )
    errors = np.sqrt(np.maximum(squares, 0)) / sums_b  # [R]
    error = float(np.sqrt(((a - estimate * b) ** 2).sum()) / b.sum())
    if is_share:
        if estimate in (0.0, 1.0):
            return _unanimous(estimate, len(b))
        low, high = _studentised(estimate, error, values, errors)
        low, high = max(0.0, low), min(1.0, high)
    elif (a > 0).all():  # on a log scale, so that no speed or length is ever below 0
        logs = _studentised(math.log(estimate), error / estimate, np.log(values), errors / values)
        low, high = math.exp(logs[0]), math.exp(logs[1])
    else:
        low, high = _studentised(estimate, error, values, errors)
    return Interval(estimate, low, high, len(b))


def paired_ratio_interval(values: Sequence[float], bases: Sequence[float]) -> Interval | None:
    """Of the geometric mean of value / base over pairs; all above 0.

    Pairs are drawn again, so what both sides have in common (prompts, the minute) cancels. Each
    pair weighs 1 (a ratio of sums would hang on the few slowest), and twice as fast and half as
    fast are equally far from 1.
    """
    if not values or any(value <= 0 for value in (*values, *bases)):
        return None
    logs = mean_interval(
        [float(np.log(value / base)) for value, base in zip(values, bases, strict=True)]
    )
    if logs is None:
        return None
    low, high = (None if bound is None else float(np.exp(bound)) for bound in (logs.low, logs.high))
    return Interval(float(np.exp(logs.estimate)), low, high, logs.num_clusters)


def mean_interval(values: Sequence[float], *, is_share: bool = False) -> Interval | None:
    """Of the mean over clusters, each of which weighs 1."""
    return ratio_interval(values, [1.0] * len(values), is_share=is_share)


def quantile_interval(values: Sequence[float], q: float) -> Interval | None:
    """Of the q-quantile over clusters, one value each: between order statistics, by the binomial.

    None beyond what so many values can tell: fewer than 5 above it, or below it, for the median 2.
    """
    ordered = np.sort(np.array(values, dtype=float))
    if not len(ordered):
        return None
    estimate = float(np.quantile(ordered, q))
    count = len(ordered)
    ranks = np.random.default_rng(0).binomial(count, q, size=20_000)
    low, high = np.quantile(ranks, _TAIL), np.quantile(ranks, 1 - _TAIL)
    if count < FEWEST or low < 1 or high >= count:
        return Interval(estimate, None, None, count)
    return Interval(estimate, float(ordered[int(low) - 1]), float(ordered[int(high)]), count)


def _known(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[Array, Array]:
    a, b = np.array(numerators, dtype=float), np.array(denominators, dtype=float)
    return a[b > 0], b[b > 0]


@functools.lru_cache(maxsize=16)
def _resamples(num_clusters: int) -> Array:
    """[R, n]: how often each resample holds each cluster. Seeded: a report repeats to the digit."""
    rng = np.random.default_rng(num_clusters)
    even = np.full(num_clusters, 1 / num_clusters)
    return rng.multinomial(num_clusters, even, size=NUM_RESAMPLES).astype(np.float64)


def _studentised(
    estimate: float, error: float, values: Array, errors: Array
) -> tuple[float, float]:
    """values, errors: [R] of each resample; errors up to a factor that all of them share"""
    if error <= 1e-12 * max(1.0, abs(estimate)):
        return estimate, estimate
    # A resample of one cluster alone has no spread: without a floor it would be infinitely far out.
    distances = (values - estimate) / np.maximum(errors, 0.1 * error)
    low, high = np.quantile(distances, [_TAIL, 1 - _TAIL])
    return float(estimate - high * error), float(estimate - low * error)


def _unanimous(estimate: float, num_clusters: int) -> Interval:
    reach = 1 - float(_TAIL ** (1 / num_clusters))
    low, high = (0.0, reach) if estimate == 0.0 else (1.0 - reach, 1.0)
    return Interval(estimate, low, high, num_clusters)

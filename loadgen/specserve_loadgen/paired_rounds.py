"""What many interleaved rounds say of the ratio of two speeds, on a machine that has bad moments.

The estimate is Hodges and Lehmann's: the median of the means of all pairs of rounds, on a log
scale. Like the median it shrugs at a round that a neighbour ruined, and it needs two thirds of the
median's rounds to be as sure. The interval holds whatever the noise is, as long as it meets both
sides alike: the pair means between which the signed-rank statistic is not out of the ordinary
(Hollander, Wolfe, Chicken: Nonparametric Statistical Methods, 3.3).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import combinations_with_replacement

from specserve_loadgen.intervals import FEWEST, LEVEL, Interval


def rounds_interval(ratios: Sequence[float]) -> Interval:
    """Of the typical ratio; ratios: one per round, above 0. No bounds below FEWEST rounds."""
    logs = [math.log(ratio) for ratio in ratios]
    means = sorted((a + b) / 2 for a, b in combinations_with_replacement(logs, 2))
    estimate = math.exp(statistics.median(means))
    if len(logs) < FEWEST:
        return Interval(estimate, None, None, len(logs))
    cut = _rank(len(logs))
    return Interval(estimate, math.exp(means[cut]), math.exp(means[-1 - cut]), len(logs))


def _rank(count: int) -> int:
    """How many pair means to leave out at either end: the most with P(rank sum below) in the tail.

    Under no difference each of the ranks 1..count counts or does not, with chance 1/2 each.
    """
    ways = [1]  # by rank sum
    for rank in range(1, count + 1):
        longer = ways + [0] * rank
        for total, number in enumerate(ways):
            longer[total + rank] += number
        ways = longer
    tail, below = (1 - LEVEL) / 2 * 2**count, 0
    for total, number in enumerate(ways):
        below += number
        if below > tail:
            return total - 1
    raise AssertionError("the tail is all of it")

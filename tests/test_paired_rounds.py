"""Typical ratios of interleaved rounds: what the estimate shrugs at, what its interval covers."""

from __future__ import annotations

import math
import random

import pytest

from specserve_loadgen.paired_rounds import rounds_interval


def test_one_ruined_round_moves_nothing() -> None:
    interval = rounds_interval([1.0, 1.02, 0.98, 1.01, 0.99, 1.0, 3.0])
    assert interval.estimate == pytest.approx(1.0, abs=0.011)


def test_twice_as_fast_and_half_as_fast_are_equally_far_from_one() -> None:
    assert rounds_interval([2.0, 0.5]).estimate == pytest.approx(1.0)


@pytest.mark.parametrize(("count", "left_out"), [(6, 0), (7, 2), (8, 3), (10, 8), (12, 13)])
def test_the_bounds_are_those_of_the_tables(count: int, left_out: int) -> None:
    """Critical values of the signed-rank statistic, two-sided 5 %, as any table prints them."""
    logs = [float(2**idx) / 1000 for idx in range(count)]
    interval = rounds_interval([math.exp(value) for value in logs])
    means = sorted((a + b) / 2 for i, a in enumerate(logs) for b in logs[i:])
    assert interval.low == pytest.approx(math.exp(means[left_out]))
    assert interval.high == pytest.approx(math.exp(means[-1 - left_out]))


def test_fewer_than_six_rounds_have_no_bounds() -> None:
    interval = rounds_interval([0.9, 1.0, 1.1, 1.0, 1.0])
    assert (interval.low, interval.high) == (None, None)


def test_the_interval_covers_what_is_true_although_some_rounds_are_ruined() -> None:
    rng = random.Random(5)
    covered = 0
    for _ in range(400):
        noise = [rng.gauss(0, 0.04) for _ in range(8)]
        noise[0] += rng.choice([-1, 1]) * 0.5 * (rng.random() < 0.5)
        interval = rounds_interval([1.1 * math.exp(value) for value in noise])
        assert interval.low is not None
        assert interval.high is not None
        covered += interval.low <= 1.1 <= interval.high
    assert 0.93 <= covered / 400 <= 1.0

"""Intervals: do they cover what they claim, in simulated studies whose truth is known?"""

from __future__ import annotations

import numpy as np
import pytest

from specserve_loadgen.intervals import (
    FEWEST,
    mean_interval,
    paired_ratio_interval,
    quantile_interval,
    ratio_interval,
)
from specserve_loadgen.records import RequestRecord
from specserve_loadgen.studies.summary import summarise
from specserve_loadgen.wire import SpeculativeDecoding
from tests.test_peers_numbers import a_record

NUM_STUDIES, NUM_REQUESTS, K = 500, 25, 3
AT_LEAST = 0.93


def a_simulated_request(rng: np.random.Generator) -> RequestRecord:
    """One prompt is guessed well and another badly: acceptance is drawn per request."""
    chance = rng.beta(2.0, 2.0)
    num_steps = int(rng.integers(5, 60))
    accepted = np.minimum(rng.geometric(1 - chance, num_steps) - 1, K)
    drafted = np.full(num_steps, K)
    spec = SpeculativeDecoding(
        num_spec_steps=num_steps,
        num_draft_tokens=int(drafted.sum()),
        num_accepted_draft_tokens=int(accepted.sum()),
        mean_acceptance_length=1 + accepted.mean(),
        acceptance_histogram=[int((accepted == run).sum()) for run in range(K + 1)],
        num_spec_tokens=K,
        per_step_accepted=[int(run) for run in accepted],
        per_step_drafted=[K] * num_steps,
    )
    record = a_record()
    return type(record)(
        **{f: getattr(record, f) for f in record.__struct_fields__}
        | {"speculative": spec, "specserve": None, "failure": None}
    )


def moments(power: int) -> float:
    """E[chance ** power] under Beta(2, 2)."""
    return float(np.prod([(2 + j) / (4 + j) for j in range(power)]))


# The number of steps does not depend on the chance, so pooled ratios are ratios of these means.
SURVIVAL = [moments(at + 1) for at in range(K)]
TRUTHS = {
    "acceptance_rate": sum(SURVIVAL) / K,
    "mean_acceptance_length": 1 + sum(SURVIVAL),
    "mean_acceptance_length_per_request": 1 + sum(SURVIVAL),
}


def test_95_percent_intervals_cover_the_truth_in_at_least_93_of_100_simulated_studies() -> None:
    rng = np.random.default_rng(8)
    hits: dict[str, int] = {}
    for _ in range(NUM_STUDIES):
        summary = summarise([a_simulated_request(rng) for _ in range(NUM_REQUESTS)])
        found = {name: (getattr(summary, name), truth) for name, truth in TRUTHS.items()}
        for at, place in enumerate(summary.positions):
            found[f"marginal {at + 1}"] = place.marginal, SURVIVAL[at]
            before = SURVIVAL[at - 1] if at else 1.0
            found[f"conditional {at + 1}"] = place.conditional, SURVIVAL[at] / before
        found["no guess accepted"] = summary.run_shares[0], 1 - SURVIVAL[0]
        for name, (interval, truth) in found.items():
            assert interval is not None
            assert interval.low is not None
            assert interval.high is not None
            hits[name] = hits.get(name, 0) + (interval.low <= truth <= interval.high)
    shares = {name: count / NUM_STUDIES for name, count in hits.items()}
    print(shares)
    assert len(shares) == len(TRUTHS) + 2 * K + 1
    assert min(shares.values()) >= AT_LEAST, shares
    assert max(shares.values()) <= 0.985, shares  # and none is so wide that it says nothing


def test_plain_percentiles_would_cover_less_which_is_why_they_are_not_used() -> None:
    rng = np.random.default_rng(9)
    ours = plain = 0
    for _ in range(NUM_STUDIES):
        a, b = rng.lognormal(0, 1.5, 10), rng.lognormal(0, 0.3, 10)
        truth = np.exp(1.5**2 / 2) / np.exp(0.3**2 / 2)
        interval = ratio_interval(a, b)
        assert interval is not None
        assert interval.low is not None
        assert interval.high is not None
        ours += interval.low <= truth <= interval.high
        draws = rng.integers(0, 10, (1000, 10))
        low, high = np.quantile(a[draws].sum(1) / b[draws].sum(1), [0.025, 0.975])
        plain += low <= truth <= high
    assert ours > plain + 0.05 * NUM_STUDIES


@pytest.mark.parametrize("num_blocks", [6, 20])
def test_a_paired_speed_up_covers_its_truth_though_blocks_differ_widely(num_blocks: int) -> None:
    rng = np.random.default_rng(num_blocks)
    hits, widths = 0, []
    for _ in range(NUM_STUDIES):
        common = rng.lognormal(0, 0.8, num_blocks)  # of the block: its prompts, its minute
        tokens = rng.integers(200, 800, num_blocks).astype(float)
        mine = tokens * common * rng.lognormal(0, 0.1, num_blocks)
        base = 1.5 * tokens * common * rng.lognormal(0, 0.1, num_blocks)
        interval = paired_ratio_interval(list(tokens / mine), list(tokens / base))
        assert interval is not None
        assert interval.low is not None
        assert interval.high is not None
        hits += interval.low <= 1.5 <= interval.high
        widths.append(interval.high / interval.low)
    assert np.median(widths) < 1.5  # pairing took out what they have in common
    assert hits >= AT_LEAST * NUM_STUDIES, hits


def test_a_median_and_a_tail_cover_their_truth_or_say_that_there_are_too_few() -> None:
    rng = np.random.default_rng(3)
    for q, count in ((0.5, 20), (0.9, 80)):
        hits = 0
        for _ in range(NUM_STUDIES):
            interval = quantile_interval(rng.exponential(1.0, count), q)
            assert interval is not None
            assert interval.low is not None
            assert interval.high is not None
            hits += interval.low <= -np.log(1 - q) <= interval.high
        assert hits >= AT_LEAST * NUM_STUDIES, (q, hits)
    tail = quantile_interval(rng.exponential(1.0, 30), 0.99)
    assert tail is not None
    assert (tail.low, tail.high) == (None, None)  # 30 requests do not tell a 99th percentile


def test_too_few_requests_give_an_estimate_without_an_interval() -> None:
    few = ratio_interval([1.0] * (FEWEST - 1), [2.0] * (FEWEST - 1))
    assert few is not None
    assert (few.estimate, few.low, few.high) == (0.5, None, None)
    assert ratio_interval([], []) is None
    assert ratio_interval([0.0], [0.0]) is None


def test_requests_that_all_agree_on_a_share_of_0_or_1_still_leave_it_uncertain() -> None:
    none = ratio_interval([0.0] * 30, [7.0] * 30, is_share=True)
    every = ratio_interval([7.0] * 30, [7.0] * 30, is_share=True)
    assert none is not None
    assert every is not None
    # Exact binomial with 30 trials: 1 - 0.025 ** (1 / 30).
    assert (none.low, none.high) == pytest.approx((0.0, 0.1157), abs=1e-3)
    assert (every.low, every.high) == pytest.approx((0.8843, 1.0), abs=1e-3)


def test_a_speed_is_never_below_0_however_few_and_wild_its_blocks_are() -> None:
    wild = ratio_interval([50.0] * 6, [0.5, 0.6, 0.4, 0.5, 9.0, 0.5])
    assert wild is not None
    assert wild.low is not None
    assert 0 < wild.low < wild.estimate


def test_an_interval_is_the_same_to_the_digit_when_it_is_computed_again() -> None:
    values = list(np.random.default_rng(1).random(40))
    assert mean_interval(values) == mean_interval(values)

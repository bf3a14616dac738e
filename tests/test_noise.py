"""Noise is a pure function of (seed, position, purpose, token id), with the laws it claims."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from specserve.noise import (
    MAX_SEED,
    MIN_SEED,
    Noise,
    Purpose,
    exponential,
    gumbel,
    gumbel_of,
    race,
    uniform,
)


def test_the_same_key_gives_the_same_numbers_whatever_was_read_before() -> None:
    noise = Noise()
    first = noise.uniform(11, 5, Purpose.TARGET, 100)
    noise.uniform(12, 9, Purpose.DRAFT, 37)
    np.testing.assert_array_equal(first, noise.uniform(11, 5, Purpose.TARGET, 100))
    np.testing.assert_array_equal(first, uniform(11, 5, Purpose.TARGET, 100))


def test_the_stream_is_pinned_so_that_a_seed_means_the_same_text_in_every_release() -> None:
    np.testing.assert_allclose(uniform(11, 5, Purpose.TARGET, 5), PINNED, rtol=1e-15)


PINNED = np.array(
    [
        0.10637861906550579,
        0.6265380432651474,
        0.09987471371675534,
        0.050157080230445954,
        0.1372490043980266,
    ]
)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 63, 1000])
def test_a_tokens_noise_does_not_depend_on_how_many_tokens_are_asked_for(n: int) -> None:
    np.testing.assert_array_equal(
        uniform(3, 8, Purpose.TARGET, n), uniform(3, 8, Purpose.TARGET, 1000)[:n]
    )


def test_any_change_of_the_key_changes_all_the_numbers() -> None:
    keys = [(s, p, q) for s in (0, 1, -1, 2**32) for p in (0, 1, 2**20) for q in Purpose]
    streams = np.stack([uniform(*key, 64) for key in keys])
    assert len(np.unique(streams)) == streams.size


@pytest.mark.parametrize("seed", [MIN_SEED, -1, 0, 2**63, MAX_SEED])
def test_every_seed_in_range_works(seed: int) -> None:
    values = uniform(seed, 0, Purpose.TARGET, 1000)
    assert values.min() > 0
    assert values.max() < 1


def test_a_negative_seed_is_not_the_unsigned_one_with_the_same_bits() -> None:
    assert uniform(-1, 0, Purpose.TARGET, 1)[0] != uniform(MAX_SEED, 0, Purpose.TARGET, 1)[0]


def test_uniforms_exponentials_and_gumbels_follow_their_laws() -> None:
    n = 200_000
    assert stats.kstest(uniform(1, 2, Purpose.TARGET, n), "uniform").pvalue > 0.001
    assert stats.kstest(exponential(1, 2, Purpose.DRAFT, n), "expon").pvalue > 0.001
    assert stats.kstest(gumbel(1, 2, Purpose.ACCEPT, n), "gumbel_r").pvalue > 0.001


def test_numbers_are_also_uniform_across_positions_and_across_seeds() -> None:
    across_positions = [uniform(7, t, Purpose.TARGET, 1)[0] for t in range(4000)]
    across_seeds = [uniform(s, 7, Purpose.TARGET, 1)[0] for s in range(4000)]
    assert stats.kstest(across_positions, "uniform").pvalue > 0.001
    assert stats.kstest(across_seeds, "uniform").pvalue > 0.001


def test_streams_of_different_purposes_are_uncorrelated() -> None:
    n = 100_000
    streams = np.stack([uniform(5, 6, purpose, n) for purpose in Purpose])
    correlation = np.corrcoef(streams) - np.eye(len(Purpose))
    assert np.abs(correlation).max() < 4 / np.sqrt(n)


def test_the_gumbel_keeps_its_right_tail_and_stays_finite_at_both_ends() -> None:
    # P(g > x) = 1 - exp(-exp(-x)) ~ exp(-x): a uniform of 1e-18 is a Gumbel of 41.4
    tails = gumbel_of(np.array([2.0**-65, 1e-18, 1 - 2.0**-53]))
    np.testing.assert_allclose(tails, [65 * np.log(2), 18 * np.log(10), -3.6037], rtol=1e-4)


@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0, 12.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_race_is_won_by_the_argmax_of_weights_plus_gumbel(
    spread: float, dtype: type[np.float32] | type[np.float64]
) -> None:
    rng = np.random.default_rng(0)
    for position in range(60):
        weights = (rng.standard_normal(5000) * spread).astype(dtype)
        weights[rng.random(5000) < 0.2] = -np.inf
        noise = gumbel(3, position, Purpose.RESIDUAL, 5000)
        expected = int((weights.astype(np.float64) + noise).argmax())
        assert race(weights, seed=3, position=position, purpose=Purpose.RESIDUAL) == expected


def test_a_race_among_some_ids_uses_the_noise_of_those_ids() -> None:
    rng = np.random.default_rng(1)
    for position in range(200):
        ids = np.flatnonzero(rng.random(300) < 0.1)
        weights = rng.standard_normal(len(ids))
        noise = gumbel(9, position, Purpose.TARGET, 300)[ids]
        expected = int(ids[(weights + noise).argmax()])
        assert race(weights, seed=9, position=position, purpose=Purpose.TARGET, ids=ids) == expected


def test_a_race_is_a_draw_from_the_softmax() -> None:
    p = np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])
    draws = [
        race(np.log(p) + 3.0, seed=s, position=4, purpose=Purpose.TARGET) for s in range(20_000)
    ]
    assert stats.chisquare(np.bincount(draws, minlength=5), p * len(draws)).pvalue > 0.001


def test_a_token_of_weight_minus_infinity_never_wins() -> None:
    weights = np.full(5000, -np.inf, dtype=np.float32)
    weights[17] = -1e30
    assert race(weights, seed=0, position=0, purpose=Purpose.TARGET) == 17


def test_a_token_far_behind_wins_by_noise_from_the_tail() -> None:
    num_tokens, tried = 49_152, 0
    for position in range(40):
        noise = gumbel(2, position, Purpose.TARGET, num_tokens)
        lucky = int(noise.argmax())
        if noise[lucky] < 12 or lucky == 0:
            continue
        lead = noise[lucky] - noise[0]  # by this much the best token's noise is smaller
        for behind, winner in ((lead - 0.01, lucky), (lead + 0.01, 0)):
            weights = np.full(num_tokens, -np.inf, dtype=np.float32)
            weights[0], weights[lucky] = 5.0, 5.0 - behind
            assert race(weights, seed=2, position=position, purpose=Purpose.TARGET) == winner
        tried += 1
    assert tried > 5

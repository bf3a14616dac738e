"""What a step costs, and which guesses are worth it: values and arithmetic, no clock."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.speculation.admit import Candidate, race, race_with_calls
from specserve.speculation.costs import DraftCosts, Profile, SizeCost, VerifyCosts
from specserve.speculation.sharpness import GRID, Sharpness


def a_profile(**changes: float) -> Profile:
    """A step up behind 4 and behind 16 tokens."""
    seconds = {1: 0.020, 4: 0.021, 5: 0.030, 16: 0.031, 17: 0.045, 32: 0.050}
    return Profile(
        tuple(SizeCost(m, s, s - 0.0005 * (m - 1)) for m, s in seconds.items()), **changes
    )


def test_costs_between_and_beyond_the_measured_sizes_follow_straight_lines() -> None:
    costs = VerifyCosts(a_profile())
    ladder = costs.ladder(1, 1, 0.0, 0.0, 100)
    assert ladder[0] == pytest.approx(0.020)
    assert ladder[4 - 1] == pytest.approx(0.021)
    assert ladder[5 - 1] == pytest.approx(0.030)
    assert all(before <= after for before, after in pairwise(ladder))
    slope = ladder[100] - ladder[99]
    assert slope >= (0.050 - 0.020) / 31  # beyond the table not flatter than the table


def test_a_measured_dip_is_noise_and_never_a_reason_to_guess_more() -> None:
    dip = Profile(tuple(SizeCost(m, s, s) for m, s in {1: 0.02, 8: 0.03, 16: 0.025}.items()))
    ladder = VerifyCosts(dip).ladder(1, 1, 0.0, 0.0, 15)
    assert all(before <= after for before, after in pairwise(ladder))


def test_a_learned_dip_is_no_reason_either() -> None:
    costs = VerifyCosts(a_profile())
    for _ in range(100):
        costs.observe(16, 16, 0.0, 0.06)
        costs.observe(17, 17, 0.0, 0.04)
    ladder = costs.ladder(16, 16, 0.0, 0.0, 15)
    assert all(before <= after for before, after in pairwise(ladder))


def test_prompt_tokens_have_no_row_of_logits_and_long_contexts_cost() -> None:
    costs = VerifyCosts(a_profile(per_attended=1e-6))
    assert costs.seconds(32, 1) < costs.seconds(32, 32)
    assert costs.seconds(4, 4, 10_000) == pytest.approx(costs.seconds(4, 4) + 0.01)


def test_one_outlier_teaches_nothing() -> None:
    costs = VerifyCosts(a_profile())
    for _ in range(3):
        costs.observe(4, 4, 0.0, 0.021)
    costs.observe(16, 16, 0.0, 10.0)
    assert costs.seconds(16, 16) == pytest.approx(0.031, rel=0.05)
    assert costs.seconds(4, 4) == pytest.approx(0.021, rel=0.05)


def test_a_busy_neighbour_slows_all_sizes_alike() -> None:
    costs = VerifyCosts(a_profile())
    for _ in range(12):
        costs.observe(4, 4, 0.0, 2 * 0.021)
    ratio = costs.seconds(16, 16) / costs.seconds(4, 4)
    assert ratio == pytest.approx(0.031 / 0.021, rel=0.35)
    assert costs.seconds(4, 4) > 1.5 * 0.021


def test_a_busy_minute_does_not_hide_the_step_up_to_the_next_size() -> None:
    """Sizes of which one is seen all the time and the next one now and then."""
    seconds, rng = {16: 0.031, 17: 0.045}, random.Random(1)
    costs = VerifyCosts(a_profile())

    def step_up(num_tokens: int, slower: float) -> float:
        costs.observe(
            num_tokens,
            num_tokens,
            0.0,
            seconds[num_tokens] * slower * rng.lognormvariate(0, 0.05),
        )
        return costs.seconds(17, 17) / costs.seconds(16, 16)

    for idx in range(640):
        step_up(17 if idx % 16 == 15 else 16, 1.0)
    found = [step_up(16, 1.4) for _ in range(150)]
    assert min(found) > 0.93 * 0.045 / 0.031


def test_a_step_up_that_the_profile_hides_is_found() -> None:
    costs = VerifyCosts(Profile((SizeCost(16, 0.04, 0.04), SizeCost(17, 0.045, 0.045))))
    for idx in range(1280):
        num_tokens, seconds = (17, 0.045) if idx % 16 == 15 else (16, 0.031)
        costs.observe(num_tokens, num_tokens, 0.0, seconds)
    ratio = costs.seconds(17, 17) / costs.seconds(16, 16)
    assert ratio == pytest.approx(0.045 / 0.031, rel=0.1)


def test_a_wrong_profile_is_corrected_where_steps_are_seen() -> None:
    costs = VerifyCosts(a_profile())
    rng = random.Random(1)
    for _ in range(300):
        costs.observe(4, 4, 0.0, 0.021 * rng.lognormvariate(0, 0.1))
        costs.observe(16, 16, 0.0, 0.062 * rng.lognormvariate(0, 0.1))
    assert costs.seconds(4, 4) == pytest.approx(0.021, rel=0.1)
    assert costs.seconds(16, 16) == pytest.approx(0.062, rel=0.1)


def test_what_is_not_seen_any_more_is_believed_less_and_less() -> None:
    costs = VerifyCosts(a_profile())
    for _ in range(100):
        costs.observe(16, 16, 0.0, 0.093)
    assert costs.seconds(16, 16) > 0.08
    for _ in range(3000):
        costs.observe(4, 4, 0.0, 0.021)
    assert costs.seconds(16, 16) < 0.04


def test_a_draft_costs_by_steps_and_rows_and_what_was_not_seen_follows_the_nearest() -> None:
    costs = DraftCosts()
    costs.observe(4, 4, 400, 0.048)  # reads 400 tokens first: not the price of a draft
    assert costs.seconds(4, 4) == 0.0
    for _ in range(5):
        costs.observe(4, 4, 0, 0.008)
    assert costs.seconds(4, 4) == pytest.approx(0.008)
    assert costs.seconds(4, 3) == pytest.approx(0.006)
    assert 0.001 < costs.seconds(4, 1) < 0.004
    assert costs.seconds(32, 4) > costs.seconds(4, 4)
    costs.observe(4, 4, 400, 0.048)
    assert costs.seconds(4, 4) == pytest.approx(0.008)
    assert costs.per_catch_up == pytest.approx(0.0001)


CHANCES = st.lists(st.floats(0.0, 1.0), max_size=24).map(lambda xs: sorted(xs, reverse=True))


@given(chances=CHANCES, jumps=st.lists(st.floats(0.0, 0.05), min_size=25, max_size=25))
def test_the_race_finds_the_best_of_all_prefixes(chances: list[float], jumps: list[float]) -> None:
    ladder = [0.02]
    for jump in jumps:
        ladder.append(ladder[-1] + jump)

    def goodput(count: int) -> float:
        emitted = 3 + sum(chances[:count])
        return emitted / (0.001 + ladder[count] + 0.0002 * emitted)

    won = race(chances, ladder, num_rows=3.0, fixed=0.001, per_emitted=0.0002)
    assert won.goodput == pytest.approx(max(goodput(n) for n in range(len(chances) + 1)))
    assert won.goodput == pytest.approx(goodput(won.num_chosen))


def test_a_step_up_is_climbed_when_what_lies_behind_it_pays() -> None:
    """The first guess behind the step lowers goodput, the fifteenth has long paid for it."""
    ladder = [0.020] * 4 + [0.028] * 28
    won = race([0.9] * 20, ladder, num_rows=4.0, fixed=0.0, per_emitted=0.0)
    assert won.num_chosen == 20
    assert race([0.9] * 5, ladder, num_rows=4.0, fixed=0.0, per_emitted=0.0).num_chosen == 3


def test_nothing_is_chosen_that_breaks_the_time_limit() -> None:
    ladder = [0.02 + 0.001 * n for n in range(20)]
    won = race([0.95] * 15, ladder, num_rows=1.0, fixed=0.0, per_emitted=0.0, limit=0.0255)
    assert won.num_chosen == 5
    assert race([0.95], ladder, num_rows=1.0, fixed=0.0, per_emitted=0.0, limit=0.01)[0] == 0


def test_a_call_must_pay_for_its_own_steps() -> None:
    costs = DraftCosts()
    for _ in range(3):
        costs.observe(1, 1, 0, 0.010)
        costs.observe(1, 2, 0, 0.020)
    ladder = [0.02] * 8
    good = [Candidate(0.9, 0, 1), Candidate(0.81, 0, 2)]
    fixed = {"num_rows": 1.0, "fixed": 0.0, "per_emitted": 0.0, "catch_up": [0.0]}
    assert race_with_calls(good, ladder, costs, **fixed).num_chosen == 2
    poor = [Candidate(0.4, 0, 1), Candidate(0.16, 0, 2)]
    assert race_with_calls(poor, ladder, costs, **fixed).num_chosen == 0
    late = {**fixed, "catch_up": [0.05]}
    assert race_with_calls(good, ladder, costs, **late).num_chosen == 0


@pytest.mark.parametrize("best", [1.0, 2.0, 4.0])
def test_the_beta_that_hits_most_is_found(best: float) -> None:
    rng, sharpness = random.Random(3), Sharpness()
    peak = GRID.index(best)
    for _ in range(20_000):
        beta = sharpness.pick()
        sharpness.learn(beta, rng.random() < 0.6 - 0.06 * abs(GRID.index(beta) - peak))
    assert sharpness.best == best


def test_a_fixed_beta_stays() -> None:
    sharpness = Sharpness(1.25)
    assert {sharpness.pick() for _ in range(100)} == {1.25}
    sharpness.learn(1.25, True)
    assert sharpness.best == 1.25

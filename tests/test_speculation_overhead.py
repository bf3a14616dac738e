"""Our own work around a step: learned as a whole, and what was not worth it is asked seldom."""

from __future__ import annotations

import random
import statistics

import pytest

from specserve.speculation.looks import Looks
from specserve.speculation.overhead import Overhead
from tests.speculation_world import CostTable, Kind, a_world


def test_what_asking_and_verifying_cost_beside_the_forward_is_told_apart() -> None:
    overhead = Overhead()
    for step in range(600):
        num_rows = 1 + step % 16
        asked, guesses = ((0, 0), (num_rows, 0), (num_rows, 3 * num_rows))[step % 3]
        seconds = 1e-4 * (num_rows + 7) + 3e-5 * asked + 2e-5 * guesses
        overhead.observe(num_rows, asked, guesses, seconds)
    assert overhead.plain(9) == pytest.approx(1.6e-3, rel=0.01)
    assert overhead.per_ask == pytest.approx(3e-5, rel=0.01)
    assert overhead.per_guess == pytest.approx(2e-5, rel=0.01)


def test_noise_on_a_step_is_no_price_of_asking() -> None:
    """It is as large where one row of sixteen is asked, and falls on both sides."""
    overhead, rng, found = Overhead(), random.Random(1), []
    for step in range(4000):
        asked = step % 2
        overhead.observe(16, asked, 0, 1e-3 * rng.lognormvariate(0, 0.2) + 1e-5 * asked)
        found.append(overhead.per_ask)
    assert statistics.mean(found[500:]) < 4e-5


def test_before_any_plain_step_nothing_is_blamed_on_guesses() -> None:
    overhead = Overhead()
    overhead.observe(4, 4, 9, 0.002)
    assert (overhead.plain(4), overhead.per_ask, overhead.per_guess) == (0.0, 0.0, 0.0)


def test_a_mean_that_was_nothing_still_rises() -> None:
    overhead = Overhead()
    for _ in range(20):
        overhead.observe(1, 0, 0, 0.0)
    for _ in range(400):
        overhead.observe(1, 0, 0, 0.001)
    assert overhead.plain(1) > 0.0005


def test_looks_at_a_cheap_drafter_take_a_fixed_share_of_the_time() -> None:
    looks = Looks(["ngram"])
    looks.took("ngram", 0, seconds=0.0002, step_seconds=0.010)
    due = [step for step in range(40) if looks.is_due("ngram", step)]
    assert due[0] == 11  # 0.2 ms every 11 steps of 10 ms: 0.18 %


def test_a_model_that_is_not_worth_it_is_looked_at_at_doubling_distances() -> None:
    looks = Looks(["model"])
    seen = []
    for step in range(60):
        if looks.is_due("model", step):
            seen.append(step)
            looks.missed("model", step)
    assert seen == [0, 2, 6, 14, 30, 46]


def test_a_look_put_off_changes_no_distance() -> None:
    looks = Looks(["model"])
    looks.missed("model", 0)
    looks.put_off("model", 2, 16)
    assert [step for step in range(10) if looks.is_due("model", step)] == [7, 8, 9]
    looks.missed("model", 7)
    assert not looks.is_due("model", 10)
    assert looks.is_due("model", 11)


def test_rows_share_the_looks_at_a_drafter_that_finds_nothing() -> None:
    world = a_world({"ngram": Kind(0.0, per_row=2e-5)}, num_seqs=16, costs=CostTable())
    world.run(400)
    before = len(world.asked["ngram"])
    world.run(320)
    calls = world.asked["ngram"][before:]
    assert 5 <= len(calls) <= 40
    assert {len(call) for call in calls} == {16}  # one call for all, not a row at a time

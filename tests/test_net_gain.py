"""What speculation is estimated to be worth, by hand; and what of a step is charged to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.speculation.chosen import Learned, StepFacts
from specserve.speculation.costs import Profile, SizeCost, VerifyCosts
from specserve.speculation.overhead import Overhead
from specserve.speculation.step_cost import StepCost
from specserve_observability.metrics import Metrics
from specserve_observability.net_gain import NetGain
from specserve_observability.records import StepRecord
from tests.prometheus_text import scrape
from tests.trace_records import a_row, a_step

COSTS = Profile((SizeCost(1, 0.010, 0.010), SizeCost(4, 0.016, 0.016), SizeCost(64, 0.1, 0.1)))


def add(gain: NetGain, step: StepRecord) -> None:
    gain.add(step, sum(row.num_emitted_tokens for row in step.rows))


def test_a_step_of_three_tokens_that_cost_a_fifth_more_gains_two_and_a_half_times() -> None:
    gain = NetGain()
    add(
        gain, a_step(0, [a_row(0, drafted=3, accepted=2)], seconds=0.012, speculation_seconds=0.002)
    )
    assert gain.ratio == pytest.approx(0.010 * 3 / 0.012, rel=1e-3)
    assert gain.seconds == pytest.approx(0.012, rel=1e-3)
    assert gain.plain_seconds == pytest.approx(0.030, rel=1e-3)


def test_guesses_that_are_never_right_show_as_a_gain_below_one() -> None:
    metrics = Metrics(drafters=["ngram"])
    for idx in range(20):
        rows = [a_row(0, drafted=4), a_row(1)]
        metrics.add_step(a_step(idx, rows, seconds=0.012, speculation_seconds=0.003))
    text = scrape(metrics)
    assert text.get("specserve_net_gain_ratio") == pytest.approx(0.75, rel=1e-3)
    seconds = text.get("specserve_decode_step_seconds_total")
    plain = text.get("specserve_decode_step_plain_seconds_total")
    assert plain / seconds == pytest.approx(0.75, rel=1e-3)


def test_without_guesses_there_is_no_gain_and_no_loss() -> None:
    gain = NetGain()
    assert gain.ratio == 1
    add(gain, a_step(0, [a_row(0), a_row(1)]))
    assert gain.ratio == 1


def test_steps_with_a_prompt_and_steps_that_failed_say_nothing() -> None:
    metrics = Metrics(drafters=["ngram"])
    metrics.add_step(a_step(0, [a_row(0, drafted=3, accepted=3), a_row(1, tokens=40)]))
    metrics.add_step(a_step(1, [], error="boom"))
    metrics.add_step(a_step(2, [a_row(0)], seconds=-1.0))
    assert (metrics.net_gain.ratio, metrics.net_gain.seconds) == (1, 0)


def test_what_was_long_ago_is_forgotten() -> None:
    gain = NetGain()
    for idx in range(100):
        add(gain, a_step(idx, [a_row(0, drafted=3, accepted=3)], seconds=1.0))
    assert gain.ratio == pytest.approx(4, rel=1e-3)
    for idx in range(600):
        add(gain, a_step(idx, [a_row(0, drafted=3)], seconds=1.0, speculation_seconds=0.5))
    assert gain.ratio == pytest.approx(0.5, abs=0.01)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.floats(0, 1), st.floats(0, 2))))
def test_a_gain_is_never_negative_and_never_more_than_the_tokens_per_row(
    script: list[tuple[int, int, float, float]],
) -> None:
    gain = NetGain()
    for idx, (drafted, accepted, seconds, extra) in enumerate(script):
        row = a_row(0, drafted=drafted, accepted=min(drafted, accepted))
        add(gain, a_step(idx, [row], seconds=seconds, speculation_seconds=extra))
        assert 0 <= gain.ratio <= 6 + 1e-9
        assert 0 <= gain.plain_seconds <= 6 * gain.seconds + 1e-9


def a_cost(*, num_rows: int, num_guesses: int, num_emitted: int) -> tuple[StepCost, VerifyCosts]:
    """One decode step of a forward that took twice what was expected."""
    costs = VerifyCosts(COSTS)
    num_tokens = num_rows + num_guesses
    step = StepCost(num_rows=num_rows, num_asked=num_rows, num_guesses=num_guesses)
    step.expected = costs.seconds(num_tokens, num_tokens)
    facts = StepFacts(num_tokens, num_tokens, float(num_emitted), 0.0, 0.0)
    learned = Learned(
        outcomes=(),
        num_emitted=num_emitted,
        forward_seconds=2 * step.expected,
        verify_seconds=0.004,
    )
    step.set_extra(facts, learned, 0.001, costs, Overhead())
    return step, costs


def test_a_step_is_charged_for_its_drafting_its_wider_forward_and_its_further_tokens() -> None:
    step, costs = a_cost(num_rows=1, num_guesses=3, num_emitted=2)
    wider = 2 * (costs.seconds(4, 4) - costs.seconds(1, 1))
    assert wider > 0.01
    assert step.extra == pytest.approx(0.001 + wider + 0.004 / 2)


def test_a_step_whose_guessers_had_nothing_to_say_is_charged_for_asking() -> None:
    step, _ = a_cost(num_rows=2, num_guesses=0, num_emitted=2)
    assert step.extra == pytest.approx(0.001)

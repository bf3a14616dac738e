"""One pipeline: vLLM's definitions, one order, ties to the lowest id, rows that never interact."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from specserve.noise import Purpose, gumbel
from specserve.sampler import (
    LogitsRow,
    RowError,
    choose,
    draft_choice,
    logprobs,
    process_logits,
)
from tests.logit_rows import a_row, random_logits

V = 1000

OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.0},
    {"top_k": 1},
    {"top_k": 7, "temperature": 0.7},
    {"top_k": 5000},
    {"top_p": 0.5},
    {"top_p": 0.95, "temperature": 1.7},
    {"top_p": 0.0},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 200, "top_p": 0.8, "min_p": 0.01, "temperature": 1.5},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    {"presence_penalty": 2.0, "temperature": 0.0},
    {"logit_bias": {5: 8.0, 6: -100.0}, "top_k": 20},
    {"allowed_token_ids": tuple(range(3, 40, 4)), "temperature": 0.8},
    {"bad_word_ids": ((7,), (3, 4, 9), (4, 11), (2, 4, 12))},
]


def processed(logits: list[float], row: LogitsRow, vocab_size: int | None = None) -> list[float]:
    """One row's log weights."""
    tensor = torch.tensor([logits])
    return process_logits(tensor, [row], vocab_size=vocab_size or len(logits))[0].tolist()


def probabilities(logits: list[float], row: LogitsRow) -> list[float]:
    return torch.tensor(processed(logits, row)).softmax(0).tolist()


def survivors(logits: list[float], row: LogitsRow) -> list[int]:
    return [idx for idx, weight in enumerate(processed(logits, row)) if weight > -math.inf]


# --- the fast path is the oracle -----------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [0.2, 3.0, 12.0])
def test_choosing_equals_argmax_of_processed_logits_plus_gumbel(
    options: dict[str, Any], dtype: torch.dtype, spread: float
) -> None:
    logits = random_logits(24, V + 3, spread=spread).to(dtype)
    rows = [a_row((1, 2, 3, 3, 4), prompt=(1, 2), seed=s, **options) for s in range(24)]
    weights = process_logits(logits, rows, vocab_size=V).to(torch.float64).numpy()
    expected = [int((weights[s, :V] + gumbel(s, 5, Purpose.TARGET, V)).argmax()) for s in range(24)]
    assert choose(logits, rows, vocab_size=V) == expected


def test_a_row_is_bit_for_bit_the_same_alone_and_in_any_batch() -> None:
    logits = random_logits(len(OPTIONS), V)
    rows = [a_row(seed=idx, **options) for idx, options in enumerate(OPTIONS)]
    together = choose(logits, rows, vocab_size=V)
    weights = process_logits(logits, rows, vocab_size=V)
    for idx in range(len(rows)):
        alone = logits[idx : idx + 1].clone()
        assert choose(alone, rows[idx : idx + 1], vocab_size=V) == together[idx : idx + 1]
        assert torch.equal(
            process_logits(alone, rows[idx : idx + 1], vocab_size=V)[0], weights[idx]
        )
    backwards = choose(logits.flip(0), rows[::-1], vocab_size=V)
    assert backwards[::-1] == together


def test_the_callers_logits_are_left_as_they_were() -> None:
    logits = random_logits(len(OPTIONS), V)
    before = logits.clone()
    rows = [a_row(**options) for options in OPTIONS]
    choose(logits, rows, vocab_size=V)
    process_logits(logits, rows, vocab_size=V)
    assert torch.equal(logits, before)


def test_half_precision_logits_are_widened_first() -> None:
    logits = random_logits(4, V)
    rows = [a_row(seed=s) for s in range(4)]
    halves = logits.to(torch.bfloat16)
    assert choose(halves, rows, vocab_size=V) == choose(halves.float(), rows, vocab_size=V)


# --- the law -------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_over_seeds_follow_the_tempered_softmax(temperature: float) -> None:
    values = [2.0, 1.0, 0.5, 0.0, -1.0]
    num_draws = 8000
    rows = [a_row(seed=s, temperature=temperature) for s in range(num_draws)]
    choices = choose(torch.tensor([values] * num_draws), rows, vocab_size=5)
    law = torch.softmax(torch.tensor(values, dtype=torch.float64) / temperature, 0).numpy()
    counts = np.bincount([int(c) for c in choices if isinstance(c, int)], minlength=5)
    assert stats.chisquare(counts, law * num_draws).pvalue > 0.001


def test_the_choice_depends_on_seed_and_position() -> None:
    logits = torch.zeros(1, V)
    by_seed = {choose(logits, [a_row(seed=s)], vocab_size=V)[0] for s in range(50)}
    by_place = {choose(logits, [a_row(range(n + 1))], vocab_size=V)[0] for n in range(50)}
    assert len(by_seed) > 40
    assert len(by_place) > 40


# --- each option ---------------------------------------------------------------------------------


def test_penalties_are_vllms_over_prompt_and_output() -> None:
    row = a_row(
        (0, 1, 1, 2, 2, 2),
        prompt=(0, 1),
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.5,
    )
    # 0: prompt only; 1: prompt and once in the output; 2: three times in the output; 3: neither
    expected = [4.0 / 2, 3.0 / 2 - 0.25 - 0.5, -1.0 * 2 - 0.75 - 0.5, 1.0]
    weights = processed([4.0, 3.0, -1.0, 1.0], row)
    assert weights == pytest.approx([x - expected[0] for x in expected])


def test_penalties_count_the_draft_prefix_of_the_row_and_nothing_else() -> None:
    penalties: dict[str, Any] = {"presence_penalty": 1.0, "frequency_penalty": 0.5}
    drafted = a_row((1,), draft_prefix=(2, 2), **penalties)
    emitted = a_row((1, 2, 2), prompt=(1,), **penalties)
    elsewhere = a_row((1,), draft_prefix=(3,), **penalties)
    values = [0.0, 0.0, 1.0, 0.0]
    assert processed(values, drafted) == processed(values, emitted)
    assert processed(values, drafted) != processed(values, elsewhere)


def test_only_allowed_tokens_can_be_chosen_whatever_their_bias() -> None:
    row = a_row((0,), allowed_token_ids=(2, 4, 99), logit_bias={1: 50.0}, top_k=1)
    assert survivors([3.0, 9.0, 1.0, 8.0, 2.0], row) == [4]
    row = a_row((0,), allowed_token_ids=(2, 4), temperature=0.0)
    assert choose(torch.tensor([[3.0, 9.0, 1.0, 8.0, 2.0]]), [row], vocab_size=5) == [4]


def test_a_bad_word_is_cut_at_its_last_token_and_only_where_it_would_be_whole() -> None:
    words = ((1,), (3, 4), (5, 3, 2), (99,))
    flat = [0.0] * 6

    def open_after(history: tuple[int, ...], prefix: tuple[int, ...] = ()) -> list[int]:
        row = a_row(history, prompt=(9, 3), draft_prefix=prefix, bad_word_ids=words)
        return survivors(flat, row)

    assert open_after((9, 3)) == [0, 2, 3, 4, 5]  # the prompt's 3 is no part of the output
    assert open_after((9, 3, 3)) == [0, 2, 3, 5]
    assert open_after((9, 3, 5), (3,)) == [0, 3, 5]  # guesses count as if they were accepted
    assert open_after((9, 3, 5, 3)) == [0, 3, 5]
    assert open_after((9, 3, 5, 0, 3)) == [0, 2, 3, 5]


def test_logit_bias_is_added_after_penalties_and_before_temperature() -> None:
    row = a_row((0,), repetition_penalty=2.0, logit_bias={0: 3.0}, temperature=0.5)
    assert processed([2.0, 0.0], row) == pytest.approx([0.0, -(2.0 / 2 + 3.0) / 0.5])


@pytest.mark.parametrize(("num_output", "masked"), [(0, True), (2, True), (3, False)])
def test_end_and_stop_ids_are_masked_until_min_tokens(num_output: int, masked: bool) -> None:
    row = a_row((1,) * (1 + num_output), prompt=(1,), eos_ids=[2], stop_ids=[2, 3], min_tokens=3)
    assert (survivors([0.0] * 5, row) == [0, 1, 4]) is masked


def test_min_tokens_counts_the_draft_prefix() -> None:
    options: dict[str, Any] = {"prompt": (1,), "eos_ids": [2], "min_tokens": 3}
    assert 2 not in survivors([0.0] * 5, a_row((1, 1), draft_prefix=(4,), **options))
    assert 2 in survivors([0.0] * 5, a_row((1, 1), draft_prefix=(4, 4), **options))


def test_an_end_id_that_stops_nothing_is_masked_by_min_tokens_all_the_same() -> None:
    ignored: dict[str, Any] = {"eos_ids": [2], "stop_ids": [], "ignore_eos": True}
    assert survivors([0.0] * 5, a_row(min_tokens=1, **ignored)) == [0, 1, 3, 4]
    assert survivors([0.0] * 5, a_row(**ignored)) == [0, 1, 2, 3, 4]


def test_a_guess_that_is_no_token_is_no_penalty_either() -> None:
    row = a_row((1,), draft_prefix=(-1, 99), presence_penalty=1.0, repetition_penalty=2.0)
    assert processed([4.0, 2.0, 4.0], row) == [0.0, -3.0, 0.0]


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, [1, 2]),
        ({"top_k": 0}, [0, 1, 2, 3, 4]),
        ({"top_k": -1}, [0, 1, 2, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.5}, [1, 2]),  # .4 is short of it, .4 + .3 is not
        ({"top_p": 0.4 - 1e-6}, [2]),
        ({"top_p": 0.4 + 1e-6}, [1, 2]),
        ({"top_p": 0.0}, [2]),
        ({"top_k": 2, "top_p": 0.56}, [2]),  # of what top-k left: .4 / .7 = .571
        ({"top_k": 2, "top_p": 0.58}, [1, 2]),
        ({"min_p": 0.26}, [1, 2, 3]),  # of .4: at least .104
        ({"min_p": 1.0}, [2]),
    ],
    ids=str,
)
def test_filters_keep_the_right_tokens(options: dict[str, Any], kept: list[int]) -> None:
    values = [math.log(p) for p in (0.1, 0.3, 0.4, 0.15, 0.05)]
    assert survivors(values, a_row(**options)) == kept


def test_filters_see_tempered_probabilities() -> None:
    values = [math.log(p) for p in (0.6, 0.3, 0.1)]
    assert survivors(values, a_row(top_p=0.65)) == [0, 1]
    assert survivors(values, a_row(top_p=0.65, temperature=0.5)) == [0]  # .36 / .46


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.3}, {"temperature": 0.0}], ids=str)
def test_of_equal_logits_the_lowest_ids_stay(options: dict[str, Any]) -> None:
    num_kept = 1 if options == {"temperature": 0.0} else 2
    assert survivors([0.0, 1.0, 1.0, 1.0, 1.0], a_row(**options)) == [1, 2][:num_kept]
    assert choose(torch.tensor([[0.0, 1, 1]]), [a_row(temperature=0.0)], vocab_size=3) == [1]


@pytest.mark.parametrize("temperature", [0.0, -0.0, 1e-10, 1e-6])
def test_tiny_temperatures_are_greedy_and_leave_their_batch_mates_alone(
    temperature: float,
) -> None:
    logits = random_logits(3, V)
    mate = a_row(seed=1)
    tiny = a_row(seed=2, temperature=temperature)
    choices = choose(logits, [mate, tiny, mate], vocab_size=V)
    assert choices[1] == int(logits[1].argmax())
    assert [choices[0]] == choose(logits[:1], [mate], vocab_size=V)
    assert [choices[2]] == choose(logits[2:], [mate], vocab_size=V)


def test_the_smallest_temperature_that_is_not_greedy_still_gives_a_law() -> None:
    logits = torch.tensor([[1e4, -3.4e38, 1e4 - 1e-3, -math.inf]])
    law = process_logits(logits, [a_row(temperature=1e-5)], vocab_size=4).softmax(-1)
    assert law[0].tolist() == pytest.approx([1.0, 0.0, 0.0, 0.0])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_padding_id_never_wins_and_never_shapes_the_law(options: dict[str, Any]) -> None:
    logits = random_logits(4, V)
    padded = torch.cat([logits, torch.full((4, 24), 100.0)], dim=1)
    rows = [a_row(seed=s, **options) for s in range(4)]
    assert choose(padded, rows, vocab_size=V) == choose(logits, rows, vocab_size=V)
    assert torch.all(process_logits(padded, rows, vocab_size=V)[:, V:] == -math.inf)


# --- rows that cannot choose ---------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("values", "word"),
    [
        ([-math.inf] * 3, "masked"),
        ([math.nan, 0.0, 1.0], "damaged"),
        ([0.0, math.inf, 1.0], "damaged"),
    ],
)
def test_a_row_without_a_choice_is_an_error_of_that_row_alone(
    values: list[float], word: str, temperature: float
) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], values, [0.0, 1.0, 2.0]])
    rows = [a_row(seed=s, temperature=temperature) for s in range(3)]
    first, second, third = choose(logits, rows, vocab_size=3)
    assert isinstance(first, int)
    assert isinstance(third, int)
    assert isinstance(second, RowError)
    assert word in str(second)
    assert "position 3" in str(second)


def test_min_tokens_that_leave_nothing_say_so() -> None:
    row = a_row(min_tokens=1, stop_ids=[0, 1])
    (error,) = choose(torch.zeros(1, 2), [row], vocab_size=2)
    assert isinstance(error, RowError)
    assert "min_tokens" in str(error)


# --- log-probabilities ---------------------------------------------------------------------------


def test_logprobs_are_the_models_own_not_those_of_the_processed_row() -> None:
    logits = random_logits(3, V)
    expected = logits.log_softmax(-1)
    for idx, entry in enumerate(logprobs(logits, [5, 6, 7], 4, vocab_size=V)):
        assert entry.logprob == pytest.approx(float(expected[idx, 5 + idx]), abs=1e-5)
        best = expected[idx].sort(descending=True, stable=True)
        assert [token for token, _ in entry.top] == best.indices[:4].tolist()
        assert [value for _, value in entry.top] == pytest.approx(
            best.values[:4].tolist(), abs=1e-5
        )


def test_logprobs_are_finite_and_leave_padding_out() -> None:
    logits = torch.tensor([[0.0, -math.inf, 0.0, 99.0]])
    (entry,) = logprobs(logits, [1], 10, vocab_size=3)
    assert entry.logprob == -9999.0
    assert [token for token, _ in entry.top] == [0, 2, 1]
    assert entry.top[0][1] == pytest.approx(-math.log(2))


def test_no_alternatives_are_listed_when_none_are_asked_for() -> None:
    (entry,) = logprobs(torch.zeros(1, 4), [2], 0, vocab_size=4)
    assert entry.top == ()
    assert entry.logprob == pytest.approx(-math.log(4))


# --- proposals of draft models -------------------------------------------------------------------


def test_a_coupled_proposal_from_the_targets_own_logits_is_the_targets_choice() -> None:
    logits = random_logits(40, V)
    rows = [a_row(seed=s, temperature=0.7, top_p=0.9) for s in range(40)]
    proposals = draft_choice(logits, rows, [Purpose.TARGET] * 40, vocab_size=V)
    assert [p and p.token_id for p in proposals] == choose(logits, rows, vocab_size=V)
    assert all(p is not None and p.probs is None for p in proposals)


@pytest.mark.parametrize("sharpness", [1.0, 2.0])
def test_an_independent_proposal_is_drawn_from_the_probabilities_it_reports(
    sharpness: float,
) -> None:
    values, num_draws = [1.0, 0.5, 0.0, -2.0], 8000
    logits = torch.tensor([values]).expand(num_draws, -1)
    rows = [a_row(seed=s, top_k=3) for s in range(num_draws)]
    proposals = draft_choice(
        logits, rows, [Purpose.DRAFT] * num_draws, vocab_size=6, sharpness=sharpness
    )
    drawn = [p for p in proposals if p is not None]
    law = torch.softmax(torch.tensor(values[:3]) * sharpness, 0)
    assert drawn[0].probs is not None
    assert drawn[0].probs.tolist() == pytest.approx([*law.tolist(), 0.0, 0.0, 0.0], abs=1e-6)
    counts = np.bincount([p.token_id for p in drawn], minlength=3)
    expected = law.double().numpy()
    assert stats.chisquare(counts, expected / expected.sum() * num_draws).pvalue > 0.001


def test_independent_proposals_do_not_share_the_targets_noise() -> None:
    logits = torch.zeros(200, 2)
    rows = [a_row(seed=s) for s in range(200)]
    independent = draft_choice(logits, rows, [Purpose.DRAFT] * 200, vocab_size=2)
    choices = choose(logits, rows, vocab_size=2)
    num_equal = sum(
        p is not None and p.token_id == c for p, c in zip(independent, choices, strict=True)
    )
    assert 60 < num_equal < 140


def test_a_draft_never_proposes_a_padding_id_and_ignores_ids_it_does_not_know() -> None:
    row = a_row((1, 90), prompt=(1,), presence_penalty=1.0, logit_bias={95: 9.0}, temperature=0.0)
    smaller = draft_choice(torch.zeros(1, 50), [row], [Purpose.TARGET], vocab_size=100)
    padded = torch.zeros(1, 64)
    padded[0, 60:] = 50.0
    larger = draft_choice(padded, [row], [Purpose.TARGET], vocab_size=60)
    for (proposal,) in (smaller, larger):
        assert proposal is not None
        assert proposal.token_id < 50


def test_a_draft_with_useless_logits_proposes_nothing() -> None:
    logits = torch.tensor([[math.nan, 0.0], [0.0, 0.0]])
    broken, fine = draft_choice(logits, [a_row()] * 2, [Purpose.TARGET] * 2, vocab_size=2)
    assert broken is None
    assert fine is not None

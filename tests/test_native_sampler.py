"""The native sampler chooses what the numpy one chooses, bit for bit, on every instruction set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specserve.noise import Noise, Purpose, gumbel
from specserve.sampler import (
    LogitsRow,
    RowError,
    choose,
    choose_row,
    choose_row_in_numpy,
    edited,
    logprobs,
    penalise_in_numpy,
    process_logits,
)
from specserve_kernels import native_library, native_sampler
from tests.logit_rows import a_row, random_logits

pytestmark = pytest.mark.skipif(
    not native_sampler.available(), reason=f"no native sampler: {native_library.why_not()}"
)

F32 = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(params=["avx512", "avx2", "portable"], autouse=True, scope="module")
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    fastest = native_sampler.instruction_set()
    if not native_sampler.use_instruction_set(request.param):
        pytest.skip(f"this machine or build has no {request.param}; its best is {fastest}")
    yield request.param
    native_sampler.use_instruction_set(fastest)


def chosen(logits: F32, row: LogitsRow, **how: Any) -> int | str:
    """The native choice, or its error's message."""
    try:
        return choose_row(logits, row, noise=Noise(), **how)
    except RowError as error:
        return str(error)


def expected(logits: F32, row: LogitsRow, **how: Any) -> int | str:
    """The same by numpy."""
    try:
        return choose_row_in_numpy(edited(logits, row), row, noise=Noise(), **how)
    except RowError as error:
        return str(error)


def assert_same_choice(logits: F32, row: LogitsRow, **how: Any) -> None:
    assert native_sampler.fits(logits)
    assert chosen(logits, row, **how) == expected(logits, row, **how), (row, how)


# --- any row at all ------------------------------------------------------------------------------


@st.composite
def rows_of_logits(draw: st.DrawFn) -> F32:
    """Spread or flat, smooth or full of exact ties, with masked, hopeless and damaged tokens."""
    num_tokens = draw(st.one_of(st.integers(1, 300), st.sampled_from([4096, 5000, 60_000])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    spread = draw(st.sampled_from([0.0, 1e-6, 0.2, 1.0, 3.0, 6.0, 40.0]))
    logits = (rng.standard_normal(num_tokens) * spread).astype(np.float32)
    step = draw(st.sampled_from([None, 0.125, 2.0]))
    if step is not None:
        logits = np.round(logits / np.float32(step)) * np.float32(step)
    logits += np.float32(draw(st.sampled_from([0.0, -7.3, 1000.0])))
    for value in draw(st.lists(st.sampled_from([-math.inf, -3e38, -0.0, 30.0]), max_size=2)):
        logits[rng.random(num_tokens) < draw(st.sampled_from([0.01, 0.5, 1.0]))] = value
    if draw(st.integers(0, 30)) == 0:
        damage = draw(st.sampled_from([math.nan, math.inf]))
        logits[draw(st.integers(0, num_tokens - 1))] = damage
    return logits


PARAMS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 1e-4, 0.3, 0.7, 1.0, 1.3, 2.0])},
    optional={
        "top_k": st.one_of(st.integers(-1, 60), st.sampled_from([1000, 100_000, 2**31])),
        "top_p": st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 0.95, 1 - 2**-53])),
        "min_p": st.sampled_from([1e-300, 1e-6, 0.05, 0.5, 1.0]),
    },
)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    logits=rows_of_logits(),
    params=PARAMS,
    seed=st.integers(-(2**63), 2**64 - 1),
    position=st.sampled_from([1, 3, 900]),
    purpose=st.sampled_from(Purpose),
    sharpness=st.sampled_from([1.0, 0.5, 2.0, 3.3]),
)
def test_any_row_is_chosen_for_as_numpy_does(
    logits: F32,
    params: dict[str, Any],
    seed: int,
    position: int,
    purpose: Purpose,
    sharpness: float,
) -> None:
    row = a_row((1,) * position, seed=seed, **params)
    assert_same_choice(logits, row, purpose=purpose, sharpness=sharpness)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 63, 64, 127, 128, 129, 4095, 4096, 4097])
def test_every_length_of_row_is_read_to_its_end_and_not_beyond(num_tokens: int) -> None:
    wide = np.full(num_tokens + 200, 99.0, dtype=np.float32)  # padding ids that would win
    for seed in range(20):
        wide[:num_tokens] = random_logits(1, num_tokens, seed=seed)[0].numpy()
        for params in ({}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 3}):
            assert_same_choice(wide[:num_tokens], a_row(seed=seed, **params))


@pytest.mark.parametrize("options", [{}, {"top_k": 40}, {"top_p": 0.95}, {"min_p": 0.02}], ids=str)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_choice_is_the_argmax_of_processed_logits_plus_gumbel(
    options: dict[str, Any], temperature: float
) -> None:
    logits = random_logits(12, 5000, spread=4.0)
    rows = [a_row(seed=s, temperature=temperature, **options) for s in range(12)]
    weights = process_logits(logits, rows, vocab_size=5000).double().numpy()
    for idx, row in enumerate(rows):
        perturbed = weights[idx] + gumbel(idx, 3, Purpose.TARGET, 5000)
        assert chosen(logits[idx].numpy(), row) == int(perturbed.argmax())


def test_penalties_and_masks_come_first() -> None:
    row = a_row(
        (1, 2, 2, 3),
        prompt=(1,),
        presence_penalty=1.0,
        repetition_penalty=1.5,
        logit_bias={7: 4.0},
        min_tokens=9,
        eos_ids=[8],
    )
    for seed in range(50):
        assert_same_choice(random_logits(1, 12, seed=seed)[0].numpy(), row)


PENALTY = st.sampled_from([0.0, 0.1, 1.5, -2.0])


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    prompt=st.lists(st.integers(0, 40), min_size=1, max_size=20),
    output=st.lists(st.integers(0, 40), max_size=40),
    draft_prefix=st.lists(st.integers(-2, 40), max_size=3),  # a guess may be any number
    presence=PENALTY,
    frequency=PENALTY,
    repetition=st.sampled_from([1.0, 1.1, 0.7, 1e3]),
    seed=st.integers(0, 1000),
)
def test_penalties_are_numpys_to_the_bit(
    prompt: list[int],
    output: list[int],
    draft_prefix: list[int],
    presence: float,
    frequency: float,
    repetition: float,
    seed: int,
) -> None:
    row = a_row(
        prompt + output,
        prompt=prompt,
        draft_prefix=tuple(draft_prefix),
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
    )
    logits = np.random.default_rng(seed).standard_normal(36).astype(np.float32)
    logits[seed % 36] = -3e38
    by_numpy = logits.copy()
    penalise_in_numpy(by_numpy, np.array(prompt + output + draft_prefix), row)
    np.testing.assert_array_equal(edited(logits, row), by_numpy)


# --- near ties -----------------------------------------------------------------------------------


def test_two_tokens_one_rounding_apart_are_told_apart_alike() -> None:
    num_tokens = 2000
    for position in range(1, 60):
        noise = gumbel(5, position, Purpose.TARGET, num_tokens)
        first, second = (int(i) for i in np.argsort(-noise)[:2])
        logits = np.full(num_tokens, -50.0, dtype=np.float32)
        logits[first] = 0.0
        # Weight that makes up for the smaller noise, but for a step of float32 either way.
        level = np.float32(noise[first] - noise[second])
        for step in (-math.inf, 0.0, math.inf):
            logits[second] = np.nextafter(level, np.float32(step)) if step else level
            assert_same_choice(logits, a_row((1,) * position, seed=5))


def test_a_token_far_behind_wins_by_noise_from_the_tail() -> None:
    num_tokens, won = 60_000, 0
    for position in range(1, 60):
        noise = gumbel(2, position, Purpose.TARGET, num_tokens)
        lucky = int(noise.argmax())
        lead = noise[lucky] - noise[0]
        for behind in (lead - 1e-3, lead + 1e-3):
            logits = np.full(num_tokens, -math.inf, dtype=np.float32)
            logits[0], logits[lucky] = 5.0, 5.0 - behind
            assert_same_choice(logits, a_row((1,) * position, seed=2))
            won += chosen(logits, a_row((1,) * position, seed=2)) == lucky
    assert won >= 50


@pytest.mark.parametrize("level", [0.0, -2.5, 1e30])
@pytest.mark.parametrize("options", [{"top_k": 3}, {"top_p": 0.4}, {"min_p": 1.0}, {}], ids=str)
def test_of_exactly_equal_logits_the_same_stay(level: float, options: dict[str, Any]) -> None:
    logits = np.full(500, level, dtype=np.float32)
    for seed in range(40):
        assert_same_choice(logits, a_row(seed=seed, **options))


def test_logits_that_become_equal_only_by_the_temperature_are_equal() -> None:
    logits = np.full(300, -20.0, dtype=np.float32)
    logits[:40] = np.float32(1.0) + np.arange(40, dtype=np.float32) * np.float32(2**-23)
    for seed in range(40):
        for temperature in (0.3, 1.7, 2.0):
            assert_same_choice(logits, a_row(seed=seed, top_k=7, temperature=temperature))


def test_a_nucleus_ends_at_the_same_token_when_its_mass_is_met_exactly() -> None:
    logits = np.zeros(8, dtype=np.float32)  # each holds an eighth
    for eighths in range(9):
        for top_p in {math.nextafter(eighths / 8, 0), eighths / 8, math.nextafter(eighths / 8, 1)}:
            for seed in range(20):
                assert_same_choice(logits, a_row(seed=seed, top_p=top_p))


# --- useless rows --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "values",
    [
        [math.nan] * 40,
        [*[0.0] * 39, math.nan],
        [*[0.0] * 20, -math.nan, math.inf],
        [math.inf, 0.0],
        [-math.inf] * 40,
        [-math.inf],
    ],
    ids=str,
)
def test_a_row_with_nothing_to_choose_is_refused_in_the_same_words(
    values: list[float], temperature: float
) -> None:
    logits = np.array(values, dtype=np.float32)
    message = chosen(logits, a_row(temperature=temperature))
    assert isinstance(message, str)
    assert message == expected(logits, a_row(temperature=temperature))


# --- log-probabilities ---------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [5, 1000, 49_152])
@pytest.mark.parametrize("spread", [0.0, 0.2, 4.0])
def test_log_probabilities_are_numpys_to_the_bit(num_tokens: int, spread: float) -> None:
    logits = random_logits(6, num_tokens, spread=spread)
    logits[1, :3] = -math.inf
    strided = logits.repeat_interleave(2, dim=1)[:, ::2]  # as numpy only reads it
    assert not strided.is_contiguous()
    for num_top in (0, 1, 5, 20):
        native = logprobs(logits, [0, 1, 2, 3, 4, 0], num_top, vocab_size=num_tokens)
        assert native == logprobs(strided, [0, 1, 2, 3, 4, 0], num_top, vocab_size=num_tokens)


def test_alternatives_that_are_masked_are_listed_all_the_same() -> None:
    (entry,) = logprobs(torch.tensor([[0.0, -math.inf, 1.0]]), [2], 3, vocab_size=3)
    assert [token for token, _ in entry.top] == [2, 0, 1]


# --- several rows --------------------------------------------------------------------------------


def test_rows_chosen_in_one_call_are_chosen_as_alone() -> None:
    logits = random_logits(40, 3000)
    logits[3] = math.nan
    logits[4] = -math.inf
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.8},
        {"logit_bias": {5: 9.0}},
    ]
    rows = [a_row(seed=s, **options[s % 4]) for s in range(40)]
    together = choose(logits, rows, vocab_size=2990)
    alone = [expected(logits[s, :2990].numpy(), rows[s]) for s in range(40)]
    assert [c if isinstance(c, int) else str(c) for c in together] == alone
    assert sum(isinstance(c, RowError) for c in together) == 2


def test_rows_chosen_at_once_on_several_threads_do_not_meet() -> None:
    logits = random_logits(64, 3000).numpy()
    rows = [a_row(seed=s, top_p=0.9 if s % 2 else 1.0, temperature=0.8) for s in range(64)]
    alone = [chosen(logits[s], rows[s]) for s in range(64)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            assert list(pool.map(chosen, logits, rows)) == alone

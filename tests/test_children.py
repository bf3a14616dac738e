"""From a draft's logits to guesses: which, in what order, and by what law."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from specserve.noise import Purpose, gumbel
from specserve.sampler import LogitsRow, draft_choice, process_row
from specserve_drafts.children import MOST_CANDIDATES, Guess, Place, children
from tests.logit_rows import a_sampling_request

V = 2000
HISTORY = (5, 6, 7, 5, 6)


def some_logits(num_rows: int = 1, spread: float = 3.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, V, generator=generator) * spread


def a_place(width: int = 1, *, sharpness: float = 1.0, node: int = 0, draws: bool = True,
            prefix: tuple[int, ...] = (), **request: Any) -> Place:  # fmt: skip
    row = LogitsRow(a_sampling_request(HISTORY[:3], **request), HISTORY, prefix)
    return Place(row, node, width, sharpness, draws)


def guesses(logits: Tensor, place: Place, **vocabulary: Any) -> list[Guess]:
    (found,) = children(logits, [place], **({"vocab_size": V} | vocabulary))
    return found


PARAMS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"temperature": 0.8},
    "greedy": {"temperature": 0.0},
    "filters": {"temperature": 1.0, "top_k": 30, "top_p": 0.9},
    "min_p": {"temperature": 1.2, "min_p": 0.05},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "presence_penalty": 0.7},
    "bias": {"temperature": 0.8, "logit_bias": {11: 9.0, 5: -100.0}},
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 1.0},
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_one_child_is_what_the_target_would_choose_from_these_logits(params: Any) -> None:
    for seed in range(20):
        logits, place = some_logits(seed=seed), a_place(seed=seed, **params)
        (proposal,) = draft_choice(logits, [place.row], [Purpose.TARGET], vocab_size=V)
        assert proposal is not None
        assert guesses(logits, place)[0].token_id == proposal.token_id


@pytest.mark.parametrize("sharpness", [1.0, 2.0])
def test_children_are_the_best_of_the_sharpened_weights_and_the_targets_noise(
    sharpness: float,
) -> None:
    for seed in range(20):
        logits = some_logits(seed=seed)
        place = a_place(6, sharpness=sharpness, seed=seed, temperature=0.7)
        noise = gumbel(seed, place.row.position, Purpose.TARGET, V)
        scores = sharpness * logits[0].double().numpy() / 0.7 + noise
        scores[logits[0].argsort(descending=True)[MOST_CANDIDATES:]] = -np.inf
        found = guesses(logits, place)
        assert [guess.token_id for guess in found] == np.argsort(-scores)[:6].tolist()
        odds = [guess.score for guess in found]
        assert odds == sorted(odds, reverse=True)
        assert sum(odds) <= 1 + 1e-9


def test_greedy_children_are_the_best_logits_and_score_their_probability() -> None:
    logits = some_logits()
    law = torch.softmax(logits[0].double(), 0)
    found = guesses(logits, a_place(5, temperature=0.0))
    assert [guess.token_id for guess in found] == law.topk(5).indices.tolist()
    assert [guess.score for guess in found] == pytest.approx(law.topk(5).values.tolist(), rel=1e-5)


def test_of_equal_logits_the_lowest_ids_come_first() -> None:
    logits = torch.zeros(1, 8)
    found = guesses(logits, a_place(3, temperature=0.0), vocab_size=8)
    assert [guess.token_id for guess in found] == [0, 1, 2]


# --- drawn guesses -------------------------------------------------------------------------------


def test_drawn_guesses_follow_the_law_they_report() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0]])
    counts, law = np.zeros(5), np.zeros(5)
    for seed in range(2000):
        place = a_place(sharpness=1.5, seed=seed, temperature=0.9, verify="rejection")
        (guess,) = guesses(logits, place, vocab_size=5)
        assert guess.probs is not None
        counts[guess.token_id] += 1
        law = guess.probs.double().numpy()
    assert law == pytest.approx(torch.softmax(logits[0] / 0.9 * 1.5, 0).numpy(), rel=1e-5)
    assert stats.chisquare(counts, law / law.sum() * counts.sum()).pvalue > 1e-4


def test_siblings_are_drawn_without_replacement() -> None:
    """The second child is a draw from what the first one left."""
    logits = torch.tensor([[1.0, 0.5, 0.0]])
    law = torch.softmax(logits[0], 0).double().numpy()
    expected = np.array([[law[a] * law[b] / (1 - law[a]) for b in range(3)] for a in range(3)])
    np.fill_diagonal(expected, 0)
    counts = np.zeros((3, 3))
    for seed in range(2000):
        first, second = guesses(
            logits, a_place(2, seed=seed, temperature=1.0, verify="block"), vocab_size=3
        )
        counts[first.token_id, second.token_id] += 1
    off = ~np.eye(3, dtype=bool)
    assert counts[~off].sum() == 0
    assert stats.chisquare(counts[off], expected[off] / expected.sum() * 2000).pvalue > 1e-4


def test_a_drawn_guesss_score_does_not_tell_which_token_was_drawn() -> None:
    logits = torch.tensor([[1.0, 0.5, 0.0]])
    found = {
        (guess.token_id, guess.score)
        for seed in range(50)
        for guess in guesses(
            logits, a_place(seed=seed, temperature=1.0, verify="rejection"), vocab_size=3
        )
    }
    assert len({token for token, _ in found}) == 3
    assert len({score for _, score in found}) == 1


def test_branches_are_drawn_with_noise_of_their_own() -> None:
    """Two nodes of one depth: their children must not be one draw."""
    logits = torch.zeros(1, 50)
    same = 0
    for seed in range(200):
        one, other = (
            guesses(
                logits,
                a_place(node=node, seed=seed, temperature=1.0, verify="block"),
                vocab_size=50,
            )
            for node in (1, 2)
        )
        same += one[0].token_id == other[0].token_id
    assert same < 20


def test_who_must_not_draw_gives_the_likeliest() -> None:
    logits = some_logits()
    found = guesses(logits, a_place(3, draws=False, temperature=1.0, verify="rejection"))
    assert [guess.token_id for guess in found] == logits[0].topk(3).indices.tolist()
    assert all(guess.probs is None for guess in found)


# --- vocabularies --------------------------------------------------------------------------------


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_a_reduced_vocabulary_is_the_whole_one_with_the_rest_impossible(params: Any) -> None:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randperm(V, generator=generator)[:700].sort().values
    for seed in range(10):
        part = some_logits(seed=seed)[:, :700]
        whole = torch.full((1, V), -torch.inf)
        whole[0, ids] = part[0]
        place = a_place(4, seed=seed, **params)
        mapped = guesses(part, place, target_ids=ids.numpy())
        plain = guesses(whole, place)
        assert [guess.token_id for guess in mapped] == [guess.token_id for guess in plain]
        assert [g.score for g in mapped] == pytest.approx([g.score for g in plain], rel=1e-4)


def test_padding_ids_are_never_guessed() -> None:
    logits = some_logits()
    logits[0, 1500:] = 50.0
    found = guesses(logits, a_place(8, temperature=1.0), vocab_size=1500)
    assert len(found) == 8
    assert max(guess.token_id for guess in found) < 1500


def test_filters_leave_no_more_children_than_they_leave_tokens() -> None:
    logits = some_logits(spread=8)
    place = a_place(10, temperature=1.0, top_p=0.5)
    kept = np.isfinite(process_row(logits[0].numpy(), place.row)).sum()
    assert len(guesses(logits, place)) == kept


@pytest.mark.parametrize("useless", [torch.nan, torch.inf, -torch.inf])
def test_useless_logits_have_no_children_and_hurt_no_neighbour(useless: float) -> None:
    logits = some_logits(2)
    logits[0] = useless
    none, some = children(logits, [a_place(3), a_place(3)], vocab_size=V)
    assert none == []
    assert some == guesses(logits[1:], a_place(3))


def test_only_the_best_candidates_are_looked_at() -> None:
    logits = torch.zeros(1, V)
    found = guesses(logits, a_place(V, temperature=1.0, seed=1))
    assert len(found) == MOST_CANDIDATES

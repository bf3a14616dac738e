"""Speculation never bends the law: emitted tokens against the target distribution, by chi-square.

The toy target is a Markov chain over 5 tokens; a window of K = 3 guesses, then whatever the
verifier emits, step after step through whole sequences, so noise is reused across steps exactly as
in the engine. Tested is the law of a token given the two before it: 25 contexts, which a bend of
one token, or a dependence between neighbours, both change. Seeds are fixed: no test here is random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from specserve.drafting import Draft, chain
from specserve.noise import F64, Noise, Purpose, race
from specserve.sampler import choose, draft_choice, process_logits
from specserve.sampler.rows import LogitsRow
from specserve.types import Request
from specserve.verifier import accept_chain, verify
from tests.logit_rows import a_sampling_request

V, K = 5, 3
SEQUENCE_LEN = 66  # 64 tokens with two before them
generator = torch.Generator().manual_seed(7)
TARGET = torch.randn(V, V, generator=generator)  # [previous token, V] logits
DRAFT = TARGET + torch.randn(V, V, generator=generator)  # a draft that is often wrong


def p_value(sequences: list[list[int]], law: F64) -> float:
    """Of the observed tokens given the two before them; law [V, V] is p(token | previous)."""
    counts = np.zeros((V, V, V))
    for tokens in sequences:
        np.add.at(counts, (tokens[:-2], tokens[1:-1], tokens[2:]), 1)
    expected = counts.sum(axis=2, keepdims=True) * law[None]
    possible = expected > 0
    assert not counts[~possible].any()
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - (counts.sum(axis=2) > 0).sum()
    return float(stats.chi2.sf(statistic, freedom))


def law_of(**params: Any) -> F64:
    """[V, V] float64: the target's processed distribution after each token."""
    rows = [LogitsRow(a_sampling_request((0,), **params), (0,))] * V
    return process_logits(TARGET.double(), rows, vocab_size=V).softmax(-1).numpy()


# --- the acceptance test and the residual draw, at full length ------------------------------------

Guesser = Callable[[int, int, int], tuple[list[int], list[F64]]]


def sampled_guesses(purpose: Purpose) -> Guesser:
    """Guesses drawn from the draft's chain with the noise of `purpose`, or one-hot after token 4.

    (seed, position, last token) -> (K token ids, K distributions)
    """
    noise, q = Noise(), DRAFT.double().softmax(-1).numpy()
    q[4] = np.eye(V)[2]  # a context in which the drafter always says 2

    def guess(seed: int, position: int, last: int) -> tuple[list[int], list[F64]]:
        tokens, laws = [], []
        for idx in range(K):
            laws.append(q[last])
            with np.errstate(divide="ignore"):
                weights = np.log(q[last])
            last = race(weights, seed=seed, position=position + idx, purpose=purpose, noise=noise)
            tokens.append(last)
        return tokens, laws

    return guess


def precomputed_guesses() -> Guesser:
    """The same, ten times faster: drawn from another generator, 2^16 windows per context."""
    rng = np.random.default_rng(1)
    q = DRAFT.double().softmax(-1).numpy()
    q[4] = np.eye(V)[2]
    steps = [np.repeat(np.arange(V), 2**16)]
    for _ in range(K):
        below = np.cumsum(q, axis=1)[steps[-1]] < rng.random((len(steps[-1]), 1))
        steps.append(np.minimum(below.sum(axis=1), V - 1))
    windows: list[Iterator[list[int]]] = [
        iter(np.stack(steps[1:], axis=1)[last * 2**16 : (last + 1) * 2**16].tolist())
        for last in range(V)
    ]

    def guess(seed: int, position: int, last: int) -> tuple[list[int], list[F64]]:
        tokens = next(windows[last])
        return tokens, [q[previous] for previous in [last, *tokens[:-1]]]

    return guess


def decode_by_rejection(num_tokens: int, guess: Guesser) -> list[list[int]]:
    """Sequences of num_tokens draws in all, by the production acceptance and residual."""
    log_p = TARGET.double().log_softmax(-1).numpy()
    noise, sequences = Noise(), []
    for seed in range(num_tokens // (SEQUENCE_LEN - 2)):
        tokens = [0]
        while len(tokens) < SEQUENCE_LEN:
            guesses, laws = guess(seed, len(tokens), tokens[-1])
            contexts = [tokens[-1], *guesses[:-1]]
            num_accepted, last = accept_chain(
                guesses,
                [(log_p[c], q) for c, q in zip(contexts, laws, strict=True)],
                seed=seed,
                position=len(tokens),
                noise=noise,
            )
            tokens += guesses[:num_accepted]
            if last is None:
                last = race(
                    log_p[tokens[-1]],
                    seed=seed,
                    position=len(tokens),
                    purpose=Purpose.TARGET,
                    noise=noise,
                )
            tokens.append(last)
        sequences.append(tokens[:SEQUENCE_LEN])
    return sequences


def test_2_to_the_18_draws_of_the_rejection_verifier_follow_the_target() -> None:
    sequences = decode_by_rejection(2**18, precomputed_guesses())
    assert p_value(sequences, law_of()) > 0.001


@pytest.mark.slow
def test_2_to_the_20_draws_of_the_rejection_verifier_follow_the_target() -> None:
    sequences = decode_by_rejection(2**20, sampled_guesses(Purpose.DRAFT))
    assert p_value(sequences, law_of()) > 0.001


def test_guesses_of_the_draft_stream_are_independent_of_the_test_that_accepts_them() -> None:
    sequences = decode_by_rejection(2**14, sampled_guesses(Purpose.DRAFT))
    assert p_value(sequences, law_of()) > 0.001


@pytest.mark.parametrize(
    ("shared", "num_draws"), [(Purpose.ACCEPT, 2**12), (Purpose.RESIDUAL, 2**15)]
)
def test_the_check_catches_a_verifier_that_shares_noise_with_its_draft(
    shared: Purpose, num_draws: int
) -> None:
    sequences = decode_by_rejection(num_draws, sampled_guesses(shared))
    assert p_value(sequences, law_of()) < 1e-6


# --- the whole path: sampling parameters, draft proposals, verify ---------------------------------

PARAMS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "top_k": 4},
    {"temperature": 1.5, "top_p": 0.8, "min_p": 0.1},
]


def one_hot_draft(request: Request, history: list[int]) -> Draft:
    return chain([(history[-1] + step) % V for step in range(K)])


def model_draft(request: Request, history: list[int]) -> Draft:
    """K proposals of the draft chain, by the request's own rule."""
    purpose = Purpose.TARGET if request.verify == "replay" else Purpose.DRAFT
    tokens: list[int] = []
    probs = []
    for _ in range(K):
        row = LogitsRow(request, history, tuple(tokens))
        logits = DRAFT[[*history, *tokens][-1]][None]
        (proposal,) = draft_choice(logits, [row], [purpose], vocab_size=V, sharpness=1.5)
        assert proposal is not None
        tokens.append(proposal.token_id)
        probs.append(proposal.probs)
    given = [q for q in probs if q is not None]
    return chain(tokens, probs=torch.stack(given) if given else None)


@pytest.mark.parametrize("rule", ["rejection", "replay"])
@pytest.mark.parametrize("propose", [one_hot_draft, model_draft])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_whole_sequences_follow_the_processed_law(
    params: dict[str, Any], propose: Callable[[Request, list[int]], Draft], rule: Any
) -> None:
    sequences = []
    for seed in range(32):
        request = a_sampling_request((0,), seed=seed, verify=rule, **params)
        history = [0]
        while len(history) < SEQUENCE_LEN:
            draft = propose(request, history)
            logits = TARGET[[history[-1], *draft.token_ids]]
            history += verify(request, history, draft, logits, vocab_size=V).token_ids
        sequences.append(history[:SEQUENCE_LEN])
    assert p_value(sequences, law_of(**params)) > 0.001


# --- replay --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_draws", [2**14, pytest.param(2**18, marks=pytest.mark.slow)], ids=["2^14", "2^18"]
)
def test_choices_by_common_noise_follow_the_target(num_draws: int) -> None:
    """Every draw at its own seed or position: half walk along positions, half along seeds."""
    rows = [
        LogitsRow(
            a_sampling_request((0,), seed=idx // 2, temperature=0.8), range(1 + idx % 2 * idx)
        )
        for idx in range(num_draws)
    ]
    contexts = np.arange(num_draws) // 2 % V
    logits = TARGET[torch.from_numpy(contexts)]
    choices = np.array(choose(logits, rows, vocab_size=V))
    law = law_of(temperature=0.8)
    for context in range(V):
        counts = np.bincount(choices[contexts == context], minlength=V)
        assert stats.chisquare(counts, law[context] * counts.sum()).pvalue > 0.001


def test_neighbouring_choices_by_common_noise_are_independent() -> None:
    request = a_sampling_request((0,))
    logits = torch.zeros(2**14, 2)
    rows = [LogitsRow(request, range(1 + position)) for position in range(2**14)]
    choices = choose(logits, rows, vocab_size=2)
    num_equal = sum(a == b for a, b in pairwise(choices))
    assert stats.binomtest(num_equal, 2**14 - 1, 0.5).pvalue > 0.001


def test_coupled_proposals_are_accepted_at_least_as_often_as_the_bound_promises() -> None:
    """verification.md 2.4 (e): Pr[accept] = sum_x 1 / sum_y max(p_y / p_x, q_y / q_x)."""
    num_draws = 2**14
    rows = [LogitsRow(a_sampling_request((0,), seed=seed), (0,)) for seed in range(num_draws)]
    choices = choose(TARGET[:1].expand(num_draws, V), rows, vocab_size=V)
    proposals = draft_choice(
        DRAFT[:1].expand(num_draws, V), rows, [Purpose.TARGET] * num_draws, vocab_size=V
    )
    num_accepted = sum(
        proposal is not None and proposal.token_id == choice
        for proposal, choice in zip(proposals, choices, strict=True)
    )
    p = TARGET[0].double().softmax(0).numpy()
    q = DRAFT[0].double().softmax(0).numpy()
    ratios = np.maximum(p[None] / p[:, None], q[None] / q[:, None])  # [x, y]
    expected = float((1 / ratios.sum(axis=1)).sum())
    assert stats.binomtest(num_accepted, num_draws, expected).pvalue > 0.001

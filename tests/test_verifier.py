"""What is accepted, what is emitted, and that under replay a draft changes nothing but speed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specserve.drafting import NO_DRAFT, Draft, chain
from specserve.noise import Noise, Purpose, uniform
from specserve.sampler import RowError, choose, process_logits
from specserve.types import LOSSY_RULES, Request, VerifyRule
from specserve.verifier import RULES, Verdict, node_rows, verify, verify_replay
from tests.logit_rows import a_sampling_request, random_logits

V = 12
PROMPT = (1, 2, 3)

every_rule = pytest.mark.parametrize("rule", RULES)
every_test = pytest.mark.parametrize("rule", ["block", "rejection"])


def toy_logits(context: tuple[int, ...]) -> Tensor:
    """[V] a language model: any function of the whole context will do."""
    seed = hash(context) % 2**31  # hashes of tuples of ints are the same in every process
    return torch.randn(V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def target_logits(request: Request, history: list[int], draft: Draft) -> Tensor:
    """[K+1, V] as a forward over [last token, guesses...] gives them."""
    rows = node_rows(request, history, draft)
    return torch.stack([toy_logits((*history, *row.draft_prefix)) for row in rows])


def decode(
    request: Request,
    num_tokens: int,
    drafts: Callable[[list[int]], Draft] = lambda history: NO_DRAFT,
) -> list[int]:
    """Decode with whatever `drafts` guesses after each history."""
    history = list(request.prompt_ids)
    while len(history) < len(request.prompt_ids) + num_tokens:
        draft = drafts(history)
        logits = target_logits(request, history, draft)
        history += verify(request, history, draft, logits, vocab_size=V).token_ids
    return history[len(request.prompt_ids) :][:num_tokens]


def at_length(drafts: dict[int, Draft]) -> Callable[[list[int]], Draft]:
    return lambda history: drafts[len(history)]


# --- the walk ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("guesses", "choices", "expected"),
    [
        ([], [7], ([7], [])),
        ([5, 6], [4, 6, 7], ([4], [])),
        ([5, 6], [5, 9, 7], ([5, 9], [0])),
        ([5, 6], [5, 6, 7], ([5, 6, 7], [0, 1])),
    ],
    ids=["no guesses", "first wrong", "second wrong", "all right and a bonus"],
)
def test_a_chain_is_accepted_up_to_its_first_wrong_guess(
    guesses: list[int], choices: list[int], expected: tuple[list[int], list[int]]
) -> None:
    tokens, path = expected
    verdict = verify_replay(choices, chain(guesses))
    assert verdict == Verdict(token_ids=tuple(tokens), path=tuple(path))


#   root -> 0 (5) -> 2 (6) -> 4 (8)
#        -> 1 (7) -> 3 (6)
#                 -> 5 (9)
TREE = Draft(token_ids=(5, 7, 6, 6, 8, 9), parents=(-1, -1, 0, 1, 2, 1))


@pytest.mark.parametrize(
    ("choices", "tokens", "path"),
    [
        ([5, 6, 0, 8, 0, 3, 0], (5, 6, 8, 3), (0, 2, 4)),
        ([7, 6, 9, 0, 0, 0, 2], (7, 9, 2), (1, 5)),
        ([7, 6, 4, 0, 0, 0, 0], (7, 4), (1,)),
        ([6, 6, 6, 6, 6, 6, 6], (6,), ()),
    ],
    ids=["deepest path", "second branch, second child", "branch without the choice", "no child"],
)
def test_a_tree_is_walked_along_the_targets_choices(
    choices: list[int], tokens: tuple[int, ...], path: tuple[int, ...]
) -> None:
    assert verify_replay(choices, TREE) == Verdict(token_ids=tokens, path=path)


def test_of_twin_children_the_first_is_taken_and_its_own_children_follow() -> None:
    twins = Draft(token_ids=(5, 5, 6), parents=(-1, -1, 0))
    assert verify_replay([5, 6, 0, 7], twins).path == (0, 2)


@every_rule
def test_an_id_that_is_no_token_is_never_accepted(rule: VerifyRule) -> None:
    for guess in (-1, V, 10**9):
        request = a_sampling_request(PROMPT, verify=rule)
        for draft in (chain([guess]), Draft(token_ids=(guess, 0, guess), parents=(-1, 0, -1))):
            logits = random_logits(1 + len(draft.token_ids), V)
            verdict = verify(request, PROMPT, draft, logits, vocab_size=V)
            assert verdict.path == ()
            assert 0 <= verdict.token_ids[0] < V


def test_an_error_counts_only_at_the_root() -> None:
    """Behind a guess it is met in the next step, as without guesses, unless the text ends there."""
    error = RowError("nothing to choose")
    assert verify_replay([4, error], chain([5])) == Verdict(token_ids=(4,), path=())
    assert verify_replay([5, error], chain([5])) == Verdict(token_ids=(5,), path=())
    assert verify_replay([5, 6, error], chain([5, 6])) == Verdict(token_ids=(5, 6), path=(0,))
    with pytest.raises(RowError, match="nothing to choose"):
        verify_replay([error, 5], chain([5]))


# --- node rows -----------------------------------------------------------------------------------


def test_each_node_sees_history_and_its_own_ancestors() -> None:
    rows = node_rows(a_sampling_request(PROMPT), PROMPT, TREE)
    assert [row.draft_prefix for row in rows] == [
        (), (5,), (7,), (5, 6), (7, 6), (5, 6, 8), (7, 9),
    ]  # fmt: skip
    assert [row.position for row in rows] == [3, 4, 4, 5, 5, 6, 5]


# --- exact replay --------------------------------------------------------------------------------


@st.composite
def trees(draw: st.DrawFn) -> Draft:
    num_nodes = draw(st.integers(0, 7))
    parents = [draw(st.integers(-1, idx - 1)) for idx in range(num_nodes)]
    tokens = draw(st.lists(st.integers(-1, V), min_size=num_nodes, max_size=num_nodes))
    return Draft(token_ids=tuple(tokens), parents=tuple(parents))


PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.0, "presence_penalty": 2.0, "frequency_penalty": 1.0},
    {"temperature": 1.0, "repetition_penalty": 1.5, "logit_bias": {4: 2.0}},
    {"temperature": 0.0, "min_tokens": 9, "eos_ids": [4, 5, 6], "logit_bias": {4: 20.0}},
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@settings(max_examples=20, deadline=None)
@given(drafts=st.lists(trees(), min_size=20, max_size=20), seed=st.integers(-(2**63), 2**64 - 1))
def test_no_draft_whatever_its_shape_changes_a_token(
    params: dict[str, Any], drafts: list[Draft], seed: int
) -> None:
    request = a_sampling_request(PROMPT, seed=seed, **params)
    steps = iter(drafts)
    assert decode(request, 20, lambda history: next(steps)) == decode(request, 20)


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_right_guesses_are_all_accepted_and_change_no_token(params: dict[str, Any]) -> None:
    request = a_sampling_request(PROMPT, seed=11, **params)
    truth = decode(request, 24)

    def right(history: list[int]) -> Draft:
        return chain(truth[len(history) - 3 : len(history)])

    history = list(PROMPT)
    for _ in range(6):
        draft = right(history)
        logits = target_logits(request, history, draft)
        verdict = verify(request, history, draft, logits, vocab_size=V)
        assert verdict.path == (0, 1, 2)
        history += verdict.token_ids
    assert history[3:] == truth


def test_end_ids_in_a_draft_are_refused_until_min_tokens() -> None:
    request = a_sampling_request(
        PROMPT, temperature=0.0, min_tokens=6, eos_ids=[4], stop_ids=[4], logit_bias={4: 50.0}
    )
    tokens = decode(request, 12, lambda history: chain([4] * 5))
    assert 4 not in tokens[:6]
    assert tokens[6:] == [4] * 6


# --- rules that accept by a test -----------------------------------------------------------------


@every_rule
@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_without_guesses_every_rule_is_replay(
    params: dict[str, Any], seed: int, rule: VerifyRule
) -> None:
    asked = a_sampling_request(PROMPT, seed=seed, verify=rule, **params)
    replay = a_sampling_request(PROMPT, seed=seed, verify="replay", **params)
    assert decode(asked, 12) == decode(replay, 12)


@every_rule
@settings(max_examples=10, deadline=None)
@given(drafts=st.lists(trees(), min_size=20, max_size=20))
def test_greedy_text_is_the_same_by_every_rule(rule: VerifyRule, drafts: list[Draft]) -> None:
    for params in (PARAMS[0], PARAMS[3], PARAMS[5]):
        request = a_sampling_request(PROMPT, verify=rule, **params)
        truth = decode(a_sampling_request(PROMPT, **params), 20)
        half_right = {n: chain([*truth[n - 3 :][:1], 0, 1]) for n in range(3, 40)}
        assert decode(request, 20, at_length(half_right)) == truth
        steps = iter(drafts)
        assert decode(request, 20, lambda history, steps=steps: next(steps)) == truth


@every_test
def test_a_guess_is_accepted_exactly_when_u_is_below_p_over_q(rule: VerifyRule) -> None:
    logits = random_logits(2, V, spread=1.0)
    q = random_logits(1, V, seed=1, spread=1.0).softmax(-1)
    num_accepted = 0
    for seed in range(300):
        request = a_sampling_request(PROMPT, seed=seed, verify=rule)
        guess = seed % V
        verdict = verify(request, PROMPT, chain([guess], probs=q), logits, vocab_size=V)
        p = process_logits(logits, node_rows(request, PROMPT, NO_DRAFT), vocab_size=V)[0].softmax(0)
        accept_u = Noise().accept_uniform(seed, len(PROMPT))
        expected = accept_u < float(p[guess]) / float(q[0, guess])
        assert (verdict.path == (0,)) is expected
        assert (verdict.token_ids[0] == guess) or not expected
        num_accepted += expected
    assert 100 < num_accepted < 300


@every_test
def test_a_recovered_token_is_never_one_that_the_draft_overrates(rule: VerifyRule) -> None:
    logits = torch.zeros(2, 4)
    q = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    recovered = set()
    for seed in range(200):
        request = a_sampling_request(PROMPT, seed=seed, verify=rule)
        verdict = verify(request, PROMPT, chain([seed % 2], probs=q), logits, vocab_size=4)
        if not verdict.path:
            recovered.add(verdict.token_ids[0])
    assert recovered == {2, 3}


@every_test
def test_a_branch_is_taken_when_the_one_before_it_fails(rule: VerifyRule) -> None:
    """The target cannot say 0; its children must not matter, and 1 is all that is left."""
    logits = torch.full((4, 3), -math.inf)
    logits[:, 1] = 0.0
    tree = Draft(token_ids=(0, 1, 1), parents=(-1, 0, -1))
    for seed in range(20):
        request = a_sampling_request(PROMPT, seed=seed, verify=rule)
        verdict = verify(request, PROMPT, tree, logits, vocab_size=3)
        assert verdict == Verdict(token_ids=(1, 1), path=(2,))


def test_typical_accepts_what_is_likely_enough_whatever_the_noise() -> None:
    logits = torch.tensor([[0.7, 0.2, 0.05, 0.05]] * 3).log()
    for seed in range(20):
        request = a_sampling_request(PROMPT, seed=seed, verify="typical")
        verdict = verify(request, PROMPT, chain([1, 2]), logits, vocab_size=4)
        assert verdict.path == (0,)
        assert verdict.token_ids[0] == 1


def test_typical_is_the_only_rule_called_lossy() -> None:
    assert {rule for rule in RULES if rule in LOSSY_RULES} == {"typical"}


@every_test
def test_a_draft_equal_to_the_target_is_always_accepted(rule: VerifyRule) -> None:
    logits = random_logits(2, V)
    for seed in range(200):
        request = a_sampling_request(PROMPT, seed=seed, verify=rule, temperature=0.7)
        rows = node_rows(request, PROMPT, NO_DRAFT)
        q = process_logits(logits[:1], rows, vocab_size=V).softmax(-1)
        draft = chain([seed % V], probs=q)
        assert verify(request, PROMPT, draft, logits, vocab_size=V).path == (0,)


@every_test
@pytest.mark.parametrize(
    "q",
    [
        pytest.param([0.0, 1.0, 0.0, 0.0], id="its own guess called impossible"),
        pytest.param([math.nan] * 4, id="NaN"),
        pytest.param([1.0, math.nan, -3.0, math.nan], id="NaN elsewhere"),
        pytest.param([-1.0, 2.0, 0.0, 0.0], id="negative"),
        pytest.param(None, id="none given"),
    ],
)
def test_probabilities_that_cannot_be_true_make_the_guess_one_hot(
    q: list[float] | None, rule: VerifyRule
) -> None:
    logits = torch.tensor([[1.0, 0.0, -1.0, 0.5]] * 2)
    probs = None if q is None else torch.tensor([q])
    for seed in range(50):
        request = a_sampling_request(PROMPT, seed=seed, verify=rule)
        verdict = verify(request, PROMPT, chain([0], probs=probs), logits, vocab_size=4)
        plain = verify(request, PROMPT, chain([0]), logits, vocab_size=4)
        assert verdict == plain
        assert (verdict.token_ids[0] == 0) is (verdict.path == (0,))


@every_test
@pytest.mark.parametrize("width", [V - 4, V + 4])
def test_a_draft_vocabulary_may_be_smaller_or_padded(width: int, rule: VerifyRule) -> None:
    logits = random_logits(2, V)
    q = torch.full((1, width), 1.0 / width)
    for seed in range(50):
        request = a_sampling_request(PROMPT, seed=seed, verify=rule)
        verdict = verify(request, PROMPT, chain([seed % V], probs=q), logits, vocab_size=V)
        assert all(0 <= token < V for token in verdict.token_ids)


@every_rule
def test_a_row_behind_a_guess_may_be_useless_and_the_first_may_not(rule: VerifyRule) -> None:
    logits = torch.tensor([[0.0, 50.0], [math.nan, math.nan]])
    request = a_sampling_request(PROMPT, verify=rule, temperature=0.0)
    for guess in (0, 1):
        verdict = verify(request, PROMPT, chain([guess]), logits, vocab_size=2)
        assert verdict == Verdict(token_ids=(1,), path=())
    with pytest.raises(RowError, match="damaged"):
        verify(request, PROMPT, chain([1]), logits.flip(0), vocab_size=2)


@every_test
def test_a_useless_row_makes_a_leaf_of_its_guess(rule: VerifyRule) -> None:
    """Its children cannot be tested; the guess itself is emitted as the step's last token."""
    logits = torch.tensor([[0.0, 50.0], [0.0, 50.0], [math.nan, 0.0], [0.0, 50.0]])
    request = a_sampling_request(PROMPT, verify=rule)
    verdict = verify(request, PROMPT, chain([1, 1, 1]), logits, vocab_size=2)
    assert verdict == Verdict(token_ids=(1, 1), path=(0,))


def test_accept_noise_is_a_stream_of_its_own() -> None:
    accept = [Noise().accept_uniform(seed, 3) for seed in range(2000)]
    for purpose in (Purpose.TARGET, Purpose.DRAFT, Purpose.RESIDUAL):
        others = [uniform(seed, 3, purpose, 1)[0] for seed in range(2000)]
        assert abs(np.corrcoef(accept, others)[0, 1]) < 4 / math.sqrt(2000)


def test_all_rows_of_a_step_can_be_chosen_in_one_call() -> None:
    requests = [a_sampling_request(PROMPT, seed=s, temperature=0.2 * s) for s in range(4)]
    drafts = [chain([1, 2]), NO_DRAFT, TREE, chain([3])]
    rows, logits, offsets = [], [], [0]
    for request, draft in zip(requests, drafts, strict=True):
        rows += node_rows(request, PROMPT, draft)
        logits.append(target_logits(request, list(PROMPT), draft))
        offsets.append(len(rows))
    choices = choose(torch.cat(logits), rows, vocab_size=V)
    for idx, (request, draft) in enumerate(zip(requests, drafts, strict=True)):
        alone = verify(request, PROMPT, draft, logits[idx], vocab_size=V)
        assert verify_replay(choices[offsets[idx] : offsets[idx + 1]], draft) == alone

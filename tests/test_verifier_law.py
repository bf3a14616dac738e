"""Speculation never bends the law: emitted tokens against the target distribution, by chi-square.

The toy target is a Markov chain over 5 tokens; the draft is often wrong, far away, of a smaller
vocabulary, certain, or drawn to padding, depending on the last token. Whole sequences are decoded,
step after step as in the engine, so noise that is met again in a later step is met here, too.
Tested is every token given all before it, grouped by the two before it: 25 contexts, which a bend
of one token, or a dependence between neighbours, both change. Seeds are fixed: nothing is random.
Below the laws stand the mistakes that this check must catch, each by the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from specserve.drafting import Draft, node_depths
from specserve.noise import F64, Noise, Purpose, at_node, gumbel_of
from specserve.sampler import choose, draft_choice, process_logits
from specserve.sampler.rows import LogitsRow
from specserve.types import Request, VerifyRule
from specserve.verifier import verify
from tests.logit_rows import a_sampling_request

V, W = 5, 7  # the draft's vocabulary has two padding ids
SEQUENCE_LEN = 66  # 64 tokens with two before them
HOURS = [pytest.mark.slow, pytest.mark.timeout(4 * 3600)]  # minutes on an idle core
CHAIN, TREE = (-1, 0, 1), (-1, -1, 0, 0, 1, 3)
generator = torch.Generator().manual_seed(7)
TARGET = torch.randn(V, V, generator=generator)  # [previous token, V] logits
NOISY = TARGET + torch.randn(V, V, generator=generator)  # a draft that is often wrong


@dataclass(frozen=True)
class World:
    """target: [V, V] logits, draft: [V, W] float64 laws, both after each token."""

    target: Tensor
    draft: F64
    params: Seq[dict[str, Any]]

    @cached_property
    def log_draft(self) -> F64:
        with np.errstate(divide="ignore"):
            return np.log(self.draft)


def varied() -> World:
    q = np.zeros((V, W))
    q[:, :V] = NOISY.double().softmax(-1).numpy()
    q[1, :V] = (-2 * TARGET[1]).double().softmax(-1).numpy()  # far from the target
    q[2, [1, 4]] = 0  # a smaller vocabulary
    q[3] = np.eye(W)[2]  # certain
    q[4, V:] = 0.3  # padding
    params: list[dict[str, Any]] = [
        {},
        {"temperature": 0.6, "top_k": 4},
        {"temperature": 1.5, "top_p": 0.8, "min_p": 0.1},
        {"presence_penalty": 0.7, "repetition_penalty": 1.3, "logit_bias": {1: 0.5}},
    ]
    return World(TARGET, q / q.sum(axis=1, keepdims=True), params)


def always(p: list[float], q: list[float]) -> World:
    """The same laws after every token: where a subtle mistake shows most."""
    target = torch.full((V, V), -torch.inf)
    target[:, : len(p)] = torch.tensor(p).log()
    return World(target, np.tile(q + [0.0] * (W - len(q)), (V, 1)), [{}])


VARIED = varied()

Guesser = Callable[[Request, list[int]], Draft]


class Law:
    """[V] float64 law of the token after a history; depends on what was seen, not how often."""

    def __init__(self, request: Request, target: Tensor) -> None:
        self._request = request
        self._target = target
        self._known: dict[tuple[int, frozenset[int]], F64] = {}

    def __call__(self, history: list[int], seen: frozenset[int]) -> F64:
        """seen: the tokens behind the prompt"""
        key = history[-1], seen
        if key not in self._known:
            row = LogitsRow(self._request, history)
            weights = process_logits(self._target[history[-1]].double()[None], [row], vocab_size=V)
            self._known[key] = weights[0].softmax(-1).numpy()
        return self._known[key]


class Check:
    """Chi-square of sum(observed - law) in every context, with the covariance that the laws give.

    Valid for laws that depend on the past: each token's surprise has mean 0 given what came before.
    """

    def __init__(self) -> None:
        self._surprise = np.zeros((V, V, V))
        self._covariance = np.zeros((V, V, V, V))
        # By the two tokens before and the law's identity: how often each token followed.
        self._counts: dict[tuple[int, int, int], tuple[F64, list[int]]] = {}

    def add(self, tokens: list[int], law: Law) -> None:
        seen = frozenset(tokens[1:2])
        for at in range(2, len(tokens)):
            p = law(tokens[:at], seen)
            token = tokens[at]
            if token not in seen:
                seen |= {token}
            key = tokens[at - 2], tokens[at - 1], id(p)
            if key not in self._counts:
                self._counts[key] = p, [0] * V  # keeps p, so that its identity stays its own
            self._counts[key][1][token] += 1

    def _sum_up(self) -> None:
        for (*before, _), (p, followed) in self._counts.items():
            counts, at = np.array(followed, dtype=np.float64), tuple(before)
            assert not counts[p == 0].any()
            self._surprise[at] += counts - counts.sum() * p
            self._covariance[at] += counts.sum() * (np.diag(p) - np.outer(p, p))
        self._counts.clear()

    def p_value(self) -> float:
        self._sum_up()
        statistic, freedom = 0.0, 0
        for before in np.ndindex(V, V):
            covariance, surprise = self._covariance[before], self._surprise[before]
            statistic += surprise @ np.linalg.pinv(covariance, hermitian=True) @ surprise
            freedom += int(np.linalg.matrix_rank(covariance, hermitian=True))
        return float(stats.chi2.sf(statistic, freedom))


def decode(request: Request, guess: Guesser, num_tokens: int, target: Tensor = TARGET) -> list[int]:
    history, noise = [0], Noise()
    while len(history) < num_tokens:
        draft = guess(request, history)
        # A padding id is fed to the target as some token: what it says there never matters.
        fed = [token if token < V else 0 for token in draft.token_ids]
        logits = target[[history[-1], *fed]]
        history += verify(request, history, draft, logits, vocab_size=V, noise=noise).token_ids
    return history[:num_tokens]


def p_value_of(rule: VerifyRule, guess: Guesser, num_draws: int, world: World = VARIED) -> float:
    """All sampling parameters in turn, each with its own law, in one test of num_draws tokens."""
    check = Check()
    for at, params in enumerate(world.params):
        law = Law(a_sampling_request((0,), **params), world.target)
        for idx in range(num_draws // (SEQUENCE_LEN - 2) // len(world.params)):
            request = a_sampling_request((0,), seed=idx + (at << 32), verify=rule, **params)
            check.add(decode(request, guess, SEQUENCE_LEN, world.target), law)
    p = check.p_value()
    print(f"{num_draws} tokens under {rule}: p = {p:.3g}")
    return p


# --- guessers ------------------------------------------------------------------------------------

Draw = Callable[[Request, list[int], int, int, F64], list[int]]  # F64: [W] log-probabilities


def drawn(shape: tuple[int, ...], draw: Draw, world: World = VARIED) -> Guesser:
    """A draft of this shape; draw(request, history, place, num, log_q) draws num siblings.

    place: of the row that they follow, 0 for the last known token and i + 1 for guess i
    """
    probs = torch.from_numpy(world.draft.astype(np.float32))
    families = [(p, [i for i, other in enumerate(shape) if other == p]) for p in sorted(set(shape))]

    def guess(request: Request, history: list[int]) -> Draft:
        tokens, contexts = [-1] * len(shape), [0] * len(shape)
        for parent, siblings in families:
            context = history[-1] if parent < 0 else tokens[parent]
            context = context if context < V else 0  # behind padding nothing matters
            chosen = draw(request, history, parent + 1, len(siblings), world.log_draft[context])
            for idx, token in zip(siblings, chosen, strict=True):
                tokens[idx], contexts[idx] = token, context
        return Draft(token_ids=tuple(tokens), parents=shape, probs=probs[contexts])

    return guess


SCRATCH = Noise()  # every read sets key and counter, so guessers may share one


def top(log_q: F64, request: Request, position: int, purpose: Purpose, num: int) -> list[int]:
    """Gumbel-top-k: an ordered draw without replacement."""
    scores = log_q + gumbel_of(SCRATCH.uniform(request.seed, position, purpose, W))
    tokens: list[int] = (-scores).argsort(kind="stable")[:num].tolist()
    return tokens


def honestly(request: Request, history: list[int], place: int, num: int, log_q: F64) -> list[int]:
    """As drafters must: DRAFT noise of this step and place."""
    return top(log_q, request, at_node(len(history), place), Purpose.DRAFT, num)


def from_elsewhere() -> Draw:
    """The same draws by another generator: many times faster, and independent of all our noise."""
    rng, ready = np.random.default_rng(1), dict[tuple[bytes, int], Iterator[list[int]]]()

    def stream(log_q: F64, num: int) -> Iterator[list[int]]:
        while True:
            scores = log_q + rng.gumbel(size=(4096, W))
            yield from np.argsort(-scores, axis=1, kind="stable")[:, :num].tolist()

    def draw(request: Request, history: list[int], place: int, num: int, log_q: F64) -> list[int]:
        return next(ready.setdefault((log_q.tobytes(), num), stream(log_q, num)))

    return draw


def given(shape: tuple[int, ...]) -> Guesser:
    def guess(request: Request, history: list[int]) -> Draft:
        tokens = tuple((history[-1] + 2 * idx) % V for idx in range(len(shape)))
        return Draft(token_ids=tokens, parents=shape)

    return guess


def in_turn(*guessers: Guesser) -> Guesser:
    """Which one guesses depends on the position alone."""
    return lambda request, history: guessers[len(history) % len(guessers)](request, history)


def mixed(shape: tuple[int, ...], draw: Draw) -> Guesser:
    return in_turn(drawn(shape, draw), given(shape), drawn(shape, draw))


SHAPES = {"chains": CHAIN, "trees": TREE}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
every_rule = pytest.mark.parametrize("rule", ["block", "rejection"])


@every_rule
@every_shape
def test_2_to_the_16_emitted_tokens_follow_the_target(
    rule: VerifyRule, shape: tuple[int, ...]
) -> None:
    assert p_value_of(rule, mixed(shape, from_elsewhere()), 2**16) > 0.001


@every_rule
@every_shape
@pytest.mark.parametrize(
    "num_draws", [2**13, pytest.param(2**20, marks=HOURS)], ids=["2^13", "2^20"]
)
def test_guesses_of_the_draft_stream_are_independent_of_what_verifies_them(
    rule: VerifyRule, shape: tuple[int, ...], num_draws: int
) -> None:
    assert p_value_of(rule, mixed(shape, honestly), num_draws) > 0.001


def test_the_draft_models_own_proposals_follow_the_target() -> None:
    """Through draft_choice, sharpened, with the request's own sampling parameters."""

    def guess(request: Request, history: list[int]) -> Draft:
        tokens: list[int] = []
        probs = []
        for _ in CHAIN:
            row = LogitsRow(request, history, tuple(tokens))
            logits = NOISY[[*history, *tokens][-1]][None]
            (proposal,) = draft_choice(logits, [row], [Purpose.DRAFT], vocab_size=V, sharpness=1.5)
            assert proposal is not None
            assert proposal.probs is not None
            tokens.append(proposal.token_id)
            probs.append(proposal.probs)
        return Draft(token_ids=tuple(tokens), parents=CHAIN, probs=torch.stack(probs))

    for rule in ("block", "rejection"):
        assert p_value_of(rule, guess, 2**12) > 0.001


# --- mistakes that the check must catch ----------------------------------------------------------


def by_accept_noise(
    request: Request, history: list[int], place: int, num: int, log_q: F64
) -> list[int]:
    """The uniform of the coin chooses the guess."""
    u = SCRATCH.accept_uniform(request.seed, at_node(len(history), place))
    return [int(np.searchsorted(np.cumsum(np.exp(log_q)), u))]


def by_residual_noise(
    request: Request, history: list[int], place: int, num: int, log_q: F64
) -> list[int]:
    return top(log_q, request, len(history) + place, Purpose.RESIDUAL, num)


def by_noise_of_the_position(
    request: Request, history: list[int], place: int, num: int, log_q: F64
) -> list[int]:
    """A later step draws its guess for a position with noise that block has looked at."""
    return top(log_q, request, len(history) + place, Purpose.DRAFT, num)


def without_unlikely(request: Request, history: list[int]) -> Draft:
    """Pruned by the drawn token's own probability."""
    draft = drawn(CHAIN, honestly)(request, history)
    assert draft.probs is not None
    likely = [float(draft.probs[idx, token]) > 0.25 for idx, token in enumerate(draft.token_ids)]
    return leading_while(likely, draft)


def without_padding(request: Request, history: list[int]) -> Draft:
    draft = drawn(CHAIN, honestly)(request, history)
    return leading_while([token < V for token in draft.token_ids], draft)


def leading_while(kept: Seq[bool], draft: Draft) -> Draft:
    count = [*kept, False].index(False)
    assert draft.probs is not None
    return Draft(
        token_ids=draft.token_ids[:count], parents=draft.parents[:count], probs=draft.probs[:count]
    )


EVEN = always([0.5, 0.5], [0.8, 0.2])
LEAN = always([0.4, 0.3, 0.3], [0.1, 0.45, 0.45])
TWO_LEFT = always([0.2, 0.5, 0.3], [0.6, 0.3, 0.1])


@pytest.mark.parametrize(
    ("rule", "guess", "world", "num_draws"),
    [
        ("rejection", drawn(CHAIN, by_accept_noise), VARIED, 2**12),
        ("block", drawn(CHAIN, by_accept_noise), VARIED, 2**12),
        ("rejection", drawn(CHAIN, by_residual_noise, TWO_LEFT), TWO_LEFT, 2**14),
        ("block", drawn(CHAIN, by_residual_noise, EVEN), EVEN, 2**13),
        ("block", drawn(CHAIN, by_noise_of_the_position, EVEN), EVEN, 2**13),
        ("rejection", without_unlikely, VARIED, 2**12),
        ("block", without_unlikely, VARIED, 2**12),
        ("rejection", without_padding, VARIED, 2**14),
        ("block", without_padding, VARIED, 2**14),
    ],
    ids=[
        "accept noise, rejection",
        "accept noise, block",
        "residual noise, rejection",
        "residual noise, block",
        "noise met twice, block",
        "pruned by its value, rejection",
        "pruned by its value, block",
        "padding dropped, rejection",
        "padding dropped, block",
    ],
)
def test_a_guesser_that_breaks_the_promise_is_caught(
    rule: VerifyRule, guess: Guesser, world: World, num_draws: int
) -> None:
    assert p_value_of(rule, guess, num_draws, world) < 1e-6


@every_rule
def test_coins_that_siblings_share_are_caught(
    rule: VerifyRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    guess = drawn(TREE, honestly, EVEN)
    assert p_value_of(rule, guess, 2**13, EVEN) > 0.001
    monkeypatch.setattr("specserve.verifier.at_node", lambda base, place: base)
    assert p_value_of(rule, guess, 2**13, EVEN) < 1e-6


def test_coins_that_block_meets_again_in_the_next_step_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guess = drawn(CHAIN, honestly, LEAN)
    assert p_value_of("block", guess, 2**13, LEAN) > 0.001
    monkeypatch.setattr("specserve.verifier.at_node", lambda base, place: base + place)
    assert p_value_of("block", guess, 2**13, LEAN) < 1e-6


def test_the_check_sees_a_lossy_rule() -> None:
    assert p_value_of("typical", mixed(CHAIN, honestly), 2**12) < 1e-6


# --- replay --------------------------------------------------------------------------------------


DEPTHS = (0, *node_depths(Draft(token_ids=(0,) * len(TREE), parents=TREE)))


def by_the_targets_noise(
    request: Request, history: list[int], place: int, num: int, log_q: F64
) -> list[int]:
    return top(log_q, request, len(history) + DEPTHS[place], Purpose.TARGET, num)


COUPLED = drawn(TREE, by_the_targets_noise)


def coupled_tree(request: Request, history: list[int]) -> Draft:
    """Children are the best of log q + the very noise that the target will choose with."""
    if request.verify != "replay":
        raise AssertionError("coupled guesses are for replay")

    return COUPLED(request, history)


@pytest.mark.parametrize(
    "num_draws", [2**16, pytest.param(2**20, marks=HOURS)], ids=["2^16", "2^20"]
)
def test_coupled_trees_under_replay_follow_the_target(num_draws: int) -> None:
    assert p_value_of("replay", coupled_tree, num_draws) > 0.001


@pytest.mark.parametrize("params", VARIED.params, ids=str)
@pytest.mark.parametrize(
    "guess",
    [coupled_tree, mixed(CHAIN, honestly), mixed(TREE, honestly)],
    ids=["coupled", "chains", "trees"],
)
def test_replay_emits_the_same_tokens_with_and_without_guesses(
    params: dict[str, Any], guess: Guesser
) -> None:
    for seed in range(24):
        request = a_sampling_request((0,), seed=seed, **params)
        plain = decode(request, given(()), SEQUENCE_LEN)
        assert decode(request, guess, SEQUENCE_LEN) == plain


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
    law = TARGET.double().div(0.8).softmax(-1).numpy()
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
        NOISY[:1].expand(num_draws, V), rows, [Purpose.TARGET] * num_draws, vocab_size=V
    )
    num_accepted = sum(
        proposal is not None and proposal.token_id == choice
        for proposal, choice in zip(proposals, choices, strict=True)
    )
    p = TARGET[0].double().softmax(0).numpy()
    q = NOISY[0].double().softmax(0).numpy()
    ratios = np.maximum(p[None] / p[:, None], q[None] / q[:, None])  # [x, y]
    expected = float((1 / ratios.sum(axis=1)).sum())
    assert stats.binomtest(num_accepted, num_draws, expected).pvalue > 0.001

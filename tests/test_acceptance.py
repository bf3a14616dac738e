"""The rules by exact enumeration: every draft, every fall of every coin, the law of what comes out.

Target and draft are tables of random laws over three tokens, one per context, in float64. A step's
output is completed with the target's own law to a fixed length, and the law of all such texts must
be the target's to 1e-12 in total variation. Nothing here is sampled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import permutations, product

import numpy as np
import pytest

from specserve.acceptance import (
    ROOT,
    Coin,
    Guesses,
    Outcome,
    accept_typical,
    accept_up,
    accept_weight,
    after_rejection,
    reject_down,
    typical_threshold,
    without,
)
from specserve.noise import F64

V = 3
Path = tuple[int, ...]
Law = Callable[[Path], F64]
Rule = Callable[[Guesses, Coin], Outcome]

RULES: dict[str, Rule] = {"block": accept_up, "rejection": reject_down}
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def random_law(seed: int, *, concentration: float = 1.0) -> Law:
    """A law for each context, the same whenever it is asked for."""

    def law(context: Path) -> F64:
        rng = np.random.default_rng([seed, len(context), *context])
        return rng.dirichlet([concentration] * V)

    return law


def laws_by_context(**laws: list[float]) -> Law:
    """Keys are contexts as digits, `root` the empty one."""
    return lambda context: np.array(laws["_" + "".join(map(str, context)) if context else "root"])


def with_zeros(law: Law, impossible: int) -> Law:
    """A reduced vocabulary: never that token."""

    def reduced(context: Path) -> F64:
        q = law(context).copy()
        q[impossible] = 0
        return q / q.sum()

    return reduced


# Shapes, as parents. A node's children are drawn in order, without replacement.
CHAIN = (-1, 0, 1)
BUSH = (-1, -1, 0, 0, 1)
LATE_BRANCH = (-1, 0, 1, 1, 0)
INTERLEAVED = (-1, -1, 0, 1, 0, -1)  # siblings need not be neighbours
SHAPES = {"chain": CHAIN, "bush": BUSH, "late branch": LATE_BRANCH, "interleaved": INTERLEAVED}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def path_to(place: int, parents: Path, token_ids: Path) -> Path:
    return () if place < 0 else (*path_to(parents[place], parents, token_ids), token_ids[place])


def siblings_drawn(q: F64, num: int) -> Iterator[tuple[Path, float]]:
    """Every ordered draw of num tokens without replacement; uniform once q is used up."""
    for tokens in permutations(range(V), num):
        probability, left = 1.0, q.copy()
        for at, token in enumerate(tokens):
            if left.sum() > 0:
                probability *= left[token] / left.sum()
            else:
                probability /= V - at
            left[token] = 0
        if probability > 0:
            yield tokens, probability


def every_draft(parents: Path, draft: Law) -> Iterator[tuple[Path, float]]:
    """(token ids, probability) of every draft of this shape."""

    def grow(place: int, token_ids: Path, probability: float) -> Iterator[tuple[Path, float]]:
        if place == len(parents):
            yield token_ids, probability
            return
        siblings = [idx for idx, parent in enumerate(parents) if parent == parents[place]]
        if place != siblings[0]:  # was drawn with its first sibling
            yield from grow(place + 1, token_ids, probability)
            return
        context = path_to(parents[place], parents, token_ids)
        for tokens, p in siblings_drawn(draft(context), len(siblings)):
            chosen = list(token_ids)
            for idx, token in zip(siblings, tokens, strict=True):
                chosen[idx] = token
            yield from grow(place + 1, tuple(chosen), probability * p)

    yield from grow(0, (-1,) * len(parents), 1.0)


def every_outcome(rule: Rule, guesses: Guesses) -> Iterator[tuple[Outcome, float]]:
    """Run the rule once for every way in which its coins can fall."""
    pending: list[tuple[bool, ...]] = [()]
    while pending:
        script, probability, thrown = pending.pop(), 1.0, list[bool]()

        def coin(place: int, heads: float) -> bool:
            nonlocal probability
            assert -1e-15 <= heads <= 1
            fell = script[len(thrown)] if len(thrown) < len(script) else heads > 0  # noqa: B023
            if len(thrown) >= len(script) and 0 < heads < 1:  # noqa: B023
                pending.append((*thrown, False))  # noqa: B023
            probability *= heads if fell else 1 - heads
            thrown.append(fell)  # noqa: B023
            return fell

        yield rule(guesses, coin), probability


def the_guesses(parents: Path, token_ids: Path, target: Law, draft: Law | None) -> Guesses:
    """draft None: the guesses were given."""

    def context_of(place: int) -> Path:
        return path_to(place, parents, token_ids)

    return Guesses(
        token_ids,
        parents,
        lambda place: target(context_of(place)),
        lambda place: None if draft is None else draft(context_of(parents[place])),
    )


def text_law(outcomes: Iterator[tuple[Path, F64 | None, float]], target: Law, length: int) -> F64:
    """[V] * length: the law of the text that begins with accepted guesses and a token of `rest`."""
    joint = np.zeros((V,) * length)
    for accepted, rest, weight in outcomes:
        _complete(joint, accepted, target(accepted) if rest is None else rest, target, weight)
    return joint


def _complete(joint: F64, text: Path, law: F64, target: Law, weight: float) -> None:
    for token in range(V):
        probability = weight * float(law[token])
        if probability == 0:
            continue
        longer = (*text, token)
        if len(longer) == joint.ndim:
            joint[longer] += probability
        else:
            _complete(joint, longer, target(longer), target, probability)


def emitted(
    rule: Rule, parents: Path, target: Law, draft: Law, *, given: bool = False
) -> Iterator[tuple[Path, F64 | None, float]]:
    """(accepted tokens, rest, probability). given: tell the rule nothing of how they were drawn."""
    for token_ids, drawn in every_draft(parents, draft):
        guesses = the_guesses(parents, token_ids, target, None if given else draft)
        for (path, rest), fell in every_outcome(rule, guesses):
            yield tuple(token_ids[place] for place in path), rest, drawn * fell


def total_variation(a: F64, b: F64) -> float:
    return 0.5 * float(np.abs(a - b).sum())


def target_text(target: Law, length: int) -> F64:
    return text_law(iter([((), None, 1.0)]), target, length)


def depth_of(parents: Path) -> int:
    return max(len(path_to(place, parents, parents)) for place in range(len(parents)))


def check_exact(rule: Rule, shape: Path, target: Law, draft: Law, *, given: bool = False) -> None:
    length = depth_of(shape) + 1
    law = text_law(emitted(rule, shape, target, draft, given=given), target, length)
    assert total_variation(law, target_text(target, length)) < 1e-12


# --- the law -------------------------------------------------------------------------------------


@every_rule
@every_shape
@pytest.mark.parametrize("seed", range(4))
def test_the_output_has_exactly_the_targets_law(rule: Rule, shape: Path, seed: int) -> None:
    check_exact(rule, shape, random_law(seed), random_law(100 + seed))


@every_rule
@every_shape
def test_also_where_draft_and_target_hardly_meet(rule: Rule, shape: Path) -> None:
    target, draft = random_law(1, concentration=0.1), random_law(2, concentration=0.1)
    check_exact(rule, shape, target, draft)


@every_rule
@every_shape
def test_also_where_the_draft_cannot_say_a_token(rule: Rule, shape: Path) -> None:
    """Three siblings of a draft that knows two tokens: the third is a filler, not drawn from q."""
    check_exact(rule, shape, random_law(3), with_zeros(random_law(4), impossible=1))


@every_rule
@every_shape
def test_also_where_the_target_cannot_say_a_token(rule: Rule, shape: Path) -> None:
    check_exact(rule, shape, with_zeros(random_law(5), impossible=2), random_law(6))


@every_rule
@every_shape
@pytest.mark.parametrize("seed", range(2))
def test_also_for_given_guesses_whatever_chose_them(rule: Rule, shape: Path, seed: int) -> None:
    check_exact(rule, shape, random_law(seed), random_law(200 + seed), given=True)


@every_rule
@every_shape
def test_a_draft_equal_to_the_target_is_accepted_as_far_as_it_goes(rule: Rule, shape: Path) -> None:
    law = random_law(7)
    lengths = Counter[int]()
    for accepted, _, probability in emitted(rule, shape, law, law):
        lengths[len(accepted)] += probability
    assert sum(lengths.values()) == pytest.approx(1, abs=1e-12)
    if shape == CHAIN:
        assert lengths[3] == pytest.approx(1, abs=1e-12)
    check_exact(rule, shape, law, law)


@every_rule
def test_a_drawn_padding_id_is_a_rejected_draw_and_the_law_holds(rule: Rule) -> None:
    """The draft's law has a fourth token that the target does not know."""
    target, wide = random_law(8), np.array([0.2, 0.1, 0.3, 0.4])

    def outcomes() -> Iterator[tuple[Path, F64 | None, float]]:
        for token_ids in product(range(V + 1), repeat=2):
            guesses = Guesses(
                token_ids,
                (-1, 0),
                lambda place, ids=token_ids: target(path_to(place, (-1, 0), ids)),
                lambda place: wide,
            )
            for (path, rest), fell in every_outcome(rule, guesses):
                tokens = tuple(token_ids[place] for place in path)
                yield tokens, rest, fell * float(wide[list(token_ids)].prod())

    law = text_law(outcomes(), target, 3)
    assert total_variation(law, target_text(target, 3)) < 1e-12


@every_rule
def test_a_guess_left_out_for_its_own_value_would_be_seen(rule: Rule) -> None:
    """A control: the padding id above, dropped before the verifier sees it, bends the law."""
    target, draft = random_law(8), random_law(9)

    def outcomes() -> Iterator[tuple[Path, F64 | None, float]]:
        for token in range(V):
            probability = float(draft(())[token])
            if token == 0:  # pruned
                yield (), None, probability
                continue
            guesses = the_guesses((-1,), (token,), target, draft)
            for (path, rest), fell in every_outcome(rule, guesses):
                yield (token,) if path else (), rest, fell * probability

    law = text_law(outcomes(), target, 2)
    assert total_variation(law, target_text(target, 2)) > 0.01


def test_siblings_verified_as_if_drawn_with_replacement_would_be_seen() -> None:
    """A control: fresh rows of q for siblings that were drawn without replacement."""
    target = laws_by_context(root=[0.2, 0.4, 0.4], _0=[1, 0, 0], _1=[1, 0, 0], _2=[1, 0, 0])
    draft = laws_by_context(root=[0.6, 0.3, 0.1])
    shape = (-1, -1)

    def outcomes() -> Iterator[tuple[Path, F64 | None, float]]:
        for token_ids, drawn in every_draft(shape, draft):
            told = the_guesses(shape, token_ids, target, draft)

            def naive(guesses: Guesses, coin: Coin) -> Outcome:
                p, weight = guesses.target_at(ROOT), 1.0
                assert p is not None
                for child in (0, 1):
                    token, q = guesses.token_ids[child], guesses.drawn_at(child)
                    if coin(child, accept_weight(weight, p, token, q)):
                        return Outcome((child,), None)
                    weight, p = after_rejection(weight, p, token, q)
                return Outcome((), p)

            for (path, rest), fell in every_outcome(naive, told):
                yield tuple(token_ids[place] for place in path), rest, drawn * fell

    law = text_law(outcomes(), target, 2)
    assert total_variation(law, target_text(target, 2)) > 0.01


# --- how much is accepted ------------------------------------------------------------------------


def expected_accepted(rule: Rule, shape: Path, target: Law, draft: Law) -> float:
    return sum(
        len(accepted) * probability
        for accepted, _, probability in emitted(rule, shape, target, draft)
    )


def test_the_papers_toy_accepts_10_ninths_by_rejection_and_11_ninths_by_block() -> None:
    """Sun et al. 2024, section 1: two tokens, p = (1/3, 2/3), q = (2/3, 1/3), two guesses."""

    def target(context: Path) -> F64:
        return np.array([1 / 3, 2 / 3, 0])

    def draft(context: Path) -> F64:
        return np.array([2 / 3, 1 / 3, 0])

    assert expected_accepted(reject_down, (-1, 0), target, draft) == pytest.approx(10 / 9)
    assert expected_accepted(accept_up, (-1, 0), target, draft) == pytest.approx(11 / 9)


@every_shape
@pytest.mark.parametrize("seed", range(6))
def test_block_never_accepts_less_than_rejection(shape: Path, seed: int) -> None:
    target, draft = random_law(20 + seed), random_law(40 + seed)
    block, rejection = (
        expected_accepted(rule, shape, target, draft) for rule in (accept_up, reject_down)
    )
    assert block >= rejection - 1e-12


def test_rejection_of_a_chain_accepts_what_the_overlap_of_the_laws_allows() -> None:
    """One guess: sum of min(p, q)."""
    target, draft = random_law(60), random_law(61)
    overlap = float(np.minimum(target(()), draft(())).sum())
    for rule in RULES.values():
        assert expected_accepted(rule, (-1,), target, draft) == pytest.approx(overlap)


# --- the arithmetic ------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [1.0, 0.4, 1e-3, 0.0])
def test_the_closed_form_of_a_given_guess_is_the_general_one_for_a_one_hot_law(
    weight: float,
) -> None:
    p = random_law(70)(())
    for token_id in range(V):
        one_hot = np.eye(V)[token_id]
        assert accept_weight(weight, p, token_id, None) == pytest.approx(
            accept_weight(weight, p, token_id, one_hot)
        )
        closed, general = (after_rejection(weight, p, token_id, q) for q in (None, one_hot))
        assert closed[0] == pytest.approx(general[0])
        np.testing.assert_allclose(closed[1], general[1], atol=1e-15)


@pytest.mark.parametrize("excess", [0.0, 1e-10])
def test_where_nothing_but_rounding_is_left_the_law_is_p(excess: float) -> None:
    p = np.array([0.5, 0.25, 0.125, 0.125])
    q = p * (1 + np.array([excess, excess, 0.0, -3 * excess]))
    weight, law = after_rejection(1.0, p, 0, q)
    assert weight == 1.0
    np.testing.assert_array_equal(law, p)


def test_a_token_that_is_overrated_is_never_recovered() -> None:
    p, q = np.array([0.25, 0.25, 0.25, 0.25]), np.array([0.5, 0.5, 0.0, 0.0])
    assert after_rejection(1.0, p, 0, q)[1].tolist() == [0.0, 0.0, 0.5, 0.5]


def test_the_law_of_a_sibling_leaves_out_those_before_it() -> None:
    q = np.array([0.5, 0.3, 0.2])
    law = without(q, [0], 1)
    assert law is not None
    np.testing.assert_allclose(law, [0.0, 0.6, 0.4])
    renormalised = without(law, [0], 1)  # a drafter may have done it already
    assert renormalised is not None
    np.testing.assert_allclose(renormalised, law)


@pytest.mark.parametrize(
    ("q", "tried", "token_id"),
    [
        pytest.param([0.0, 1.0, 0.0], [], 0, id="its own guess called impossible"),
        pytest.param([1.0, 0.0, 0.0], [0], 2, id="nothing possible is left"),
        pytest.param([math.nan] * 3, [], 1, id="NaN"),
        pytest.param([math.inf, 0.5, 0.5], [], 1, id="infinite"),
        pytest.param([-1.0, 2.0, 0.0], [], 0, id="negative"),
        pytest.param([0.5, 0.5, 0.0], [1], 1, id="a twin"),
        pytest.param([0.5, 0.5, 0.0], [], 3, id="beyond its vocabulary"),
        pytest.param([0.5, 0.5, 0.0], [], -1, id="no id at all"),
    ],
)
def test_a_law_that_cannot_be_true_makes_the_guess_a_given_one(
    q: list[float], tried: list[int], token_id: int
) -> None:
    assert without(np.array(q), tried, token_id) is None


# --- typical acceptance --------------------------------------------------------------------------


def no_coin(place: int, probability: float) -> bool:
    raise AssertionError("typical acceptance throws no coin")


def test_the_typical_threshold_falls_with_entropy() -> None:
    """Medusa's run scripts: min(0.09, 0.3 exp(-H))."""
    assert typical_threshold(np.array([1.0, 0.0])) == 0.09
    assert typical_threshold(np.full(4, 0.25)) == pytest.approx(0.3 / 4)
    assert typical_threshold(np.full(100, 0.01)) == pytest.approx(0.003)


def test_typical_takes_the_longest_path_and_of_equals_the_likelier() -> None:
    target = laws_by_context(
        root=[0.6, 0.3, 0.1],
        _0=[0.05, 0.05, 0.9],
        _1=[0.5, 0.5, 0.0],
        _10=[1.0, 0.0, 0.0],
    )
    longest = the_guesses((-1, -1, 0, 1), (0, 1, 0, 0), target, None)
    assert accept_typical(longest, no_coin) == Outcome((1, 3), None)
    likelier = the_guesses((-1, -1), (1, 0), target, None)
    assert accept_typical(likelier, no_coin) == Outcome((1,), None)
    unlikely = the_guesses((-1, 0), (0, 1), target, None)
    assert accept_typical(unlikely, no_coin) == Outcome((0,), None)


def test_typical_is_lossy_and_the_enumeration_sees_it() -> None:
    """A control of the whole method: the law it emits is far from the target's."""
    target, draft = random_law(5), random_law(6)
    law = text_law(emitted(accept_typical, CHAIN, target, draft), target, 4)
    assert total_variation(law, target_text(target, 4)) > 0.05

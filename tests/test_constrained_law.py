"""A grammar bends no law either: emitted tokens against the masked target, by the same chi-square.

What may follow depends on the last token, and guesses are drawn by a draft that knows nothing of
it. The control leaves drawn guesses out for being forbidden, which the check must catch.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import pairwise

import msgspec
import pytest

from specserve.drafting import Draft, pruned
from specserve.speculation.fitting import within_constraint
from specserve.types import Request, VerifyRule
from tests.logit_rows import a_sampling_request
from tests.test_verifier_law import (
    CHAIN,
    SEQUENCE_LEN,
    TREE,
    VARIED,
    Check,
    Guesser,
    Law,
    V,
    decode,
    drawn,
    from_elsewhere,
    given,
    in_turn,
)


class NoNeighbours:
    """After t neither t + 1 nor t + 3 may follow (mod V)."""

    def may(self, before: int, token_id: int) -> bool:
        return 0 <= token_id < V and (token_id - before) % V not in (1, 3)

    def mask(self, known: Seq[int], num_prompt: int, prefix: Seq[int]) -> bytes:
        before = [*known, *prefix][-1]
        return sum(self.may(before, idx) << idx for idx in range(V)).to_bytes(4, "little")

    def admits(self, known: Seq[int], num_prompt: int, prefix: Seq[int]) -> bool:
        path = [known[-1], *prefix]
        return all(self.may(*pair) for pair in pairwise(path))

    def forced(self, known: Seq[int], num_prompt: int, most: int) -> tuple[int, ...]:
        return ()


Fit = Callable[[Draft, Request, Seq[int]], Draft]


def p_value_of(rule: VerifyRule, guess: Guesser, fit: Fit, num_draws: int) -> float:
    def request_of(seed: int) -> Request:
        request = a_sampling_request((0,), seed=seed, verify=rule)
        return msgspec.structs.replace(request, constraint=NoNeighbours())

    def fitting(request: Request, history: list[int]) -> Draft:
        return fit(guess(request, history), request, history)

    check, law = Check(), Law(request_of(0), VARIED.target)
    for seed in range(num_draws // (SEQUENCE_LEN - 2)):
        check.add(decode(request_of(seed), fitting, SEQUENCE_LEN), law)
    return check.p_value()


def mixed(shape: tuple[int, ...]) -> Guesser:
    return in_turn(drawn(shape, from_elsewhere()), given(shape))


@pytest.mark.parametrize("rule", ["block", "rejection", "replay"])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chains", "trees"])
def test_emitted_tokens_follow_the_masked_target(rule: VerifyRule, shape: tuple[int, ...]) -> None:
    assert p_value_of(rule, mixed(shape), within_constraint, 2**14) > 0.001


@pytest.mark.parametrize("rule", ["block", "rejection"])
def test_drawn_guesses_left_out_for_being_forbidden_would_be_caught(rule: VerifyRule) -> None:
    def without_forbidden(draft: Draft, request: Request, history: Seq[int]) -> Draft:
        kept = within_constraint(msgspec.structs.replace(draft, probs=None), request, history)
        return pruned(draft, range(len(kept.token_ids)))  # of a chain

    guess = drawn(CHAIN, from_elsewhere())
    assert p_value_of(rule, guess, without_forbidden, 2**14) < 1e-6

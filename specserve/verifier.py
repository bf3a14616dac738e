"""Which guesses the target confirms, and the one token after them.

`replay` (default): the emitted token at a position is the target's own choice there, a function of
(seed, position, processed logits) only; a guess is accepted iff it is that choice. The other rules
accept by a test (acceptance.py): `rejection` and `block` emit the same law in another text,
`typical` another law. All take chains and trees, and without guesses all are the same draw.

A test's coins belong to (step, guess), not to positions: `block` throws coins for guesses behind
the accepted ones, and a coin that has been seen must not decide again in the next step.
No guess is left out for what it is: dropping a drawn guess by its own value bends the law.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache, partial
from typing import Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from specserve.acceptance import (
    ROOT,
    Coin,
    Guesses,
    Outcome,
    accept_typical,
    accept_up,
    reject_down,
)
from specserve.drafting import Draft
from specserve.noise import F64, Floats, Noise, Purpose, at_node, race
from specserve.sampler import LogitsRow, RowError, as_rows, choose_row, process_row
from specserve.types import Request, VerifyRule


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """path: indices into the draft's nodes, each the parent of the next; all accepted.

    token_ids: the accepted guesses in order, then one recovered or bonus token
    """

    token_ids: tuple[int, ...]
    path: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """One sequence's guesses before the target.

    rows:   K+1 places that choose, the root's first
    logits: [K+1, V] without padding ids
    noise:  scratch space
    """

    request: Request
    draft: Draft
    rows: Seq[LogitsRow]
    logits: Floats
    noise: Noise

    @property
    def position(self) -> int:
        """Of the first guess."""
        return self.rows[0].position

    def choice(self, row_idx: int) -> int:
        """The target's own choice, by common noise. Raises RowError."""
        return choose_row(self.logits[row_idx], self.rows[row_idx], noise=self.noise)

    def law(self, row_idx: int) -> F64:
        """[V] probabilities of the target. Raises RowError."""
        weights = process_row(self.logits[row_idx], self.rows[row_idx])
        p: F64 = np.exp(weights.astype(np.float64))
        p /= p.sum()
        return p


def node_rows(request: Request, history: Seq[int], draft: Draft) -> list[LogitsRow]:
    """Where each row of [last known token, guesses...] chooses: K+1 rows, root first."""
    rows = [LogitsRow(request, history)]
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        prefix = rows[parent + 1].draft_prefix  # row 0 is the root, row i+1 is node i
        rows.append(LogitsRow(request, history, (*prefix, token_id)))
    return rows


def verify(
    request: Request,
    history: Seq[int],
    draft: Draft,
    logits: Tensor,
    *,
    vocab_size: int,
    noise: Noise | None = None,
) -> Verdict:
    """Verify one sequence's guesses by its request's rule.

    logits: [K+1, V] of the target at the last known token and at each guess
    noise:  scratch space that the rows of a step may share
    raises: RowError if the root has nothing to choose
    """
    question = Question(
        request,
        draft,
        node_rows(request, history, draft),
        as_rows(logits, vocab_size),
        noise or Noise(),
    )
    return RULES[request.verify](question)


def verify_replay(choices: Seq[int | RowError], draft: Draft) -> Verdict:
    """Walk from the root while a child equals the target's choice; emit that choice either way.

    choices: K+1 target tokens, the root's first, then each node's. An error is raised only when
             the walk arrives at it: what a wrong guess leads to never matters
    """
    return _walk(lambda idx: _token(choices[idx]), draft)


def _replay(question: Question) -> Verdict:
    # Only rows that the walk arrives at are chosen for: after a wrong guess the rest costs nothing.
    return _walk(question.choice, question.draft)


def _walk(choice_at: Callable[[int], int], draft: Draft) -> Verdict:
    """choice_at: the target's token after the root (0) or after node i (i + 1)."""
    node, path = ROOT, []
    emitted = [choice_at(0)]
    # Parents come before children, so one pass meets every node after its parent.
    for idx, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        if parent != node or token_id != emitted[-1]:
            continue
        try:
            following = choice_at(idx + 1)
        except RowError:
            # Plain decoding would emit this token, too, and meet the error only in its next step,
            # if the token does not end the text: so end here, with the guess not taken as one.
            break
        node = idx
        path.append(idx)
        emitted.append(following)
    return Verdict(token_ids=tuple(emitted), path=tuple(path))


def _token(choice: int | RowError) -> int:
    if isinstance(choice, RowError):
        raise choice
    return choice


def _by_test(question: Question, *, test: Callable[[Guesses, Coin], Outcome]) -> Verdict:
    """Accept by a rule of acceptance.py, then draw the token after the accepted guesses."""
    draft, seed, noise = question.draft, question.request.seed, question.noise
    base = question.position

    @cache
    def target_at(place: int) -> F64 | None:
        try:
            return question.law(place + 1)
        except RowError:
            if place == ROOT:
                raise
            return None

    def coin(place: int, probability: float) -> bool:
        return noise.accept_uniform(seed, at_node(base, place)) < probability

    guesses = Guesses(draft.token_ids, draft.parents, target_at, _laws_drawn_from(draft))
    path, rest = test(guesses, coin)
    accepted = tuple(draft.token_ids[place] for place in path)
    if rest is None:
        try:
            last = question.choice(path[-1] + 1 if path else 0)
        except RowError:
            if not path:
                raise
            # As in _walk: the guess is emitted, the error belongs to the next step.
            return Verdict(token_ids=accepted, path=path[:-1])
    else:
        with np.errstate(divide="ignore"):
            weights: F64 = np.log(rest)
        last = race(
            weights,
            seed=seed,
            position=base + len(path),
            purpose=Purpose.RESIDUAL,
            noise=noise,
        )
    return Verdict(token_ids=(*accepted, last), path=path)


def _laws_drawn_from(draft: Draft) -> Callable[[int], F64 | None]:
    """place -> [W] float64 probs of that guess."""
    if draft.probs is None:
        return lambda place: None
    probs = draft.probs.detach().cpu()
    laws = (probs if probs.dtype == torch.float64 else probs.float()).numpy()
    return lambda place: laws[place].astype(np.float64)


RULES: Final[dict[VerifyRule, Callable[[Question], Verdict]]] = {
    "replay": _replay,
    "block": partial(_by_test, test=accept_up),
    "rejection": partial(_by_test, test=reject_down),
    "typical": partial(_by_test, test=accept_typical),
}

"""The rules that accept a guess by a test: pure functions of probabilities and of coins.

One arithmetic serves chains and trees. A place of the draft has a weight w in [0, 1] (how well the
path to it agrees with the target) and a law p of what the target would say next. Child x, drawn
from q, gets the weight min(1, w p(x) / q(x)); once x is out, what is left is norm(max(w p - q, 0)).
`reject_down` asks from the root down, with w = 1 at every accepted place: Leviathan's test on a
chain, recursive rejection (Sequoia) on a tree. `accept_up` asks leaves first: block verification
(Sun et al. 2024) on a chain, traversal verification (Weng et al. 2025) on a tree. It never accepts
less, but it has to look at all places.

float64 and no logarithms: a chain multiplies at most K factors that are clipped at 1, and what
underflows is a coin that never falls. Logarithms of V tokens would cost more than all the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final, NamedTuple

import numpy as np

from specserve.noise import F64

# p and q differ by rounding only when this little is left; a rejection then was rounding too.
_NEGLIGIBLE_MASS = 1e-8

# Medusa's run scripts. The defaults of its library function are the other way round.
TYPICAL_EPSILON: Final = 0.09
TYPICAL_ALPHA: Final = 0.3

ROOT: Final = -1  # the place after the last known token; places 0.. are the guesses


class Guesses(NamedTuple):
    """What the tests need to know of a draft with n guesses over a vocabulary of V.

    token_ids: [n]; an id outside 0..V-1 (a draft's padding) is no token and never accepted
    parents:   [n] place of each guess's parent; siblings in the order in which they were drawn
    target_at: place -> [V] the target's law there; None where it has none (a damaged row)
    drawn_at:  place -> [W] >= 0, the law that the guess was drawn from; None: it was given, not
               drawn. Siblings share their parent's law and are drawn from it without replacement
    """

    token_ids: Seq[int]
    parents: Seq[int]
    target_at: Callable[[int], F64 | None]
    drawn_at: Callable[[int], F64 | None]

    def children(self, place: int) -> list[int]:
        return [idx for idx, parent in enumerate(self.parents) if parent == place]


class Outcome(NamedTuple):
    """path: accepted guesses, each the parent of the next.

    rest: [V] the law of the one token after them; None: the target's own law there, untouched
    """

    path: tuple[int, ...]
    rest: F64 | None


Coin = Callable[[int, float], bool]  # (place, probability): independent for every place


def accept_weight(weight: float, p: F64, token_id: int, q: F64 | None) -> float:
    """min(1, weight p(x) / q(x)); q None: x was given, q(x) = 1."""
    if not 0 <= token_id < len(p):
        return 0.0
    likelihood = weight * float(p[token_id])
    if q is None:
        return min(1.0, likelihood)
    drawn = float(q[token_id])
    return 1.0 if likelihood >= drawn else likelihood / drawn


def after_rejection(weight: float, p: F64, token_id: int, q: F64 | None) -> tuple[float, F64]:
    """(the parent's weight, its law [V]) once a child x that was drawn from q is out.

    With S the mass of r = max(weight p - q, 0): the law is r / S, the weight S / (S + 1 - weight).
    Where nothing is left but rounding, p itself stays.
    """
    if weight == 0:
        return 0.0, p
    if q is None:  # max(w p - onehot, 0) in closed form: p without x
        held = float(p[token_id]) if 0 <= token_id < len(p) else 0.0
        left = p.copy()
        if held > 0:
            left[token_id] = 0.0
        left *= weight
    else:
        left = weight * p
        shared = min(len(p), len(q))
        left[:shared] -= q[:shared]
        np.maximum(left, 0.0, out=left)
    mass = float(left.sum())
    remaining = mass + (1.0 - weight)
    new_weight = mass / remaining if remaining > 0 else 1.0
    return new_weight, p if mass <= _NEGLIGIBLE_MASS * weight else left / mass


def without(drawn: F64 | None, tried: Seq[int], token_id: int) -> F64 | None:
    """[W] the law that a sibling was drawn from once those in `tried` were; None: it was given.

    A token that this law calls impossible was not drawn from it: that is a given one, which is
    exact however it was chosen. So are fillers, once all that q calls possible is used up.
    """
    if drawn is None or not 0 <= token_id < len(drawn):
        return None
    q = np.where(drawn > 0, drawn, 0.0)  # NaN counts as 0
    q[[other for other in tried if 0 <= other < len(q)]] = 0.0
    mass = float(q.sum())
    if not (q[token_id] > 0 and math.isfinite(mass)):
        return None
    law: F64 = q / mass
    return law


def reject_down(guesses: Guesses, coin: Coin) -> Outcome:
    """From the root: take the first child that passes, until none does."""
    place, path = ROOT, list[int]()
    while children := guesses.children(place):
        p = guesses.target_at(place)
        if p is None:
            break
        tried: list[int] = []
        for child in children:
            token_id = guesses.token_ids[child]
            q = without(guesses.drawn_at(child), tried, token_id)
            if coin(child, accept_weight(1.0, p, token_id, q)):
                break
            _, p = after_rejection(1.0, p, token_id, q)
            tried.append(token_id)
        else:
            return Outcome(tuple(path), p)
        place = child
        path.append(place)
    return Outcome(tuple(path), None)


def accept_up(guesses: Guesses, coin: Coin) -> Outcome:
    """From the leaves, first child first: the first place that passes brings its whole path."""

    def visit(place: int, weight: float) -> Outcome | None:
        """The outcome below and with `place`; None: all of it is out."""
        if weight == 0:
            return None
        children = guesses.children(place)
        p = guesses.target_at(place) if children else None
        if p is None:  # a leaf, or nothing can be chosen behind this guess
            return Outcome((), None) if place == ROOT or coin(place, weight) else None
        tried: list[int] = []
        for child in children:
            token_id = guesses.token_ids[child]
            q = without(guesses.drawn_at(child), tried, token_id)
            found = visit(child, accept_weight(weight, p, token_id, q))
            if found is not None:
                return Outcome((child, *found.path), found.rest)
            weight, p = after_rejection(weight, p, token_id, q)
            tried.append(token_id)
        return Outcome((), p) if place == ROOT or coin(place, weight) else None

    outcome = visit(ROOT, 1.0)
    assert outcome is not None, "the root needs no coin"
    return outcome


def accept_typical(guesses: Guesses, coin: Coin) -> Outcome:
    """Medusa's typical acceptance: LOSSY, the emitted law is not the target's.

    A guess passes if p(x) > min(epsilon, alpha exp(-H(p))), so in an uncertain place almost
    anything likely does. The longest path wins, among equals the likelier. No coin is thrown.
    """
    best: tuple[int, float] = (0, 0.0)
    chosen: tuple[int, ...] = ()
    reached: dict[int, tuple[tuple[int, ...], float]] = {ROOT: ((), 0.0)}
    for idx, (token_id, parent) in enumerate(zip(guesses.token_ids, guesses.parents, strict=True)):
        p = guesses.target_at(parent) if parent in reached else None
        if p is None or not 0 <= token_id < len(p):
            continue
        likelihood = float(p[token_id])
        if likelihood <= typical_threshold(p):
            continue
        above, log_likelihood = reached[parent]
        path, total = (*above, idx), log_likelihood + math.log(likelihood)
        reached[idx] = path, total
        if (len(path), total) > best:
            best, chosen = (len(path), total), path
    return Outcome(chosen, None)


def typical_threshold(p: F64) -> float:
    """min(epsilon, alpha exp(-H(p))) of [V] probabilities; entropy H in nats."""
    possible = p[p > 0]
    entropy = -float((possible * np.log(possible)).sum())
    return min(TYPICAL_EPSILON, TYPICAL_ALPHA * math.exp(-entropy))

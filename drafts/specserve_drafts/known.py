"""Drafters that know the right continuation: always right, never right, or right at given rates.

They measure everything around a drafter with acceptance as the input instead of the outcome.
Their truth is a recorded output, so they are composed in tests and studies, not on a server; but
to be wrong takes no truth: there, `anti` guesses at random and looks sure.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Final

from specserve.drafting import NO_DRAFT, Draft, DraftRow, chain
from specserve.errors import ConfigError
from specserve_drafts.resources import DrafterResources, Truth, need_truth, refuse_argument
from specserve_drafts.scripted import wants_guesses

_SURE: Final = 0.95


class KnowingDrafter:
    """Guess i of a step equals the truth with probability rates[i] (the last rate holds on).

    The rates are conditional on all guesses before it being right, as acceptance is. Whether a
    guess is right depends on (request seed, position) alone, so runs repeat exactly: coins come
    from a generator of their own, once per position, so that a guess costs next to nothing.
    """

    keeps_kv = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, name: str, truth: Truth, rates: Seq[float], vocab_size: int) -> None:
        self.name = name
        self._truth = truth
        self._rates = tuple(rates)
        self._vocab_size = vocab_size
        self._coins: dict[int, tuple[random.Random, list[float]]] = {}  # by seq_id

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        return [self._guess(row) if wants_guesses(row) else NO_DRAFT for row in rows]

    def _guess(self, row: DraftRow) -> Draft:
        output = self._truth(row.request)
        if output is None:
            return NO_DRAFT
        start = len(row.history) - len(row.request.prompt_ids)
        known = output[start : start + row.max_tokens]
        coins = self._coins_of(row, start + len(known))
        guesses = []
        for idx, right in enumerate(known):
            rate = self._rates[min(idx, len(self._rates) - 1)]
            is_right = coins[start + idx] < rate
            guesses.append(right if is_right else (right + 1) % self._vocab_size)
        return chain(guesses)

    def _coins_of(self, row: DraftRow, count: int) -> list[float]:
        """At least count numbers in [0, 1), by position in the output."""
        if row.seq_id not in self._coins:
            self._coins[row.seq_id] = random.Random(row.request.seed), []
        rng, coins = self._coins[row.seq_id]
        while len(coins) < count:
            coins.append(rng.random())
        return coins

    def forget(self, seq_id: int) -> None:
        self._coins.pop(seq_id, None)


class MisleadingDrafter:
    """Always has guesses, says that they are nearly certain, and is right once in a vocabulary."""

    keeps_kv = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, name: str, vocab_size: int) -> None:
        self.name = name
        self._vocab_size = vocab_size
        self._rng = random.Random(0)

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        return [self._guess(row.max_tokens) if wants_guesses(row) else NO_DRAFT for row in rows]

    def _guess(self, count: int) -> Draft:
        token_ids = [self._rng.randrange(self._vocab_size) for _ in range(count)]
        return chain(token_ids, scores=[_SURE] * count)

    def forget(self, seq_id: int) -> None:
        return


def make_oracle(resources: DrafterResources) -> KnowingDrafter:
    refuse_argument("oracle", resources)
    truth = need_truth("oracle", resources)
    return KnowingDrafter("oracle", truth, [1.0], resources.vocab_size)


def make_anti(resources: DrafterResources) -> KnowingDrafter | MisleadingDrafter:
    refuse_argument("anti", resources)
    if resources.truth is None:
        return MisleadingDrafter("anti", resources.vocab_size)
    return KnowingDrafter("anti", resources.truth, [0.0], resources.vocab_size)


def make_synthetic(resources: DrafterResources) -> KnowingDrafter:
    rates = _parse_rates(resources.argument)
    truth = need_truth("synthetic", resources)
    return KnowingDrafter("synthetic", truth, rates, resources.vocab_size)


def _parse_rates(argument: str | None) -> list[float]:
    try:
        rates = [float(part) for part in (argument or "").split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise ConfigError(
            f"drafter 'synthetic' needs acceptance rates from 0 to 1, but got {argument!r}: write "
            "for example synthetic:0.8,0.6"
        )
    return rates

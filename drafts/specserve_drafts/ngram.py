"""Prompt lookup: what followed the last time these tokens stood here, in prompt or output.

The longest suffix of 3, 2 or 1 tokens that has occurred before, at its most recent occurrence. An
index per sequence grows with it, so a step costs its new tokens (about 1 us each) and three
look-ups instead of a search through the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

from specserve.drafting import NO_DRAFT, Draft, DraftRow, Outcome, chain
from specserve_drafts.resources import DrafterResources, refuse_argument
from specserve_drafts.scripted import wants_guesses

LENGTHS: Final = (3, 2, 1)  # longest first


class _Index:
    """Where each run of tokens was last followed by something."""

    def __init__(self) -> None:
        self.num_indexed = 0  # ends 1..num_indexed are in
        self._next: dict[tuple[int, ...], int] = {}  # run -> index of the token after it

    def extend(self, history: Seq[int]) -> None:
        """Index every run that has a token after it; the suffix itself does not, yet."""
        for end in range(self.num_indexed + 1, len(history)):
            for n in LENGTHS:
                if n <= end:
                    self._next[tuple(history[end - n : end])] = end
        self.num_indexed = max(self.num_indexed, len(history) - 1)

    def find(self, history: Seq[int]) -> int | None:
        """Index of the token that followed the longest known suffix of history."""
        for n in LENGTHS:
            at = self._next.get(tuple(history[-n:])) if n <= len(history) else None
            if at is not None:
                return at
        return None


class NgramDrafter:
    name = "ngram"
    keeps_kv = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}  # by seq_id

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        return [self._guess(row) if wants_guesses(row) else NO_DRAFT for row in rows]

    def _guess(self, row: DraftRow) -> Draft:
        history = row.history
        index = self._indexes.setdefault(row.seq_id, _Index())
        index.extend(history)
        at = index.find(history)
        if at is None:
            return NO_DRAFT
        guesses = list(history[at : at + row.max_tokens])
        # Where the earlier run reaches into the suffix, the text repeats: go on repeating it.
        period = len(history) - at
        while len(guesses) < row.max_tokens:
            guesses.append(guesses[-period])
        return chain(guesses)

    def observe(self, outcomes: Seq[Outcome]) -> None:
        return  # history says it all

    def forget(self, seq_id: int) -> None:
        self._indexes.pop(seq_id, None)


def make_ngram(resources: DrafterResources) -> NgramDrafter:
    refuse_argument("ngram", resources)
    return NgramDrafter()

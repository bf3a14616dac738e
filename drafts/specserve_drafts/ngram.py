"""Prompt lookup: what followed the last time these tokens stood here, in prompt or output.

The longest suffix of 3, 2 or 1 tokens that has occurred before, at its most recent occurrence. An
index per sequence grows with it, so a step costs its new tokens and three look-ups instead of a
search through the whole text. Compiled where there is a compiler (native/suffix_lookup.h).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

from specserve.drafting import NO_DRAFT, Draft, DraftRow, chain
from specserve_drafts.asks import Asks
from specserve_drafts.resources import DrafterResources, refuse_argument
from specserve_kernels import native_suffix
from specserve_kernels.native_suffix import Ask

LENGTHS: Final = (3, 2, 1)  # longest first


class NgramGuesser:
    """In Python: the specification of the compiled form, and what serves where there is none."""

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}  # by seq_id

    def forget(self, seq_id: int) -> None:
        self._texts.pop(seq_id, None)

    def guess(self, asks: Seq[Ask]) -> list[list[int]]:
        """One chain per ask, of exactly K guesses or none."""
        return [
            self._texts.setdefault(ask.seq_id, _Text()).guess(ask.token_ids, ask.max_tokens)
            for ask in asks
        ]


class _Text:
    """One sequence, and where each run of tokens was last followed by something."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._num_indexed = 0  # ends 1..num_indexed are in
        self._next: dict[tuple[int, ...], int] = {}  # run -> index of the token after it

    def guess(self, more: Seq[int], num_guesses: int) -> list[int]:
        """After `more` tokens of the text."""
        text = self._token_ids
        text += more
        self._index_all()
        at = self._find()
        if at is None:
            return []
        guesses = text[at : at + num_guesses]
        # Where the earlier run reaches into the suffix, the text repeats: go on repeating it.
        period = len(text) - at
        while len(guesses) < num_guesses:
            guesses.append(guesses[-period])
        return guesses

    def _index_all(self) -> None:
        """Index every run that has a token after it; the suffix itself does not, yet."""
        text = self._token_ids
        for end in range(self._num_indexed + 1, len(text)):
            for n in LENGTHS:
                if n <= end:
                    self._next[tuple(text[end - n : end])] = end
        self._num_indexed = max(self._num_indexed, len(text) - 1)

    def _find(self) -> int | None:
        """Index of the token that followed the longest known suffix."""
        text = self._token_ids
        for n in LENGTHS:
            at = self._next.get(tuple(text[-n:])) if n <= len(text) else None
            if at is not None:
                return at
        return None


class NgramDrafter:
    name = "ngram"
    keeps_kv = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, *, compiled: bool | None = None) -> None:
        """compiled: None: where it is to be had"""
        is_compiled = native_suffix.available() if compiled is None else compiled
        self._guesser = native_suffix.Lookup() if is_compiled else NgramGuesser()
        self._asks = Asks(lambda row: None)

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        asked, asks = self._asks.of(rows)
        drafts = [NO_DRAFT] * len(rows)
        for idx, guesses in zip(asked, self._guesser.guess(asks), strict=True):
            if guesses:
                drafts[idx] = chain(guesses)
        return drafts

    def forget(self, seq_id: int) -> None:
        self._asks.forget(seq_id)
        self._guesser.forget(seq_id)


def make_ngram(resources: DrafterResources) -> NgramDrafter:
    refuse_argument("ngram", resources)
    return NgramDrafter()

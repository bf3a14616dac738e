"""Guesses what followed the longest known suffix of the text: in itself, in a predicted output
that came with the request, or in past outputs of the same cache salt.

After SuffixDecoding (Oliaro et al., NeurIPS 2025) and SAM-Decoding (Hu et al. 2024). What is
guessed is said by suffix_guesses.py, and done by its compiled form where there is a compiler:
behind a forward, Python finds none of its code in the caches, and 16 rows took a millisecond.

State follows the sequence's own history, so preemption costs time only.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final, Protocol

from specserve.drafting import NO_DRAFT, Draft, DraftRow
from specserve.errors import ConfigError
from specserve.types import Request
from specserve_drafts.asks import Asks
from specserve_drafts.resources import DrafterResources
from specserve_drafts.suffix_guesses import SuffixGuesser
from specserve_kernels import native_suffix
from specserve_kernels.native_suffix import Ask, Guess

DEFAULT_CORPUS_TOKENS: Final = 65_536


class Guesser(Protocol):
    """The compiled form and the readable one; what they promise is said in suffix_guesses.py."""

    @property
    def num_corpus_tokens(self) -> int: ...

    def add(self, seq_id: int, salt: str, num_prompt: int, prediction_ids: Seq[int]) -> None: ...

    def forget(self, seq_id: int) -> None: ...

    def read_output(self, salt: str, token_ids: Seq[int]) -> None: ...

    def guess(self, asks: Seq[Ask]) -> list[Guess]: ...


class SuffixDrafter:
    """corpus_tokens: how much past output is remembered, all salts together; 0: none."""

    name = "suffix"
    keeps_kv = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self, *, corpus_tokens: int = DEFAULT_CORPUS_TOKENS, compiled: bool | None = None
    ) -> None:
        """compiled: None: where it is to be had"""
        is_compiled = native_suffix.available() if compiled is None else compiled
        kind = native_suffix.SuffixIndex if is_compiled else SuffixGuesser
        self._guesser: Guesser = kind(corpus_tokens)
        self._asks = Asks(self._add)

    @property
    def num_corpus_tokens(self) -> int:
        """Tokens of past output held now."""
        return self._guesser.num_corpus_tokens

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        asked, asks = self._asks.of(rows)
        drafts = [NO_DRAFT] * len(rows)
        for idx, (token_ids, parents, scores) in zip(asked, self._guesser.guess(asks), strict=True):
            if token_ids:
                drafts[idx] = Draft(token_ids=token_ids, parents=parents, scores=scores)
        return drafts

    def read_output(self, request: Request, token_ids: Seq[int]) -> None:
        self._guesser.read_output(request.cache_salt, token_ids)

    def forget(self, seq_id: int) -> None:
        self._asks.forget(seq_id)
        self._guesser.forget(seq_id)

    def _add(self, row: DraftRow) -> None:
        request = row.request
        self._guesser.add(
            row.seq_id, request.cache_salt, len(request.prompt_ids), request.prediction_ids
        )


def make_suffix(resources: DrafterResources) -> SuffixDrafter:
    if resources.argument is None:
        return SuffixDrafter()
    try:
        corpus_tokens = int(resources.argument)
    except ValueError:
        corpus_tokens = -1
    if corpus_tokens < 0:
        raise ConfigError(
            f"drafter 'suffix' takes the number of past output tokens it remembers, 0 or more, "
            f"but got {resources.argument!r}: write suffix or suffix:65536"
        )
    return SuffixDrafter(corpus_tokens=corpus_tokens)

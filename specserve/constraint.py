"""What a request's text must look like, and the promise of whatever keeps it. Pure Python.

A constraint is a pure function of the tokens put out so far: what it remembers between calls makes
it quick and never shows. So guesses need no bookkeeping: a place in a draft is asked about with the
tokens that lead to it, and nothing has to be told when guesses are rejected, a sequence is
preempted, or a step is thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Literal, Protocol

import msgspec

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark"]


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a text must match, as it was asked for; not checked yet.

    text:    json_schema: the schema as JSON; regex; choice: a JSON list of strings; grammar: Lark
             or GBNF; lark: Lark for certain
    param:   the field that asked for it, for messages
    compact: of json_schema: no white space between a text's parts
    after:   a token behind whose first occurrence it holds; None: from the beginning
    """

    kind: GrammarKind
    text: str
    param: str
    compact: bool = False
    after: int | None = None


class Constraint(Protocol):
    """One sequence's. Asked on the worker thread, about places: what follows the output tokens
    known[num_prompt:] and then `prefix` (guesses). Of `known` nothing ever changes, it grows."""

    def mask(self, known: Seq[int], num_prompt: int, prefix: Seq[int]) -> bytes | None:
        """A bit per token id, the lowest bit of the first byte first: what may come next. None:
        anything, since the text has ended.

        Raises EngineError where nobody can tell: the tokens do not match, or the grammar takes too
        much work.
        """
        ...

    def admits(self, known: Seq[int], num_prompt: int, prefix: Seq[int]) -> bool:
        """Whether `prefix` may follow; False also where nobody can tell."""
        ...

    def forced(self, known: Seq[int], num_prompt: int, most: int) -> tuple[int, ...]:
        """At most `most` tokens that spell what must come next: guesses, for the same text may be
        cut into other tokens. () where there is a choice."""
        ...


class Behind:
    """A Constraint that begins behind the first `mark`: until then anything but an end may come."""

    def __init__(
        self, inner: Constraint, *, mark: int, eos_ids: frozenset[int], vocab_size: int
    ) -> None:
        self._inner = inner
        self._mark = mark
        self._eos_ids = eos_ids
        free = (1 << vocab_size) - 1
        for eos_id in eos_ids:
            free &= ~(1 << eos_id)
        self._free = free.to_bytes(-(-vocab_size // 8), "little")
        self._num_searched = 0  # output tokens without a mark among them
        self._start: int | None = None  # of the constrained text, in `known`

    def mask(self, known: Seq[int], num_prompt: int, prefix: Seq[int]) -> bytes | None:
        place = self._place(known, num_prompt, prefix)
        return self._free if place is None else self._inner.mask(known, *place)

    def admits(self, known: Seq[int], num_prompt: int, prefix: Seq[int]) -> bool:
        place = self._place(known, num_prompt, prefix)
        if place is None:
            return self._eos_ids.isdisjoint(prefix)
        return self._inner.admits(known, *place)

    def forced(self, known: Seq[int], num_prompt: int, most: int) -> tuple[int, ...]:
        place = self._place(known, num_prompt, ())
        return () if place is None else self._inner.forced(known, place[0], most)

    def _place(
        self, known: Seq[int], num_prompt: int, prefix: Seq[int]
    ) -> tuple[int, Seq[int]] | None:
        """Where the constrained text begins in `known`, and its guesses; None: not yet."""
        if self._start is None:
            for at in range(num_prompt + self._num_searched, len(known)):
                if known[at] == self._mark:
                    self._start = at + 1
                    break
            self._num_searched = len(known) - num_prompt
        if self._start is not None:
            return self._start, prefix
        if self._mark in prefix:
            return len(known), prefix[list(prefix).index(self._mark) + 1 :]
        return None

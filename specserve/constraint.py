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

GrammarKind = Literal["json_schema", "regex", "choice", "grammar"]


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a text must match, as it was asked for; not checked yet.

    text:    json_schema: the schema as JSON; regex; choice: a JSON list of strings; grammar: Lark
             or GBNF
    param:   the field that asked for it, for messages
    compact: of json_schema: no white space between a text's parts
    """

    kind: GrammarKind
    text: str
    param: str
    compact: bool = False


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

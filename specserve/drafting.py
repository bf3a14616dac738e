"""The promise a guesser keeps. It lives low: the runner depends on it, never on a guesser.

A drafter only ever suggests: a wrong, late, missing or exploding drafter changes speed, never text.
It runs on the worker thread inside the step, and its guesses never outlive the step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

import msgspec

from specserve.types import Request

if TYPE_CHECKING:
    from torch import Tensor


class DraftRow(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence that a drafter is asked about.

    history:     all known tokens, read only; history[i] sits at position i
    num_known:   how many tokens of history the target will have computed after this step. For a
                 prefill chunk it is short of len(history): a drafter with KV may catch up to it
    max_tokens:  K: the most guesses wanted; 0: none, only catch up
    kv_len:      this drafter's valid KV, a prefix of history
    block_table: block ids; position i is slot i % S of block_table[i // S], in every model's KV.
                 Slots exist for num_known + max_tokens positions
    """

    seq_id: int
    request: Request
    history: Seq[int]
    num_known: int
    max_tokens: int
    kv_len: int
    block_table: tuple[int, ...]


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """Guesses for one row, at most its K.

    token_ids: guesses; a parent always comes before its children
    parents:   index into token_ids of each guess's parent, -1 for the last known token.
               A chain is (-1, 0, 1, ...)
    probs:     [len(token_ids), V] fp32, the distribution each guess was drawn from; None: one-hot
    kv_len:    this drafter's valid KV if no guess is accepted, a prefix of history
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: Tensor | None = None
    kv_len: int = 0


NO_DRAFT = Draft()


def chain(token_ids: Seq[int], *, probs: Tensor | None = None, kv_len: int = 0) -> Draft:
    """A draft without branches: each guess continues the one before."""
    return Draft(
        token_ids=tuple(token_ids),
        parents=tuple(range(-1, len(token_ids) - 1)),
        probs=probs,
        kv_len=kv_len,
    )


class Drafter(Protocol):
    """name: as in `--drafters` and in every metric; keeps_kv: wants catch-up rows (K = 0)."""

    @property
    def name(self) -> str: ...

    @property
    def keeps_kv(self) -> bool: ...

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """One Draft per row, in order."""
        ...

    def observe(self, seq_id: int, token_ids: Seq[int], num_accepted: int) -> None:
        """What the target chose after the last proposal, and how many guesses that confirmed."""
        ...

    def forget(self, seq_id: int) -> None:
        """The sequence ended or was preempted; forgetting an unknown one is fine."""
        ...

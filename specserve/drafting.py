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


def is_chain(draft: Draft) -> bool:
    return draft.parents == tuple(range(-1, len(draft.parents) - 1))


def leading(draft: Draft, num_nodes: int) -> Draft:
    """Its first nodes: parents come before children, so they are a draft, too."""
    if num_nodes >= len(draft.token_ids):
        return draft
    return Draft(
        token_ids=draft.token_ids[:num_nodes],
        parents=draft.parents[:num_nodes],
        probs=None if draft.probs is None else draft.probs[:num_nodes],
        kv_len=draft.kv_len,
    )


def first_chain(draft: Draft) -> Draft:
    """The path of first children: what a rule for chains can use of a tree."""
    path: list[int] = []
    for idx, parent in enumerate(draft.parents):
        if parent == (path[-1] if path else -1):
            path.append(idx)
    probs = None if draft.probs is None else draft.probs[path]
    return chain([draft.token_ids[idx] for idx in path], probs=probs, kv_len=draft.kv_len)


def fault_of(draft: Draft) -> str | None:
    """Why a draft cannot be used at all, or None."""
    if not isinstance(draft, Draft):
        return f"it is a {type(draft).__name__}, not a Draft"
    if len(draft.parents) != len(draft.token_ids):
        return f"{len(draft.token_ids)} token ids but {len(draft.parents)} parents"
    if draft.probs is not None and len(draft.probs) != len(draft.token_ids):
        return f"{len(draft.token_ids)} token ids but {len(draft.probs)} rows of probs"
    for idx, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        if not isinstance(token_id, int) or not isinstance(parent, int):
            return f"guess {idx} has token id {token_id!r} and parent {parent!r}"
        if not -1 <= parent < idx:
            return f"guess {idx} has parent {parent}, which does not come before it"
    return None


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

"""The promise a guesser keeps. It lives low: the runner depends on it, never on a guesser.

A drafter only ever suggests: a wrong, late, missing or exploding drafter changes speed, never text.
It runs on the worker thread inside the step, and its guesses never outlive the step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import msgspec

from specserve.types import Request

if TYPE_CHECKING:
    from torch import Tensor


class DraftRow(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence that a drafter is asked about.

    history:     all known tokens, read only; history[i] sits at position i
    num_known:   how many tokens of history the target will have computed after this step. For a
                 prefill chunk it is short of len(history): a drafter with KV may catch up to it
    max_tokens:  K: the most guesses wanted, nodes of a tree included; 0: none, only catch up
    kv_len:      this drafter's valid KV, a prefix of history
    block_table: block ids; position i is slot i % S of block_table[i // S], in every model's KV.
                 Slots exist for num_known + max_tokens positions
    width:       the most children a node may have; 1: a chain
    sharpness:   beta: a drafter with logits proposes from softmax(beta * log q); others ignore it
    """

    seq_id: int
    request: Request
    history: Seq[int]
    num_known: int
    max_tokens: int
    kv_len: int
    block_table: tuple[int, ...]
    width: int = 1
    sharpness: float = 1.0


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """Guesses for one row, at most its K.

    token_ids: guesses; a parent always comes before its children
    parents:   index into token_ids of each guess's parent, -1 for the last known token.
               A chain is (-1, 0, 1, ...)
    probs:     [len(token_ids), V] fp32, the distribution each guess was drawn from; None: one-hot
    kv_len:    this drafter's valid KV if no guess is accepted, a prefix of history
    scores:    per guess, what the drafter itself thinks of it: its probability in [0, 1] of being
               right if its parent is. Raw: the controller calibrates it. Empty: no opinion
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probs: Tensor | None = None
    kv_len: int = 0
    scores: tuple[float, ...] = ()


NO_DRAFT = Draft()
_ONE: Final = 1.0 + 1e-5  # rounding


def chain(
    token_ids: Seq[int],
    *,
    probs: Tensor | None = None,
    kv_len: int = 0,
    scores: Seq[float] = (),
) -> Draft:
    """A draft without branches: each guess continues the one before."""
    return Draft(
        token_ids=tuple(token_ids),
        parents=_chain_parents(len(token_ids)),
        probs=probs,
        kv_len=kv_len,
        scores=tuple(scores),
    )


_CHAINS: Final = tuple(tuple(range(-1, length - 1)) for length in range(64))


def _chain_parents(length: int) -> tuple[int, ...]:
    return _CHAINS[length] if length < len(_CHAINS) else tuple(range(-1, length - 1))


def is_chain(draft: Draft) -> bool:
    return draft.parents == _chain_parents(len(draft.parents))


def node_depths(draft: Draft) -> list[int]:
    """1 for a guess that follows the last known token, 2 for its children, and so on."""
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def num_levels(draft: Draft) -> int:
    """Levels of guesses."""
    return len(draft.token_ids) if is_chain(draft) else max(node_depths(draft))


def leading(draft: Draft, num_nodes: int) -> Draft:
    """Its first nodes: parents come before children, so they are a draft, too."""
    if num_nodes >= len(draft.token_ids):
        return draft
    return Draft(
        token_ids=draft.token_ids[:num_nodes],
        parents=draft.parents[:num_nodes],
        probs=None if draft.probs is None else draft.probs[:num_nodes],
        kv_len=draft.kv_len,
        scores=draft.scores[:num_nodes],
    )


def pruned(draft: Draft, nodes: Seq[int]) -> Draft:
    """Only these nodes, ascending, each with its parent among them."""
    if len(nodes) == len(draft.token_ids):
        return draft
    if not nodes or nodes[-1] == len(nodes) - 1:
        return leading(draft, len(nodes))
    place = {node: at for at, node in enumerate(nodes)}
    place[-1] = -1
    return Draft(
        token_ids=tuple(draft.token_ids[node] for node in nodes),
        parents=tuple(place[draft.parents[node]] for node in nodes),
        probs=None if draft.probs is None else draft.probs[list(nodes)],
        kv_len=draft.kv_len,
        scores=tuple(draft.scores[node] for node in nodes) if draft.scores else (),
    )


def fault_of(draft: Draft) -> str | None:
    """Why a draft cannot be used at all, or None."""
    if not isinstance(draft, Draft):
        return f"it is a {type(draft).__name__}, not a Draft"
    if len(draft.parents) != len(draft.token_ids):
        return f"{len(draft.token_ids)} token ids but {len(draft.parents)} parents"
    if draft.probs is not None and len(draft.probs) != len(draft.token_ids):
        return f"{len(draft.token_ids)} token ids but {len(draft.probs)} rows of probs"
    if draft.scores and len(draft.scores) != len(draft.token_ids):
        return f"{len(draft.token_ids)} token ids but {len(draft.scores)} scores"
    if draft.scores and not _in_unit_range(draft.scores):
        return f"scores {draft.scores} must lie in [0, 1]"
    if is_chain(draft) and set(map(type, draft.token_ids)) <= {int}:
        return None  # nearly always; what follows finds out what is wrong
    for idx, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        if not isinstance(token_id, int) or not isinstance(parent, int):
            return f"guess {idx} has token id {token_id!r} and parent {parent!r}"
        if not -1 <= parent < idx:
            return f"guess {idx} has parent {parent}, which does not come before it"
    return None


def _in_unit_range(scores: Seq[float]) -> bool:
    total = sum(scores)
    return min(scores) >= 0.0 and max(scores) <= _ONE and total == total  # NaN equals nothing


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one step made known about one sequence, before stop conditions.

    start:        position of the first token that the target computed in this step
    token_ids:    tokens at positions start, start + 1, ...: the known ones that were computed, the
                  accepted guesses, and last the emitted token that is not computed yet (missing if
                  the row did not sample)
    num_computed: how many of token_ids the target computed: all, or all but the last
    drafter:      whose guesses were verified; "none" if there were none
    num_drafted, num_accepted: of those guesses
    hidden:       [num_computed, A, D] fp32: the target's residual stream entering each of the
                  drafter's `hidden_layers`, at positions start .. start + num_computed - 1; None
                  for drafters that want none. Often a part of the whole step's, which nobody writes
                  to any more: a drafter may keep it instead of copying
    """

    seq_id: int
    request: Request
    start: int
    token_ids: tuple[int, ...]
    num_computed: int
    drafter: str
    num_drafted: int
    num_accepted: int
    hidden: Tensor | None = None


class Drafter(Protocol):
    """name: as in `--drafters` and in every metric; keeps_kv: wants catch-up rows (K = 0).

    hidden_layers: layers whose incoming residual stream it wants to see in observe(), where
                   num_layers of the target means what the last layer puts out. Usually ()
    """

    @property
    def name(self) -> str: ...

    @property
    def keeps_kv(self) -> bool: ...

    @property
    def hidden_layers(self) -> tuple[int, ...]: ...

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """One Draft per row, in order."""
        ...

    def forget(self, seq_id: int) -> None:
        """The sequence ended or was preempted; forgetting an unknown one is fine."""
        ...


@runtime_checkable
class Observer(Protocol):
    """A drafter that needs to see every step; one that reads histories does not."""

    def observe(self, outcomes: Seq[Outcome]) -> None:
        """What a step made known: every row of it, whoever guessed and prefill chunks included."""
        ...


@runtime_checkable
class Selective(Protocol):
    """A drafter without KV that has nothing to say of some requests: it is not asked about them."""

    def serves(self, request: Request) -> bool: ...


@runtime_checkable
class OutputReader(Protocol):
    """A drafter that learns from whole outputs, whoever guessed."""

    def read_output(self, request: Request, token_ids: Seq[int]) -> None:
        """A sequence ended for good: all tokens that it emitted. Once per sequence."""
        ...

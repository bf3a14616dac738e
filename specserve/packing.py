"""A plan's rows and their guesses, laid end to end: what one target forward computes."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import msgspec

from specserve.drafting import Draft, is_chain, node_depths
from specserve.types import RowPlan
from specserve_kernels.interface import PagedBatch


class PackedStep(msgspec.Struct, frozen=True):
    """The host side of one forward: T packed tokens of B rows, L rows of logits."""

    input_ids: list[int]  # [T]
    positions: list[int]  # [T]
    batch: PagedBatch
    logits_indices: list[int]  # [L]: per sampling row the last known token, then its guesses
    scored_indices: list[int]  # of prompts' tokens whose law is wanted, too: L more
    num_logits: list[int]  # [B]: how many of the L belong to each row


def pack(rows: Seq[RowPlan], drafts: Seq[Draft], block_size: int, *, vocab_size: int) -> PackedStep:
    """Lay rows and their guesses end to end.

    vocab_size: a guess beyond it is padding that was drawn: it is rejected whatever stands here
    """
    input_ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    parents: list[tuple[int, ...] | None] = []
    logits_indices: list[int] = []
    scored_indices: list[int] = []
    num_logits: list[int] = []
    for row, draft in zip(rows, drafts, strict=True):
        known_end = row.start + row.num_tokens
        first = len(input_ids)
        input_ids += row.history[row.start : known_end]
        positions += range(row.start, known_end)
        depths = node_depths(draft)
        input_ids += [guess if 0 <= guess < vocab_size else 0 for guess in draft.token_ids]
        positions += [known_end - 1 + depth for depth in depths]
        parents.append(None if is_chain(draft) else _segment_parents(row.num_tokens, draft))
        if row.samples:
            logits_indices += range(first + row.num_tokens - 1, len(input_ids))
        scored_indices += range(first, first + row.num_scored)
        num_logits.append(1 + len(draft.token_ids) if row.samples else 0)
        starts.append(len(input_ids))
    batch = PagedBatch(
        query_start_loc=tuple(starts),
        context_lens=tuple(row.start for row in rows),
        block_tables=tuple(row.block_table for row in rows),
        parents=tuple(parents),
        block_size=block_size,
    )
    return PackedStep(input_ids, positions, batch, logits_indices, scored_indices, num_logits)


def _segment_parents(num_known: int, draft: Draft) -> tuple[int, ...]:
    known = range(-1, num_known - 1)
    return (*known, *(num_known + parent for parent in draft.parents))

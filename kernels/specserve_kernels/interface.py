"""What a kernel backend promises. Dimension legend of the whole project:

B sequences (segments), T packed tokens, L logit rows, K guesses per row, V vocabulary, N query
heads, G key/value heads, H head size, P blocks in the pool, S slots per block, M blocks per
sequence. Imports torch only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class PagedBatch:
    """B segments of T packed query tokens over paged KV, built on the host once per step.

    query_start_loc: B+1 offsets into T; segment b is tokens query_start_loc[b]..[b+1]
    context_lens:    B lengths of KV before the segment; its token j has slot index context_len + j
    block_tables:    B tuples of block ids; slot index i is slot i % S of block_tables[b][i // S]
    parents:         per segment, None (each token continues the one before: a chain), or for a tree
                     the index inside the segment of each token's parent (-1: none in the segment).
                     A token sees the whole context, its ancestors in the segment, and itself
    """

    query_start_loc: tuple[int, ...]
    context_lens: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]
    parents: tuple[tuple[int, ...] | None, ...]
    block_size: int


class AttentionPlan(Protocol):
    """A backend's own prepared form of a PagedBatch, shared by all layers of one forward."""


class Backend(Protocol):
    """One set of kernels. A row's result never depends on its batch mates or on the chunking."""

    name: str

    def prepare(self, batch: PagedBatch) -> AttentionPlan: ...

    def slot_mapping(self, batch: PagedBatch) -> Tensor:
        """[T] int64: flat slot (block id * S + offset) where each token's KV is written."""
        ...

    def write_kv(
        self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> None:
        """key, value [T, G, H] into k_cache, v_cache [P, S, G, H] at slots [T]."""
        ...

    def paged_attention(
        self,
        query: Tensor,  # [T, N, H]
        k_cache: Tensor,  # [P, S, G, H]
        v_cache: Tensor,  # [P, S, G, H]
        plan: AttentionPlan,
        *,
        scale: float,
        sliding_window: int | None = None,  # keys older than this many positions are not seen
    ) -> Tensor:  # [T, N, H]
        ...

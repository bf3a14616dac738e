"""Words to build a PagedBatch with."""

from __future__ import annotations

import random
from dataclasses import dataclass

from specserve_kernels import PagedBatch


@dataclass(frozen=True)
class Segment:
    """num_tokens query tokens after context_len; parents as in PagedBatch."""

    context_len: int
    num_tokens: int
    parents: tuple[int, ...] | None = None

    @property
    def num_slots(self) -> int:
        return self.context_len + self.num_tokens


def a_paged_batch(segments: list[Segment], block_size: int, seed: int) -> tuple[PagedBatch, int]:
    """The segments over blocks in shuffled order, and how many blocks there are (3 unused)."""
    num_blocks = [-(-segment.num_slots // block_size) for segment in segments]
    total = sum(num_blocks) + 3
    pool = random.Random(seed).sample(range(total), total)
    tables, starts = [], [0]
    for segment, count in zip(segments, num_blocks, strict=True):
        tables.append(tuple(pool.pop() for _ in range(count)))
        starts.append(starts[-1] + segment.num_tokens)
    batch = PagedBatch(
        query_start_loc=tuple(starts),
        context_lens=tuple(segment.context_len for segment in segments),
        block_tables=tuple(tables),
        parents=tuple(segment.parents for segment in segments),
        block_size=block_size,
    )
    return batch, total

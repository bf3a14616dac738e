"""What the attention kernel is told about a batch: a PagedBatch as tensors, cut into tiles.

A tile is up to `TileSizes.tokens` neighbouring query tokens of one segment, times the query heads
that share a KV head: those rows read each key once, together. How many tokens, how many keys at a
time and how many per split is a property of the model, never of the batch, because the order in
which a row's sums are taken follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specserve_kernels.interface import PagedBatch

# From so many programs on a GPU is full without cutting contexts into splits.
_ENOUGH_PROGRAMS = 512
_MOST_PARTS = 2**26  # fp32 numbers of partial sums, 256 MiB


@dataclass(frozen=True)
class TileSizes:
    """tokens: query tokens per tile; keys: per inner step; split: keys per program (in `keys`s)."""

    tokens: int
    keys: int = 64
    split: int = 512

    @staticmethod
    def of_heads(num_heads: int, num_kv_heads: int) -> TileSizes:
        """8 tokens (7 guesses), or as many as make the 16 rows that a matrix unit takes at least.

        With many query heads per KV head fewer, so that a tile has at most 64 rows.
        """
        group = padded_group(num_heads, num_kv_heads)
        return TileSizes(tokens=max(16 // group, min(8, 64 // group), 1))


@dataclass(frozen=True)
class AttentionRows:
    """B segments of T packed tokens in I tiles; int32 on the device, padding to any capacity.

    tiles:        [I, 4]  segment (-1: padding), first row, number of rows, 1 if it is of a tree
    positions:    [T]     logical position of each token; -1: padding
    context_lens: [B]     KV length before the segment
    block_tables: [B, M]  block of each S slots
    paths:        [T, W]  at j: which token of its segment is each token's ancestor of depth j,
                          itself last; None where no segment is a tree
    num_splits:   at least cdiv(longest context + segment, sizes.split)
    fold:         one program goes through all splits of its tile (the bits are the same)
    """

    tiles: Tensor
    positions: Tensor
    context_lens: Tensor
    block_tables: Tensor
    paths: Tensor | None
    block_size: int
    num_splits: int
    fold: bool
    sizes: TileSizes


def folds(num_tiles: int, num_kv_heads: int, num_parts: int = 0) -> bool:
    """Whether a tile's splits are one program's work: where there are enough programs without, or
    too many partial sums (num_parts: splits * T * N * H)."""
    return num_tiles * num_kv_heads >= _ENOUGH_PROGRAMS or num_parts > _MOST_PARTS


def padded_group(num_heads: int, num_kv_heads: int) -> int:
    """Query heads per KV head, N / G, as the next power of two."""
    group: int = 1 << (num_heads // num_kv_heads - 1).bit_length()
    return group


def attention_rows(
    batch: PagedBatch, num_kv_heads: int, sizes: TileSizes, device: torch.device | str
) -> AttentionRows:
    """Built on the host, once per step; all layers share it."""
    tiles: list[tuple[int, ...]] = []
    positions: list[int] = []
    paths: list[tuple[int, ...]] = []
    for segment_idx, context_len in enumerate(batch.context_lens):
        start, end = batch.query_start_loc[segment_idx : segment_idx + 2]
        segment_paths = token_paths(end - start, batch.parents[segment_idx])
        paths += segment_paths
        positions += [context_len + len(path) - 1 for path in segment_paths]
        is_tree = int(batch.parents[segment_idx] is not None)
        tiles += [
            (segment_idx, first, min(sizes.tokens, end - first), is_tree)
            for first in range(start, end, sizes.tokens)
        ]

    def on_device(rows: list[tuple[int, ...]] | list[int], *shape: int) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32).view(*shape).to(device)

    has_tree = any(parents is not None for parents in batch.parents)
    longest = max(positions, default=0) + 1
    return AttentionRows(
        tiles=on_device(tiles, len(tiles), 4),
        positions=on_device(positions, len(positions)),
        context_lens=on_device(list(batch.context_lens), len(batch.context_lens)),
        block_tables=_rectangle(batch.block_tables).to(device),
        paths=_rectangle(tuple(paths)).to(device) if has_tree else None,
        block_size=batch.block_size,
        num_splits=-(-longest // sizes.split),
        fold=folds(len(tiles), num_kv_heads),
        sizes=sizes,
    )


def token_paths(num_tokens: int, parents: tuple[int, ...] | None) -> list[tuple[int, ...]]:
    """Per token of a segment its ancestors in the segment by depth, itself last."""
    if parents is None:
        parents = tuple(range(-1, num_tokens - 1))
    paths: list[tuple[int, ...]] = []
    for token_idx, parent in enumerate(parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), token_idx))
    return paths


def _rectangle(rows: tuple[tuple[int, ...], ...]) -> Tensor:
    """[len(rows), longest] int32, zeros behind each row."""
    longest = max((len(row) for row in rows), default=0)
    padded = [(*row, *[0] * (longest - len(row))) for row in rows]
    return torch.tensor(padded, dtype=torch.int32).view(len(rows), longest)

"""After a tree: the accepted path's KV moves to where a chain would have it, in all layers at once.

    accepted path of a sequence: tokens 0, 2, 5 of its segment
    slot index   context+0  +1  +2  +3  +4  +5          program (sequence, cache)
                     0      <-  2                        moves in order, so that nothing is
                                <--------  5             overwritten before it was read

A cache is every layer's k and every layer's v; their addresses come in one tensor. Rows are moved
as 8-byte words, whatever their dtype. A chain's path is 0, 1, 2 ...: nothing moves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.triton_kernels.model_shapes import Case, ModelShape


@dataclass(frozen=True)
class CacheAddresses:
    """Where all layers' caches begin ([C] int64 on the device), and what they have in common."""

    addresses: Tensor
    block_size: int
    words: int  # 8-byte words of a slot


def cache_addresses(caches: Sequence[Tensor]) -> CacheAddresses:
    """Of contiguous caches [P, S, G, H] of one shape and dtype; they must outlive the result."""
    first = caches[0]
    slot_bytes = first.shape[2] * first.shape[3] * first.element_size()
    for cache in caches:
        if not cache.is_contiguous() or cache.shape != first.shape or cache.dtype != first.dtype:
            raise ValueError("compaction needs contiguous caches of one shape and dtype")
    if slot_bytes % 8:
        raise ValueError(f"a slot has {slot_bytes} bytes, compaction moves multiples of 8")
    pointers = torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64)
    return CacheAddresses(pointers.to(first.device), first.shape[1], slot_bytes // 8)


@triton.jit
def _slot(table_ptr, index, SLOTS: tl.constexpr):
    block = tl.load(table_ptr + index // SLOTS).to(tl.int64)
    return block * SLOTS + index % SLOTS


@triton.jit(do_not_specialize=["path_width", "table_width"])
def compaction_kernel(
    addresses_ptr,  # [C]
    accepted_ptr,  # [B, W]; -1 behind each path
    context_lens_ptr,  # [B]
    tables_ptr,  # [B, M]
    path_width,
    table_width,
    SLOTS: tl.constexpr,
    WORDS: tl.constexpr,  # of a slot
    BLOCK: tl.constexpr,  # at least WORDS, a power of two
):
    sequence = tl.program_id(0).to(tl.int64)
    cache_ptr = tl.load(addresses_ptr + tl.program_id(1)).to(tl.pointer_type(tl.int64))
    table_ptr = tables_ptr + sequence * table_width
    context_len = tl.load(context_lens_ptr + sequence)
    word = tl.arange(0, BLOCK)
    for depth in range(path_width):
        token = tl.load(accepted_ptr + sequence * path_width + depth)
        if token > depth:
            source = _slot(table_ptr, context_len + token, SLOTS) * WORDS
            target = _slot(table_ptr, context_len + depth, SLOTS) * WORDS
            row = tl.load(cache_ptr + source + word, mask=word < WORDS, other=0)
            tl.store(cache_ptr + target + word, row, mask=word < WORDS)


def compact_kv(
    caches: CacheAddresses,
    accepted: Tensor,  # [B, W] int32: the accepted tokens of each segment by depth; -1: no more
    context_lens: Tensor,  # [B] int32
    block_tables: Tensor,  # [B, M] int32
) -> None:
    """Slot index context + j of each sequence becomes what slot index context + accepted[j] was."""
    num_sequences, path_width = accepted.shape
    if num_sequences:
        compaction_kernel[(num_sequences, len(caches.addresses))](
            *(caches.addresses, accepted, context_lens, block_tables),
            *(path_width, block_tables.shape[1]),
            SLOTS=caches.block_size,
            WORDS=caches.words,
            BLOCK=triton.next_power_of_2(caches.words),
            num_warps=2,
        )


def aot_cases(shape: ModelShape) -> Iterator[Case]:
    cache = torch.empty(4, 16, shape.num_kv_heads, shape.head_dim, dtype=torch.bfloat16)
    index = torch.zeros(2, 4, dtype=torch.int32)
    yield Case("bf16 KV", lambda: compact_kv(cache_addresses([cache]), index, index[0], index))

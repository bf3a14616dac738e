"""Paged batches at random, and the kernels that read or write paged KV against their twins."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from specserve_kernels.gpu_check.correctness import TOLERANCE, Check, Sizes, relative_error
from specserve_kernels.gpu_check.report import Correct
from specserve_kernels.interface import PagedBatch
from specserve_kernels.triton_kernels import compaction, reference, rope_kv, swiglu
from specserve_kernels.triton_kernels.attention import paged_attention
from specserve_kernels.triton_kernels.attention_rows import TileSizes, attention_rows

BLOCK_SIZE = 16


def a_batch(
    context_lens: Seq[int], num_tokens: Seq[int], trees: Seq[tuple[int, ...] | None], seed: int
) -> tuple[PagedBatch, int]:
    """Segments over shuffled blocks, and how many blocks there are."""
    counts = [-(-(c + n) // BLOCK_SIZE) for c, n in zip(context_lens, num_tokens, strict=True)]
    blocks = np.random.default_rng(seed).permutation(sum(counts)).tolist()
    ends = np.cumsum([0, *counts]).tolist()
    batch = PagedBatch(
        query_start_loc=tuple(np.cumsum([0, *num_tokens]).tolist()),
        context_lens=tuple(context_lens),
        block_tables=tuple(tuple(blocks[a:b]) for a, b in pairwise(ends)),
        parents=tuple(trees),
        block_size=BLOCK_SIZE,
    )
    return batch, len(blocks)


def random_batch(sizes: Sizes, seed: int) -> tuple[PagedBatch, int]:
    """Verify rows, prompt chunks and trees after contexts of any length, none included."""
    rng = np.random.default_rng(seed)
    num_segments = int(rng.integers(1, min(sizes.num_rows, 8) + 1))
    num_tokens = [int(rng.choice([1, 3, 5, 9])) for _ in range(num_segments)]
    trees = [
        tuple(int(rng.integers(-1, node)) for node in range(n)) if rng.random() < 0.5 else None
        for n in num_tokens
    ]
    context_lens = [int(rng.integers(0, sizes.context)) for _ in range(num_segments)]
    return a_batch(context_lens, num_tokens, trees, seed)


def check_attention(sizes: Sizes, device: torch.device) -> Iterator[Correct]:
    num_heads, num_kv_heads, head_dim = sizes.heads
    tiles = TileSizes.of_heads(num_heads, num_kv_heads)
    for dtype, limit in TOLERANCE.items():
        worst = 0.0
        for seed in range(sizes.num_batches):
            batch, num_blocks = random_batch(sizes, seed)
            generator = torch.Generator().manual_seed(seed)
            query = torch.randn(
                batch.query_start_loc[-1], num_heads, head_dim, generator=generator
            ).to(device, dtype)
            keys, values = torch.randn(
                2, num_blocks, BLOCK_SIZE, num_kv_heads, head_dim, generator=generator
            ).to(device, dtype)
            rows = attention_rows(batch, num_kv_heads, tiles, device)
            actual = paged_attention(query, keys, values, rows, scale=head_dim**-0.5)
            expected = reference.paged_attention(query, keys, values, batch, scale=head_dim**-0.5)
            worst = max(worst, relative_error(actual, expected))
        yield Correct("attention", f"ragged, trees, {dtype}", sizes.num_batches, worst, limit)


def check_rope(sizes: Sizes, device: torch.device) -> Iterator[Correct]:
    num_heads, num_kv_heads, head_dim = sizes.heads
    for dtype, limit in TOLERANCE.items():
        worst = 0.0
        for seed in range(sizes.num_batches):
            generator = torch.Generator().manual_seed(seed)
            num_rows = 1 + seed % sizes.num_rows
            width = (num_heads + 2 * num_kv_heads) * head_dim
            qkv = torch.randn(num_rows, width, generator=generator).to(device, dtype)
            angles = torch.randn(64, head_dim // 2, generator=generator).to(device)
            positions = torch.arange(num_rows, dtype=torch.int32, device=device) % 64
            slots = torch.randperm(num_rows, generator=generator).int().to(device)
            shape = 2, 2, -(-num_rows // BLOCK_SIZE), BLOCK_SIZE, num_kv_heads, head_dim
            (keys, values), (expected_keys, expected_values) = torch.zeros(
                shape, dtype=dtype, device=device
            )
            index = positions, slots, angles.cos(), angles.sin()
            actual = rope_kv.rope_and_write_kv(qkv, *index, keys, values)
            expected = reference.rope_and_write_kv(qkv, *index, expected_keys, expected_values)
            pairs = (actual, expected), (keys, expected_keys), (values, expected_values)
            worst = max(worst, *(relative_error(*pair) for pair in pairs))
        yield Correct("rope_kv", f"rotate and write, {dtype}", sizes.num_batches, worst, limit)


def check_swiglu(sizes: Sizes, device: torch.device) -> Iterator[Correct]:
    for dtype, limit in TOLERANCE.items():
        generator = torch.Generator().manual_seed(1)
        gate_up = torch.randn(sizes.num_rows, 2 * sizes.hidden_size, generator=generator)
        gate_up = gate_up.to(device, dtype)
        worst = relative_error(swiglu.swiglu(gate_up), reference.swiglu(gate_up))
        yield Correct("swiglu", str(dtype), 1, worst, limit)


def check_compaction(sizes: Sizes, device: torch.device) -> Iterator[Correct]:
    """Caches moved to other places than the twin moves them count as wrong, to the bit."""
    _, num_kv_heads, head_dim = sizes.heads
    num_wrong = 0
    for seed in range(sizes.num_batches):
        rng = np.random.default_rng(seed)
        context_lens = rng.integers(0, sizes.context, size=3).tolist()
        batch, num_blocks = a_batch(context_lens, [9] * 3, [None] * 3, seed)
        accepted = [sorted(rng.choice(9, size=n, replace=False).tolist()) for n in (4, 0, 2)]
        path = torch.tensor([[*tokens, *[-1] * (4 - len(tokens))] for tokens in accepted])
        shape = 2, num_blocks, BLOCK_SIZE, num_kv_heads, head_dim
        caches = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)
        expected = caches.clone()
        longest = max(len(table) for table in batch.block_tables)
        tables = torch.tensor([(*t, *[0] * (longest - len(t))) for t in batch.block_tables])
        index: list[Tensor] = [
            part.int().to(device) for part in (path, torch.tensor(context_lens), tables)
        ]
        compaction.compact_kv(compaction.cache_addresses(list(caches)), *index)
        reference.compact_kv(list(expected), *index)
        num_wrong += int((caches != expected).sum())
    yield Correct("compaction", "elements moved", sizes.num_batches, num_wrong, 0)


PAGED_CHECKS: dict[str, Check] = {
    "attention": check_attention,
    "rope_kv": check_rope,
    "swiglu": check_swiglu,
    "compaction": check_compaction,
}

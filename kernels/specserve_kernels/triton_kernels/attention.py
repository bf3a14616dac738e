"""Attention over paged KV for decode rows, guesses to verify, trees of guesses and prompt chunks.

    program (tile, KV head, split)          tile: up to 8 tokens x the N/G heads that share KV
      for each 64 keys of the split         keys are gathered through the block table
          scores = q @ k; online softmax; sums += p @ v
      partial sums -> merge: fold a row's splits, first to last -> out        (or FOLD at once)

A row's bits are a function of its own query and keys. Splits and steps begin at multiples of their
size in logical positions; keys that a row does not see add exact zeros; splits are folded first to
last, by the same operations whether one program does it (FOLD) or the merge. Fused multiply-adds
are therefore written out, and the compiler may add none. In a tree the keys of each token are
gathered in order of depth, as if its path were the whole sequence: a mask with holes would sum in
another order than the plain decoding that it must agree with. Only the steps that reach into the
segment pay for it: they are taken once per token, masked to that token's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.interface import PagedBatch
from specserve_kernels.triton_kernels.attention_rows import (
    AttentionRows,
    TileSizes,
    attention_rows,
    padded_group,
)
from specserve_kernels.triton_kernels.attention_steps import fold, shared_step, tree_step
from specserve_kernels.triton_kernels.model_shapes import Case, ModelShape
from specserve_kernels.triton_kernels.registers import all_registers

_LOG2_E = 1.4426950408889634


# Nothing is compiled anew for another number of rows, blocks or nodes.
@triton.jit(do_not_specialize=["window", "num_rows", "table_width", "path_width"])
def attention_kernel(
    q_ptr,  # [T, N, H]
    k_ptr,  # [P, S, G, H]
    v_ptr,  # [P, S, G, H]
    tiles_ptr,  # [I, 4] as in AttentionRows
    positions_ptr,  # [T]
    context_lens_ptr,  # [B]
    tables_ptr,  # [B, M]
    paths_ptr,  # [T, W]; unread unless TREES
    out_ptr,  # [T, N, H]; written if FOLD
    sums_ptr,  # [splits, T, N, H] fp32; written unless FOLD, as are the next two
    peaks_ptr,  # [splits, T, N] fp32
    totals_ptr,  # [splits, T, N] fp32
    score_scale, cap_scale, v_scale, window, num_rows, table_width, path_width,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr,
    HEAD: tl.constexpr,  # H as a power of two
    GROUP: tl.constexpr,  # N / G as a power of two
    SLOTS: tl.constexpr,  # S
    TOKENS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,  # as in TileSizes
    TREES: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, FOLD: tl.constexpr,
):  # fmt: skip
    tile_ptr = tiles_ptr + tl.program_id(0) * 4
    segment = tl.load(tile_ptr)
    if segment < 0:
        return
    first_row = tl.load(tile_ptr + 1)
    num_tokens = tl.load(tile_ptr + 2)
    kv_head = tl.program_id(1)
    row_token = tl.arange(0, TOKENS * GROUP) // GROUP
    group_head = tl.arange(0, TOKENS * GROUP) % GROUP
    position = tl.load(positions_ptr + first_row + row_token, mask=row_token < num_tokens, other=-1)
    last = tl.max(position, axis=0)
    oldest = tl.min(tl.where(position < 0, last, position), axis=0)
    begin = 0
    if WINDOW:
        begin = tl.maximum(oldest - window + 1, 0) // KEYS * KEYS
    if FOLD:
        first_split = begin // SPLIT
        end_split = last // SPLIT + 1
    else:
        first_split = tl.program_id(2)
        end_split = first_split + 1
        if (first_split * SPLIT > last) | (end_split * SPLIT <= begin):
            return
    # From `shared` on each token gathers its own keys; before `plain` every row sees every key.
    shared = last + 1
    context_len = tl.load(context_lens_ptr + segment)
    if TREES:
        shared = tl.where(tl.load(tile_ptr + 3) != 0, context_len // KEYS * KEYS, shared)
    plain = 0
    if not WINDOW:
        plain = tl.minimum(oldest + 1, shared) // KEYS * KEYS

    d = tl.arange(0, HEAD)
    head = (first_row + row_token).to(tl.int64) * N + kv_head * (N // G) + group_head
    there = (row_token < num_tokens) & (group_head < N // G)
    offset = head[:, None] * H + d[None, :]
    mask = there[:, None] & (d < H)[None, :]
    q = tl.load(q_ptr + offset, mask=mask, other=0.0)
    k_ptr += kv_head * H
    v_ptr += kv_head * H
    table_ptr = tables_ptr + segment.to(tl.int64) * table_width
    all_peak = tl.full((TOKENS * GROUP,), float("-inf"), tl.float32)
    all_total = tl.zeros((TOKENS * GROUP,), tl.float32)
    all_sums = tl.zeros((TOKENS * GROUP, HEAD), tl.float32)
    for split in range(first_split, end_split):
        low = tl.maximum(split * SPLIT, begin)
        high = tl.minimum((split + 1) * SPLIT, last + 1)
        peak = tl.full((TOKENS * GROUP,), float("-inf"), tl.float32)
        total = tl.zeros((TOKENS * GROUP,), tl.float32)
        sums = tl.zeros((TOKENS * GROUP, HEAD), tl.float32)
        for step in range(low, tl.minimum(high, plain), KEYS):
            peak, total, sums = shared_step(
                step, high, q, position, peak, total, sums, k_ptr, v_ptr, table_ptr, score_scale,
                cap_scale, window, KEYS, False, SLOTS, G * H, H, WINDOW, SOFT_CAP,
            )  # fmt: skip
        for step in range(tl.maximum(low, plain), tl.minimum(high, shared), KEYS):
            peak, total, sums = shared_step(
                step, high, q, position, peak, total, sums, k_ptr, v_ptr, table_ptr, score_scale,
                cap_scale, window, KEYS, True, SLOTS, G * H, H, WINDOW, SOFT_CAP,
            )  # fmt: skip
        if TREES:
            for step in range(tl.maximum(low, shared), high, KEYS):
                for token in range(num_tokens):
                    peak, total, sums = tree_step(
                        step, first_row + token, row_token, token, context_len, q, position, peak,
                        total, sums, k_ptr, v_ptr, table_ptr, positions_ptr, paths_ptr, path_width,
                        score_scale, cap_scale, window, KEYS, SLOTS, G * H, H, WINDOW, SOFT_CAP,
                    )  # fmt: skip
        if FOLD:
            all_peak, all_total, all_sums = fold(all_peak, all_total, all_sums, peak, total, sums)
        else:
            part = tl.cast(split, tl.int64) * num_rows * N
            tl.store(sums_ptr + part * H + offset, sums, mask=mask)
            tl.store(peaks_ptr + part + head, peak, mask=there)
            tl.store(totals_ptr + part + head, total, mask=there)
    if FOLD:
        out = all_sums / tl.where(all_total > 0, all_total, 1.0)[:, None] * v_scale
        tl.store(out_ptr + offset, out.to(q.dtype), mask=mask)


@triton.jit(do_not_specialize=["window", "num_rows"])
def merge_kernel(
    sums_ptr,  # [splits, T, N, H] fp32
    peaks_ptr,  # [splits, T, N] fp32
    totals_ptr,  # [splits, T, N] fp32
    positions_ptr,  # [T]
    out_ptr,  # [T, N, H]
    v_scale, window, num_rows, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr,
    HEAD: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Folds the splits that a row's window reaches, for the heads of one KV head."""
    row = tl.program_id(0)
    position = tl.load(positions_ptr + row)
    if position < 0:
        return
    first_split = 0
    if WINDOW:
        first_split = tl.maximum(position - window + 1, 0) // SPLIT
    d = tl.arange(0, HEAD)
    group_head = tl.arange(0, GROUP)
    there = group_head < N // G
    head = row.to(tl.int64) * N + tl.program_id(1) * (N // G) + group_head
    offset = head[:, None] * H + d[None, :]
    mask = there[:, None] & (d < H)[None, :]
    peak = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    sums = tl.zeros((GROUP, HEAD), tl.float32)
    for split in range(first_split, position // SPLIT + 1):
        part = tl.cast(split, tl.int64) * num_rows * N
        more_peak = tl.load(peaks_ptr + part + head, mask=there, other=float("-inf"))
        more_total = tl.load(totals_ptr + part + head, mask=there, other=0.0)
        more_sums = tl.load(sums_ptr + part * H + offset, mask=mask, other=0.0)
        peak, total, sums = fold(peak, total, sums, more_peak, more_total, more_sums)
    out = sums / tl.where(total > 0, total, 1.0)[:, None] * v_scale
    tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), mask=mask)


def paged_attention(
    query: Tensor,  # [T, N, H] fp32, fp16 or bf16
    k_cache: Tensor,  # [P, S, G, H] of query's dtype, or float8_e4m3fn times k_scale
    v_cache: Tensor,  # [P, S, G, H] likewise
    rows: AttentionRows,
    *,
    scale: float,
    window: int | None = None,  # a row sees this many keys, its own included
    soft_cap: float | None = None,  # scores become cap * tanh(score / cap)
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:  # [T, N, H]; padding rows stay unwritten
    """Softmax attention of each row over its context, its ancestors and itself."""
    if not (query.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError(
            "paged_attention needs a contiguous query [T, N, H] and caches [P, S, G, H]"
        )
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = k_cache.shape[2]
    group = padded_group(num_heads, num_kv_heads)
    out = torch.empty_like(query)
    parts = (0 if rows.fold else rows.num_splits, num_rows, num_heads)
    peaks, totals = torch.empty(2, *parts, dtype=torch.float32, device=query.device)
    sums = torch.empty(*parts, head_dim, dtype=torch.float32, device=query.device)
    score_scale, cap_scale = _score_scales(scale * k_scale, soft_cap)
    heads = {"N": num_heads, "G": num_kv_heads, "H": head_dim, "GROUP": group}
    heads["HEAD"] = triton.next_power_of_2(head_dim)
    grid = (rows.tiles.shape[0], num_kv_heads, 1 if rows.fold else rows.num_splits)
    if 0 in grid:
        return out
    attention_kernel[grid](
        *(query, k_cache, v_cache, rows.tiles, rows.positions, rows.context_lens),
        *(rows.block_tables, rows.positions if rows.paths is None else rows.paths),
        *(out, sums, peaks, totals, score_scale, cap_scale, v_scale, window or 0, num_rows),
        *(rows.block_tables.shape[1], 0 if rows.paths is None else rows.paths.shape[1]),
        **heads,
        SLOTS=rows.block_size,
        TOKENS=rows.sizes.tokens,
        KEYS=rows.sizes.keys,
        SPLIT=rows.sizes.split,
        TREES=rows.paths is not None,
        WINDOW=window is not None,
        SOFT_CAP=soft_cap is not None,
        FOLD=rows.fold,
        num_warps=4,
        num_stages=_num_stages(rows, rows.sizes.tokens * group),
        enable_fp_fusion=False,
        **all_registers(),
    )
    if not rows.fold:
        merge_kernel[(num_rows, num_kv_heads)](
            *(sums, peaks, totals, rows.positions, out, v_scale, window or 0, num_rows),
            **heads,
            SPLIT=rows.sizes.split,
            WINDOW=window is not None,
            num_warps=4 if group * heads["HEAD"] >= 1024 else 1,
            enable_fp_fusion=False,
        )
    return out


def _score_scales(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """What scores are multiplied by before exp2: first, and after the tanh of a soft cap."""
    if soft_cap is None:
        return scale * _LOG2_E, 0.0
    return 2 * scale / soft_cap * _LOG2_E, soft_cap * _LOG2_E


def _num_stages(rows: AttentionRows, tile_rows: int) -> int:
    """How far ahead keys are read: 3 reads block tables ahead too, where registers are left."""
    return 2 if rows.fold or (rows.paths is not None and tile_rows >= 32) else 3


def aot_cases(shape: ModelShape) -> Iterator[Case]:
    """Verifying 4 guesses after 1000 tokens, as a chain and as a tree; a full GPU; fp8 KV."""
    sizes = TileSizes.of_heads(shape.num_heads, shape.num_kv_heads)
    chain = PagedBatch((0, 5), (1000,), (tuple(range(63)),), (None,), 16)
    tree = replace(chain, parents=((-1, 0, 0, 1, 1),))
    query = torch.empty(5, shape.num_heads, shape.head_dim, dtype=torch.bfloat16)
    cache = torch.empty(64, 16, shape.num_kv_heads, shape.head_dim, dtype=torch.bfloat16)
    narrow = torch.empty_like(cache, dtype=torch.float8_e4m3fn)

    def case(name: str, batch: PagedBatch, kv: Tensor, fold: bool = False) -> Case:
        rows = replace(attention_rows(batch, shape.num_kv_heads, sizes, "cpu"), fold=fold)
        call = lambda: paged_attention(query, kv, kv, rows, scale=0.1)  # noqa: E731
        return Case(name, call, has_fp8=kv is narrow)

    yield case("chain", chain, cache)
    yield case("tree", tree, cache)
    yield case("chain, folded", chain, cache, fold=True)
    yield case("chain, fp8 KV", chain, narrow)

"""y = x @ w.T whose rows have the same bits in every batch: for exact replay on a GPU.

    K  |----- split 0 -----|----- split 1 -----| ...   each summed from zero in steps of BLOCK_K
    y = ((split 0 + split 1) + split 2) + ...          always in this order

The tile and the splits depend on the weight's shape and dtype alone, never on the number of rows or
on the device, so neither does the order in which a row's products are added. With few rows the
splits are programs of their own, which write fp32 partial sums that a second kernel adds: enough
programs to stream a weight that has few columns. With many rows a program goes through the splits
itself, and no partial sum leaves it. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.triton_kernels.model_shapes import Case, ModelShape

_WANTED_PROGRAMS = 264  # of one tile of rows: two for each of an H200's multiprocessors
_MAX_SPLITS = 8
_FEW_ROWS = 128  # up to here splits are programs of their own
_GROUP = 8  # tiles of rows that share a column tile's weights in the cache
_BLOCK = 1024


class Tile(NamedTuple):
    """What one program computes, and how it steps through K."""

    rows: int
    columns: int
    k: int


def tile_of(dtype: torch.dtype) -> Tile:
    return Tile(32, 64, 32) if dtype == torch.float32 else Tile(64, 64, 64)


def num_splits(num_columns: int, depth: int, dtype: torch.dtype) -> int:
    """Of a weight [num_columns, depth]: a function of nothing else."""
    tile = tile_of(dtype)
    wanted = triton.cdiv(_WANTED_PROGRAMS, triton.cdiv(num_columns, tile.columns))
    return int(min(wanted, _MAX_SPLITS, max(1, depth // (4 * tile.k))))


@triton.jit
def _place(program, num_rows, num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
           GROUP: tl.constexpr):  # fmt: skip
    """(tile of rows, tile of columns): GROUP tiles of rows, column by column, then the next."""
    row_tiles, column_tiles = tl.cdiv(num_rows, ROWS), tl.cdiv(num_columns, COLUMNS)
    first = program // (GROUP * column_tiles) * GROUP
    in_group = tl.minimum(row_tiles - first, GROUP)
    inside = program % (GROUP * column_tiles)
    return first + inside % in_group, inside // in_group


@triton.jit
def _split_sum(x_ptr, x_stride, w_ptr, w_stride, row, column, num_rows, num_columns, depth, first,
               split_len, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
               BLOCK_K: tl.constexpr):  # fmt: skip
    """[ROWS, COLUMNS] fp32: the products of depth first .. first + split_len - 1, added up."""
    # Rows and columns beyond the edge read the last one again; they are not stored.
    rows = tl.minimum(row, num_rows - 1).to(tl.int64)
    columns = tl.minimum(column, num_columns - 1).to(tl.int64)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(first, tl.minimum(first + split_len, depth), BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(
            x_ptr + rows[:, None] * x_stride + k[None, :], mask=k[None, :] < depth, other=0.0
        )
        w = tl.load(
            w_ptr + columns[None, :] * w_stride + k[:, None], mask=k[:, None] < depth, other=0.0
        )
        total = tl.dot(x, w, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def gemm_kernel(
    x_ptr,  # [M, x_stride]
    x_stride,
    w_ptr,  # [N, w_stride]
    w_stride,
    out_ptr,  # [M, N] of x's dtype; or [splits, M, N] f32 partial sums
    num_rows,  # M
    num_columns,  # N
    depth,  # K
    split_len,  # a multiple of BLOCK_K
    SPLITS: tl.constexpr,  # that this program goes through; 1: grid axis 1 names its only one
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    row_tile, column_tile = _place(tl.program_id(0), num_rows, num_columns, ROWS, COLUMNS, GROUP)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(1)
    total = _split_sum(x_ptr, x_stride, w_ptr, w_stride, row, column, num_rows, num_columns, depth,
                       split * split_len, split_len, ROWS, COLUMNS, BLOCK_K)  # fmt: skip
    for following in range(1, SPLITS):
        total += _split_sum(x_ptr, x_stride, w_ptr, w_stride, row, column, num_rows, num_columns,
                            depth, following * split_len, split_len, ROWS, COLUMNS,
                            BLOCK_K)  # fmt: skip
    out = (split.to(tl.int64) * num_rows + row[:, None]) * num_columns + column[None, :]
    there = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    tl.store(out_ptr + out, total.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["num_elements"])
def add_splits_kernel(
    partials_ptr,  # [SPLITS, num_elements] f32
    out_ptr,  # [num_elements]
    num_elements,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = at < num_elements
    total = tl.load(partials_ptr + at, mask=there, other=0.0)
    for split in tl.static_range(1, SPLITS):
        part = partials_ptr + tl.cast(split, tl.int64) * num_elements
        total += tl.load(part + at, mask=there, other=0.0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=there)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K], weight [N, K], both f32, bf16 or fp16 with contiguous rows -> [M, N] of x's dtype.

    ValueError for other layouts. Nothing about row m of the result depends on M or on other rows.
    """
    if x.stride(1) != 1 or weight.stride(1) != 1 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"linear needs contiguous rows of one length, got {tuple(x.shape)} stride {x.stride()}"
            f" and {tuple(weight.shape)} stride {weight.stride()}"
        )
    (num_rows, depth), num_columns = x.shape, weight.shape[0]
    out = torch.empty(num_rows, num_columns, dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    tile, splits = tile_of(x.dtype), num_splits(num_columns, depth, x.dtype)
    split_len = triton.cdiv(triton.cdiv(depth, tile.k), splits) * tile.k
    apart = splits > 1 and num_rows <= _FEW_ROWS
    sums = out.new_empty(splits, *out.shape, dtype=torch.float32) if apart else out
    tiles = triton.cdiv(num_rows, tile.rows) * triton.cdiv(num_columns, tile.columns)
    gemm_kernel[(tiles, splits if apart else 1)](
        *(x, x.stride(0), weight, weight.stride(0), sums),
        *(num_rows, num_columns, depth, split_len),
        SPLITS=1 if apart else splits,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        BLOCK_K=tile.k,
        GROUP=_GROUP,
        num_warps=4,
        num_stages=4,
    )
    if apart:
        add_splits_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
            *(sums, out, out.numel()), SPLITS=splits, BLOCK=_BLOCK, num_warps=4
        )
    return out


def aot_cases(shape: ModelShape) -> Iterator[Case]:
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    sizes = {
        "qkv": (heads, shape.hidden_size),
        "gate_up": (2 * shape.intermediate_size, shape.hidden_size),
        "down": (shape.hidden_size, shape.intermediate_size),
    }
    for name, size in sizes.items():
        weight = torch.empty(size, dtype=torch.bfloat16)
        for num_rows in (5, 512):
            x = torch.empty(num_rows, size[1], dtype=torch.bfloat16)
            yield Case(f"{name}, {num_rows} rows", partial(linear, x, weight))

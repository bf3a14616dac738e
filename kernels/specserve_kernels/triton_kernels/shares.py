"""How sure a draft is of the token that it chose: its share of exp(weight + Gumbel noise).

    share     (L, tiles)  what a tile's other tokens come to, their noise from its leading bits
    score     (L,)        the chosen token's own, its noise exact, over all of them

The noise is the one that the target will choose with, so it is known and counts; a greedy row has
none, and its share is the softmax. Rows must have been through sampling.choose_tokens without
edits: its choices, best logits and cuts are used here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.triton_kernels.model_shapes import Case, ModelShape
from specserve_kernels.triton_kernels.noise import (
    cells_of,
    gumbel_at,
    gumbel_of,
    load_key,
    tile_cells,
    uniforms_of,
)
from specserve_kernels.triton_kernels.rows import (
    Choices,
    Cuts,
    Row,
    Rows,
    empty_choices,
    no_cuts,
    pack_rows,
)
from specserve_kernels.triton_kernels.sampling import TILE, is_kept, weights_of

_FEW_TILES = 64  # one binary for vocabularies up to 2^18


@triton.jit
def share_kernel(
    logits_ptr,  # [L, row_stride] f32, bf16 or fp16
    row_stride, num_tokens,
    seeds_ptr, positions_ptr, temperatures_ptr, sharpness_ptr, cut_weights_ptr, cut_last_ids_ptr,
    choices_ptr, bests_ptr,
    sums_ptr,  # [L, tiles] f32, out
    TILE: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    choice = tl.load(choices_ptr + row)
    if choice < 0:
        return
    x = tl.load(
        logits_ptr + row.to(tl.int64) * row_stride + ids,
        mask=ids < num_tokens,
        other=float("-inf"),
    ).to(tl.float32)
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0.0:
        weights = weights_of(x, tl.load(bests_ptr + row), temperature)
        kept = is_kept(
            weights, ids, tl.load(cut_weights_ptr + row), tl.load(cut_last_ids_ptr + row)
        )
        key_0, key_1 = load_key(seeds_ptr, row)
        cells = tile_cells(tile * TILE, tl.load(positions_ptr + row), 0, key_0, key_1, TILE)
        # A cell is narrow, but for the first: its low end is its likely end.
        scores = weights * tl.load(sharpness_ptr + row) + gumbel_at(cells + 1)
        scores = tl.where(kept, scores, float("-inf"))
    else:
        scores = x - tl.load(bests_ptr + row)
    others = tl.where((ids == choice) | (scores == float("-inf")), 0.0, tl.exp(scores))
    tl.store(sums_ptr + row * tl.num_programs(1) + tile, tl.sum(others, 0))


@triton.jit(do_not_specialize=["num_tiles"])
def score_kernel(
    logits_ptr, row_stride, num_tiles,
    seeds_ptr, positions_ptr, temperatures_ptr, sharpness_ptr, choices_ptr, bests_ptr, sums_ptr,
    shares_ptr,  # [L] f32, out
    MAX_TILES: tl.constexpr,
):  # fmt: skip
    row, tiles = tl.program_id(0), tl.arange(0, MAX_TILES)
    choice = tl.load(choices_ptr + row)
    share = tl.full((), 0.0, tl.float32)
    if choice >= 0:
        others = tl.sum(
            tl.load(sums_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=0.0), 0
        )
        ids = choice + tl.zeros((1,), tl.int32)
        x = tl.load(logits_ptr + row.to(tl.int64) * row_stride + ids).to(tl.float32)
        best, temperature = tl.load(bests_ptr + row), tl.load(temperatures_ptr + row)
        score = (x - best).to(tl.float64)
        if temperature > 0.0:
            key_0, key_1 = load_key(seeds_ptr, row)
            position = tl.load(positions_ptr + row)
            cells = cells_of(ids, position, 0, key_0, key_1)
            noise = gumbel_of(uniforms_of(ids, cells, position, 0, key_0, key_1))
            sharpened = weights_of(x, best, temperature) * tl.load(sharpness_ptr + row)
            score = sharpened.to(tl.float64) + noise
        own = tl.sum(tl.exp(score), 0)
        share = (own / (own + others)).to(tl.float32)
    tl.store(shares_ptr + row, share)


def make_sums(
    num_rows: int, vocab_size: int, device: torch.device | str = "cpu", *, tile: int = TILE
) -> Tensor:
    """Scratch for up to num_rows rows."""
    return torch.empty(num_rows, triton.cdiv(vocab_size, tile), device=device)


def shares_of(
    logits: Tensor,
    rows: Rows,
    cuts: Cuts,
    choices: Choices,
    sums: Tensor,
    shares: Tensor,
    *,
    vocab_size: int,
    tile: int = TILE,
) -> None:
    """Fill `shares` [L] f32 with numbers in [0, 1]; 0 where nothing could be chosen.

    logits to choices: as they were given to and came from sampling.choose_tokens
    tile:              as make_sums was told
    """
    num_rows, num_tiles = logits.shape[0], sums.shape[1]
    share_kernel[(num_rows, num_tiles)](
        *(logits, logits.stride(0), vocab_size, *rows[:4], *cuts[1:], *choices, sums),
        TILE=tile,
        num_warps=8,
        enable_fp_fusion=False,
    )
    score_kernel[(num_rows,)](
        *(logits, logits.stride(0), num_tiles, *rows[:4], *choices, sums, shares),
        MAX_TILES=max(_FEW_TILES, triton.next_power_of_2(num_tiles)),
        num_warps=1,
        enable_fp_fusion=False,
    )


def aot_cases(shape: ModelShape) -> Iterator[Case]:
    rows, sums = pack_rows([Row()] * 5), make_sums(5, shape.vocab_size)
    arguments = rows, no_cuts(5), empty_choices(5), sums, torch.empty(5)
    logits = torch.empty(5, shape.vocab_size, dtype=torch.bfloat16)
    yield Case("bf16", partial(shares_of, logits, *arguments, vocab_size=shape.vocab_size))

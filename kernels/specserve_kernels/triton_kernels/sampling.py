"""One token per row of logits, with common noise: the [L, V] logits are read once.

    race    (L, tiles)  reads a tile: its best logit, and which of its tokens could win the race
                        argmax(weight + Gumbel noise), by the bounds that 16 random bits give
    decide  (L,)        the row's best logit over all tiles; the exact scores, in fp64, of the few
                        tokens left; the winner

The token is that of specserve.sampler.choose_row to the bit: weights are fp32 (x - best) / T. A
tile knows only its own best, so it keeps whoever is within SLACK of winning and `decide` settles
it. Nothing that a row computes depends on another row.

Rows with top-k, top-p or min-p are given a cut first (cuts.py), rows with penalties or biases edit
their few tokens first (edits.py): an edited token is -inf in the logits and runs from the list.
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
from specserve_kernels.triton_kernels.noise import (
    SLACK,
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
    Edited,
    Row,
    Rows,
    empty_choices,
    no_cuts,
    pack_edits,
    pack_rows,
)

TILE = 4096  # tokens of a program of `race`
NUM_SLOTS = 32  # tokens of a tile that could win; where there are more the tile is read again


class Tiles(NamedTuple):
    """What `race` tells `decide` of each of C tiles of L rows.

    bests: [L, C] f32 largest logit, NaN if there is one; first_ids: [L, C] int32 where it is first
    lows, highs: [L, C] f32 the best certain and the best possible score, relative to `bests`
    counts: [L, C] int32 tokens that could win; slots: [L, C, n] int32 the first n of them
    """

    bests: Tensor
    first_ids: Tensor
    lows: Tensor
    highs: Tensor
    counts: Tensor
    slots: Tensor


@triton.jit
def weights_of(logits, best, temperature):
    """[n] fp32 distances to the best logit over the temperature, rounded as the CPU rounds."""
    return tl.div_rn(logits - best, tl.zeros_like(logits) + temperature)


@triton.jit
def is_kept(weights, ids, cut_weight, cut_last_id):
    return (weights > cut_weight) | ((weights == cut_weight) & (ids <= cut_last_id))


@triton.jit
def race_kernel(
    logits_ptr,  # [L, row_stride] f32, bf16 or fp16
    row_stride,
    num_tokens,  # V without padding ids
    seeds_ptr, positions_ptr, temperatures_ptr, sharpness_ptr,
    cut_bests_ptr, cut_weights_ptr, cut_last_ids_ptr,
    tile_bests_ptr, tile_first_ids_ptr, tile_lows_ptr, tile_highs_ptr, tile_counts_ptr,
    tile_slots_ptr,
    PURPOSE: tl.constexpr, TILE: tl.constexpr, NUM_SLOTS: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0), tl.program_id(1)
    ids = tile * TILE + tl.arange(0, TILE)
    x = tl.load(
        logits_ptr + row.to(tl.int64) * row_stride + ids,
        mask=ids < num_tokens,
        other=float("-inf"),
    ).to(tl.float32)
    out = row * tl.num_programs(1) + tile
    temperature = tl.load(temperatures_ptr + row)
    cut_weight = tl.load(cut_weights_ptr + row)
    num_nan = tl.sum((x != x).to(tl.int32), 0)
    x = tl.where(x != x, float("-inf"), x)
    best = tl.max(x, 0)
    tl.store(tile_bests_ptr + out, tl.where(num_nan > 0, float("nan"), best))
    tl.store(tile_first_ids_ptr + out, tl.min(tl.where(x == best, ids, 0x7FFFFFFF), 0))
    if temperature <= 0.0:
        return
    if cut_weight > float("-inf"):
        weights = weights_of(x, tl.load(cut_bests_ptr + row), temperature)
        kept = is_kept(weights, ids, cut_weight, tl.load(cut_last_ids_ptr + row))
        x = tl.where(kept, x, float("-inf"))
    key_0, key_1 = load_key(seeds_ptr, row)
    cells = tile_cells(tile * TILE, tl.load(positions_ptr + row), PURPOSE, key_0, key_1, TILE)
    scale = tl.load(sharpness_ptr + row) / temperature
    gaps = (x - tl.where(tl.abs(best) == float("inf"), 0.0, best)) * scale
    lowest = tl.max(tl.where(x > float("-inf"), gaps + gumbel_at(cells + 1), float("-inf")), 0)
    highest = tl.where(x > float("-inf"), gaps + gumbel_at(cells), float("-inf"))
    runs = (highest >= lowest - SLACK) & (x > float("-inf"))
    places = tl.cumsum(runs.to(tl.int32), 0) - 1
    slots = tile_slots_ptr + out.to(tl.int64) * NUM_SLOTS
    tl.store(slots + places, ids, mask=runs & (places < NUM_SLOTS))
    tl.store(tile_lows_ptr + out, lowest)
    tl.store(tile_highs_ptr + out, tl.max(highest, 0))
    tl.store(tile_counts_ptr + out, tl.sum(runs.to(tl.int32), 0))


@triton.jit
def _better(x, ids, runs, best, temperature, sharpness, cut_weight, cut_last_id, position, key_0,
            key_1, winner, top_score, PURPOSE: tl.constexpr):  # fmt: skip
    """(winner, its score) after tokens ids [n] with logits x [n] have run as well."""
    weights = weights_of(x, best, temperature)
    runs = runs & is_kept(weights, ids, cut_weight, cut_last_id)
    cells = cells_of(ids, position, PURPOSE, key_0, key_1)
    sharpened = weights * sharpness
    highest = tl.where(runs, sharpened + gumbel_at(cells), float("-inf"))
    if tl.max(highest, 0).to(tl.float64) >= top_score - SLACK:
        noise = gumbel_of(uniforms_of(ids, cells, position, PURPOSE, key_0, key_1))
        scores = tl.where(runs, sharpened.to(tl.float64) + noise, float("-inf"))
        score = tl.max(scores, 0)
        first = tl.min(tl.where(scores == score, ids, 0x7FFFFFFF), 0)
        if (score > top_score) | ((score == top_score) & (first < winner)):
            winner, top_score = first, score
    return winner, top_score


@triton.jit
def _best_edited(best, winner, num_nan, edit_ids_ptr, edit_values_ptr, first, end,
                 BLOCK: tl.constexpr):  # fmt: skip
    """(best logit, its first token, NaNs seen) once the edited tokens are looked at as well."""
    for start in range(first, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        ids = tl.load(edit_ids_ptr + entry, mask=entry < end, other=0x7FFFFFFF)
        x = tl.load(edit_values_ptr + entry, mask=entry < end, other=float("-inf"))
        num_nan += tl.sum((x != x).to(tl.int32), 0)
        x = tl.where(x != x, float("-inf"), x)
        value = tl.max(x, 0)
        first_id = tl.min(tl.where(x == value, ids, 0x7FFFFFFF), 0)
        if (value > best) | ((value == best) & (first_id < winner)):
            best, winner = value, first_id
    return best, winner, num_nan


@triton.jit
def _race_tile(row_ptr, num_tokens, slots_ptr, count, tile, best, temperature, sharpness,
               cut_weight, cut_last_id, position, key_0, key_1, winner, top_score,
               PURPOSE: tl.constexpr, TILE: tl.constexpr, NUM_SLOTS: tl.constexpr):  # fmt: skip
    """(winner, its score) after the tokens in a tile's slots, or all of it if they overflowed."""
    slot = tl.arange(0, NUM_SLOTS)
    for start in range(0, tl.where(count > NUM_SLOTS, TILE, NUM_SLOTS), NUM_SLOTS):
        in_slots = (slot < count) & (count <= NUM_SLOTS)
        ids = tl.load(slots_ptr + slot, mask=in_slots, other=0)
        ids = tl.where(count > NUM_SLOTS, tile * TILE + start + slot, ids)
        runs = in_slots | ((count > NUM_SLOTS) & (ids < num_tokens))
        x = tl.load(row_ptr + ids, mask=runs, other=float("-inf")).to(tl.float32)
        winner, top_score = _better(
            x, ids, runs, best, temperature, sharpness, cut_weight, cut_last_id, position, key_0,
            key_1, winner, top_score, PURPOSE,
        )  # fmt: skip
    return winner, top_score


@triton.jit
def _race_row(row, logits_ptr, row_stride, num_tokens, seeds_ptr, positions_ptr, temperature,
              sharpness, cut_weight, cut_last_id, edit_ids_ptr, edit_values_ptr, first_edit,
              end_edit, best, tile_bests, lows, highs, tile_counts_ptr, tile_slots_ptr, num_tiles,
              PURPOSE: tl.constexpr, TILE: tl.constexpr, NUM_SLOTS: tl.constexpr,
              MAX_TILES: tl.constexpr):  # fmt: skip
    """The winner among those that the tiles let through and the edited tokens."""
    tiles, slot = tl.arange(0, MAX_TILES), tl.arange(0, NUM_SLOTS)
    position = tl.load(positions_ptr + row)
    key_0, key_1 = load_key(seeds_ptr, row)
    behind = (tile_bests - best) * (sharpness / temperature)
    runs = (behind + highs >= tl.max(behind + lows, 0) - SLACK) & (highs > float("-inf"))
    winner, top_score = 0x7FFFFFFF, tl.full((), float("-inf"), tl.float64)
    tile = tl.min(tl.where(runs, tiles, MAX_TILES), 0)
    while tile < MAX_TILES:
        at = row * num_tiles + tile
        winner, top_score = _race_tile(
            logits_ptr + row.to(tl.int64) * row_stride, num_tokens,
            tile_slots_ptr + at.to(tl.int64) * NUM_SLOTS, tl.load(tile_counts_ptr + at), tile,
            best, temperature, sharpness, cut_weight, cut_last_id, position, key_0, key_1, winner,
            top_score, PURPOSE, TILE, NUM_SLOTS,
        )  # fmt: skip
        tile = tl.min(tl.where(runs & (tiles > tile), tiles, MAX_TILES), 0)
    for start in range(first_edit, end_edit, NUM_SLOTS):
        there = start + slot < end_edit
        ids = tl.load(edit_ids_ptr + start + slot, mask=there, other=0)
        x = tl.load(edit_values_ptr + start + slot, mask=there, other=float("-inf"))
        winner, top_score = _better(
            x, ids, there, best, temperature, sharpness, cut_weight, cut_last_id, position, key_0,
            key_1, winner, top_score, PURPOSE,
        )  # fmt: skip
    return winner


@triton.jit
def decide_kernel(
    logits_ptr, row_stride, num_tokens,
    seeds_ptr, positions_ptr, temperatures_ptr, sharpness_ptr,
    cut_weights_ptr, cut_last_ids_ptr,
    edit_starts_ptr, edit_ids_ptr, edit_values_ptr,
    tile_bests_ptr, tile_first_ids_ptr, tile_lows_ptr, tile_highs_ptr, tile_counts_ptr,
    tile_slots_ptr,
    token_ids_ptr, bests_ptr,  # [L], out
    num_tiles,
    PURPOSE: tl.constexpr, TILE: tl.constexpr, NUM_SLOTS: tl.constexpr, MAX_TILES: tl.constexpr,
):  # fmt: skip
    row, tiles = tl.program_id(0), tl.arange(0, MAX_TILES)
    at, there = row * num_tiles + tiles, tiles < num_tiles
    tile_bests = tl.load(tile_bests_ptr + at, mask=there, other=float("-inf"))
    first_ids = tl.load(tile_first_ids_ptr + at, mask=there, other=0x7FFFFFFF)
    num_nan = tl.sum((tile_bests != tile_bests).to(tl.int32), 0)
    tile_bests = tl.where(tile_bests != tile_bests, float("-inf"), tile_bests)
    best = tl.max(tile_bests, 0)
    winner = tl.min(tl.where(tile_bests == best, first_ids, 0x7FFFFFFF), 0)
    first_edit, end_edit = tl.load(edit_starts_ptr + row), tl.load(edit_starts_ptr + row + 1)
    best, winner, num_nan = _best_edited(
        best, winner, num_nan, edit_ids_ptr, edit_values_ptr, first_edit, end_edit, NUM_SLOTS
    )
    best = tl.where(num_nan > 0, float("nan"), best)
    tl.store(bests_ptr + row, best)
    temperature = tl.load(temperatures_ptr + row)
    if (best != best) | (tl.abs(best) == float("inf")):
        winner = -1
    elif temperature > 0.0:
        winner = _race_row(
            row, logits_ptr, row_stride, num_tokens, seeds_ptr, positions_ptr, temperature,
            tl.load(sharpness_ptr + row), tl.load(cut_weights_ptr + row),
            tl.load(cut_last_ids_ptr + row), edit_ids_ptr, edit_values_ptr, first_edit, end_edit,
            best, tile_bests, tl.load(tile_lows_ptr + at, mask=there, other=float("-inf")),
            tl.load(tile_highs_ptr + at, mask=there, other=float("-inf")), tile_counts_ptr,
            tile_slots_ptr, num_tiles, PURPOSE, TILE, NUM_SLOTS, MAX_TILES,
        )  # fmt: skip
    tl.store(token_ids_ptr + row, winner)


def make_tiles(
    num_rows: int,
    vocab_size: int,
    device: torch.device | str = "cpu",
    *,
    tile: int = TILE,
    num_slots: int = NUM_SLOTS,
) -> Tiles:
    """Scratch for `race` and `decide`, for up to num_rows rows."""
    shape = num_rows, triton.cdiv(vocab_size, tile)
    floats = [torch.empty(shape, dtype=torch.float32, device=device) for _ in range(3)]
    ints = [torch.empty(shape, dtype=torch.int32, device=device) for _ in range(2)]
    slots = torch.empty((*shape, num_slots), dtype=torch.int32, device=device)
    return Tiles(floats[0], ints[0], floats[1], floats[2], ints[1], slots)


def choose_tokens(
    logits: Tensor,
    rows: Rows,
    cuts: Cuts,
    edited: Edited,
    tiles: Tiles,
    choices: Choices,
    *,
    vocab_size: int,
    purpose: int = 0,
    tile: int = TILE,
) -> None:
    """Fill `choices` with the token of every row.

    logits:  [L, >= vocab_size] f32, bf16 or fp16, rows contiguous; -inf where `edited` has a token
    tile:    tokens of a program, a power of two; as make_tiles was told
    purpose: the noise stream, specserve.noise.Purpose
    """
    num_rows, num_tiles, num_slots = logits.shape[0], *tiles.slots.shape[1:]
    common = (logits, logits.stride(0), vocab_size, *rows[:4])
    race_kernel[(num_rows, num_tiles)](
        *common, *cuts, *tiles,
        PURPOSE=purpose, TILE=tile, NUM_SLOTS=num_slots, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    decide_kernel[(num_rows,)](
        *common, *cuts[1:], *edited, *tiles, *choices, num_tiles,
        PURPOSE=purpose, TILE=tile, NUM_SLOTS=num_slots,
        MAX_TILES=triton.next_power_of_2(num_tiles), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip


def aot_cases(shape: ModelShape) -> Iterator[Case]:
    rows = [Row()] * 5
    edits = pack_edits(rows)
    edited = Edited(edits.starts, edits.ids, edits.biases)
    tiles, choices = make_tiles(5, shape.vocab_size), empty_choices(5)
    for dtype in (torch.bfloat16, torch.float32):
        arguments = torch.empty(5, shape.vocab_size, dtype=dtype), pack_rows(rows), no_cuts(5)
        yield Case(
            str(dtype).removeprefix("torch."),
            partial(choose_tokens, *arguments, edited, tiles, choices, vocab_size=shape.vocab_size),
        )

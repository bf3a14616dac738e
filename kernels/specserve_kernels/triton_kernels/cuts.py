"""Top-k, top-p and min-p of a row as one cut: tokens above a weight stay, and of its equals the
lowest ids. The big array is not copied, masked or sorted.

    best logit                       1 read of the row
    tokens near the best, listed     1 read; the mass of all is added up on the way
    smallest (weight, id) that holds enough tokens (top-k) or mass (top-p), by halving, over the
    list; over the row itself where the list is too short or too long

Masses are whole numbers (specserve.sampler.pipeline), counts are too: a sum does not depend on an
order, so the cut is that of the CPU exactly. One program per row, and none but a row with a filter
reads anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.triton_kernels.model_shapes import Case, ModelShape
from specserve_kernels.triton_kernels.registers import all_registers
from specserve_kernels.triton_kernels.rows import (
    Cuts,
    Edited,
    Row,
    Rows,
    no_cuts,
    pack_edits,
    pack_rows,
)
from specserve_kernels.triton_kernels.sampling import weights_of

CAPACITY = 8192  # of a row's list
NEAR: Final = tl.constexpr(-16.0)  # a weight from here on is listed
_LARGEST_KEY: Final = tl.constexpr(0x7F7FFFFF)  # of a finite weight
_ALL_IDS: Final = tl.constexpr(0x7FFFFFFF)
_TO_WHOLE_F32: Final = tl.constexpr(1.5 * 2**23)  # adding it rounds to a whole number
_TO_WHOLE_F64: Final = tl.constexpr(1.5 * 2**52)


class Lists(NamedTuple):
    """Scratch: weights [L, CAPACITY] f32 and ids [L, CAPACITY] int32 of tokens near the best."""

    weights: Tensor
    ids: Tensor


@triton.jit
def masses_of(weights):
    """[n] fp32 weights <= 0 -> their exp in 2^-40, int64; as pipeline.masses, step by step."""
    r = tl.where(weights < -40.0, -40.0, weights)
    n = r * 1.44269504
    n = n + _TO_WHOLE_F32
    n = n - _TO_WHOLE_F32
    r = r - n * 0.693359375
    r = r - n * -2.12194440e-4
    p = r * 0.00138148281
    p = (p + 0.00836878456) * r
    p = (p + 0.0416683853) * r
    p = (p + 0.166665196) * r
    p = (p + 0.49999994) * r
    p = p * r
    p = p + r
    p = p + 1.0
    power = ((n.to(tl.int32) + 167) << 23).to(tl.float32, bitcast=True)  # 2^(n + 40)
    wide = (p * power).to(tl.float64)
    return ((wide + _TO_WHOLE_F64) - _TO_WHOLE_F64).to(tl.int64)


@triton.jit
def tokens_of(row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit, num_edits, items):
    """(logits, ids) of items: the row's tokens, then its edited ones; -inf where there is none."""
    dense = items < num_tokens
    edited = (items >= num_tokens) & (items < num_tokens + num_edits)
    entry = first_edit + items - num_tokens
    x = tl.load(row_ptr + items, mask=dense, other=float("-inf")).to(tl.float32)
    x = tl.where(edited, tl.load(edit_values_ptr + entry, mask=edited, other=0.0), x)
    ids = tl.where(edited, tl.load(edit_ids_ptr + entry, mask=edited, other=0), items)
    return tl.where(x != x, float("-inf"), x), ids


@triton.jit
def _held(row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit, num_edits, best,
          temperature, list_weights_ptr, list_ids_ptr, num_listed, in_list, key, last_id,
          within_key, within_id, by_mass, CHUNK: tl.constexpr):  # fmt: skip
    """How many tokens, or how much mass, come up to (key, last_id) and (within_key, within_id)."""
    total = tl.full((), 0, tl.int64)
    num_items = num_tokens + num_edits
    if in_list:
        num_items = num_listed
    for start in range(0, num_items, CHUNK):
        items = start + tl.arange(0, CHUNK)
        if in_list:
            there = items < num_listed
            weights = tl.load(list_weights_ptr + items, mask=there, other=float("-inf"))
            ids = tl.load(list_ids_ptr + items, mask=there, other=0)
        else:
            x, ids = tokens_of(row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit,
                             num_edits, items)  # fmt: skip
            weights = weights_of(x, best, temperature)
        keys = tl.abs(weights).to(tl.int32, bitcast=True)  # rises as the weight falls
        held = (keys < key) | ((keys == key) & (ids <= last_id))
        held = held & ((keys < within_key) | ((keys == within_key) & (ids <= within_id)))
        if by_mass:
            total += tl.sum(tl.where(held, masses_of(weights), 0), 0)
        else:
            total += tl.sum(held.to(tl.int64), 0)
    return total


@triton.jit
def _smallest(row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit, num_edits, best,
              temperature, list_weights_ptr, list_ids_ptr, num_listed, in_list, enough,
              within_key, within_id, by_mass, CHUNK: tl.constexpr):  # fmt: skip
    """The first (key, last_id) in order that holds enough, of what `within` leaves."""
    low, high = 0, within_key
    while low < high:
        middle = low + (high - low) // 2
        held = _held(row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit, num_edits,
                     best, temperature, list_weights_ptr, list_ids_ptr, num_listed, in_list,
                     middle, _ALL_IDS, within_key, within_id, by_mass, CHUNK)  # fmt: skip
        if held >= enough:
            high = middle
        else:
            low = middle + 1
    key = low
    equals = _held(row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit, num_edits, best,
                   temperature, list_weights_ptr, list_ids_ptr, num_listed, in_list,
                   key, _ALL_IDS, within_key, within_id, False, CHUNK)  # fmt: skip
    better = _held(row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit, num_edits, best,
                   temperature, list_weights_ptr, list_ids_ptr, num_listed, in_list,
                   key, -1, within_key, within_id, False, CHUNK)  # fmt: skip
    low, high = _ALL_IDS, _ALL_IDS
    if key == within_key:
        low, high = within_id, within_id
    if equals - better > 1:
        low, high = 0, num_tokens - 1
    while low < high:
        middle = low + (high - low) // 2
        held = _held(row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit, num_edits,
                     best, temperature, list_weights_ptr, list_ids_ptr, num_listed, in_list,
                     key, middle, within_key, within_id, by_mass, CHUNK)  # fmt: skip
        if held >= enough:
            high = middle
        else:
            low = middle + 1
    return key, low


@triton.jit
def _best(row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit, num_edits,
          CHUNK: tl.constexpr):  # fmt: skip
    best = tl.full((), float("-inf"), tl.float32)
    for start in range(0, num_tokens + num_edits, CHUNK):
        x, _ids = tokens_of(row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit,
                          num_edits, start + tl.arange(0, CHUNK))  # fmt: skip
        best = tl.maximum(best, tl.max(x, 0))
    return best


@triton.jit
def _list_near(row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit, num_edits, best,
               temperature, list_weights_ptr, list_ids_ptr, CHUNK: tl.constexpr,
               CAPACITY: tl.constexpr):  # fmt: skip
    """List tokens near the best; returns (how many, how many are possible, all mass, theirs)."""
    num_listed, num_possible = 0, 0
    mass, listed_mass = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    for start in range(0, num_tokens + num_edits, CHUNK):
        x, ids = tokens_of(row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit,
                         num_edits, start + tl.arange(0, CHUNK))  # fmt: skip
        weights = weights_of(x, best, temperature)
        near = weights >= NEAR
        places = num_listed + tl.cumsum(near.to(tl.int32), 0) - 1
        fits = near & (places < CAPACITY)
        tl.store(list_weights_ptr + places, weights, mask=fits)
        tl.store(list_ids_ptr + places, ids, mask=fits)
        num_listed += tl.sum(near.to(tl.int32), 0)
        num_possible += tl.sum((weights > float("-inf")).to(tl.int32), 0)
        each = masses_of(weights)
        mass += tl.sum(each, 0)
        listed_mass += tl.sum(tl.where(near, each, 0), 0)
    tl.debug_barrier()  # the list is read by other threads than wrote it
    return num_listed, num_possible, mass, listed_mass


@triton.jit
def _enough(top_p, mass):
    """The mass that a nucleus must hold; rounding may ask for more than there is."""
    wanted = tl.ceil(top_p * mass.to(tl.float64))
    enough = mass
    if wanted < mass.to(tl.float64):
        enough = tl.maximum(wanted.to(tl.int64), 1)
    return enough


@triton.jit
def _top(row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit, num_edits, best,
         temperature, list_weights_ptr, list_ids_ptr, top_k, top_p, CHUNK: tl.constexpr,
         CAPACITY: tl.constexpr):  # fmt: skip
    """(key, last_id) of top-k, then top-p."""
    key, last_id = tl.full((), _LARGEST_KEY, tl.int32), tl.full((), _ALL_IDS, tl.int32)
    num_listed, num_possible, mass, listed_mass = _list_near(
        row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit, num_edits, best,
        temperature, list_weights_ptr, list_ids_ptr, CHUNK, CAPACITY,
    )  # fmt: skip
    fits = num_listed <= CAPACITY
    if (top_k > 0) & (top_k < num_possible):
        in_list = fits & (num_listed >= top_k)
        key, last_id = _smallest(
            row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit, num_edits, best,
            temperature, list_weights_ptr, list_ids_ptr, num_listed, in_list, top_k, key, last_id,
            False, CHUNK,
        )  # fmt: skip
        mass = _held(
            row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit, num_edits, best,
            temperature, list_weights_ptr, list_ids_ptr, num_listed, in_list, key, last_id, key,
            last_id, True, CHUNK,
        )  # fmt: skip
        listed_mass = tl.where(in_list, mass, 0)
    if top_p < 1.0:
        enough = _enough(top_p, mass)
        key, last_id = _smallest(
            row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit, num_edits, best,
            temperature, list_weights_ptr, list_ids_ptr, num_listed,
            fits & (listed_mass >= enough), enough, key, last_id, True, CHUNK,
        )  # fmt: skip
    return key, last_id


@triton.jit
def cut_kernel(
    logits_ptr, row_stride, num_tokens,
    temperatures_ptr, top_ks_ptr, top_ps_ptr, min_weights_ptr,
    edit_starts_ptr, edit_ids_ptr, edit_values_ptr,
    list_weights_ptr, list_ids_ptr,  # [L, CAPACITY]
    bests_ptr, cut_weights_ptr, cut_last_ids_ptr,  # [L], out
    CHUNK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    temperature, top_k = tl.load(temperatures_ptr + row), tl.load(top_ks_ptr + row)
    top_p, min_weight = tl.load(top_ps_ptr + row), tl.load(min_weights_ptr + row)
    tl.store(cut_weights_ptr + row, float("-inf"))
    tl.store(cut_last_ids_ptr + row, _ALL_IDS)
    filtered = (top_k > 0) | (top_p < 1.0) | (min_weight > float("-inf"))
    if (temperature <= 0.0) | (filtered == 0):
        return
    first_edit = tl.load(edit_starts_ptr + row)
    num_edits = tl.load(edit_starts_ptr + row + 1) - first_edit
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    best = _best(row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit, num_edits, CHUNK)
    tl.store(bests_ptr + row, best)
    if tl.abs(best) == float("inf"):
        return
    key, last_id = tl.full((), _LARGEST_KEY, tl.int32), tl.full((), _ALL_IDS, tl.int32)
    if (top_k > 0) | (top_p < 1.0):
        at = row.to(tl.int64) * CAPACITY
        key, last_id = _top(
            row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit, num_edits, best,
            temperature, list_weights_ptr + at, list_ids_ptr + at, top_k, top_p, CHUNK, CAPACITY,
        )  # fmt: skip
    cut = -key.to(tl.float32, bitcast=True)
    if min_weight > cut:
        cut, last_id = min_weight, _ALL_IDS
    tl.store(cut_weights_ptr + row, cut)
    tl.store(cut_last_ids_ptr + row, last_id)


def make_lists(
    num_rows: int, device: torch.device | str = "cpu", capacity: int = CAPACITY
) -> Lists:
    """Scratch for up to num_rows rows."""
    shape = num_rows, capacity
    return Lists(
        torch.empty(shape, device=device), torch.empty(shape, dtype=torch.int32, device=device)
    )


def find_cuts(
    logits: Tensor,
    rows: Rows,
    edited: Edited,
    lists: Lists,
    cuts: Cuts,
    *,
    vocab_size: int,
    chunk: int = 2048,
) -> None:
    """Fill `cuts` for every row of [L, >= vocab_size] logits; see choose_tokens for arguments."""
    cut_kernel[(logits.shape[0],)](
        logits, logits.stride(0), vocab_size, rows.temperatures, *rows[4:], *edited, *lists, *cuts,
        CHUNK=chunk, CAPACITY=lists.ids.shape[1], num_warps=8, enable_fp_fusion=False,
        **all_registers(),
    )  # fmt: skip


def aot_cases(shape: ModelShape) -> Iterator[Case]:
    rows = [Row()] * 5
    edits = pack_edits(rows)
    edited = Edited(edits.starts, edits.ids, edits.biases)
    for dtype in (torch.bfloat16, torch.float32):
        arguments = torch.empty(5, shape.vocab_size, dtype=dtype), pack_rows(rows), edited
        yield Case(
            str(dtype).removeprefix("torch."),
            partial(find_cuts, *arguments, make_lists(5), no_cuts(5), vocab_size=shape.vocab_size),
        )

"""The rules `rejection` and `block` for chains: guesses accepted by a test, in four small steps.

    law     (L,)  what a row's probabilities add up to, and those of the guess after it
    left    (L,)  the mass of max(w p - q, 0), w being how well the path to the row agrees
    judge   (B,)  the coins (judging.py): how many guesses pass, and which row comes after them
    last    (B,)  after a failed test, argmax(log max(w p - q, 0) + Gumbel noise) of that row

Arithmetic and law are those of specserve.acceptance on a chain, in fp64 as there; its docstring has
the maths. A guess that was given, not drawn, has q = 1 at itself. Rows must have been through
sampling.choose_tokens: its best logits and greedy tokens, cuts and edits are used here, and its
token is the one after a chain of which all is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.triton_kernels.cuts import tokens_of
from specserve_kernels.triton_kernels.judging import accept_weight, is_drawn, judge_kernel
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
from specserve_kernels.triton_kernels.sampling import is_kept, weights_of

CHUNK = 2048
_NEGLIGIBLE: Final = tl.constexpr(1e-8)  # p and q differ by rounding only when so little is left
_RESIDUAL: Final = tl.constexpr(3)  # the noise stream, as specserve.noise.Purpose numbers it


class Chains(NamedTuple):
    """The drafts of B sequences, each a chain, by their L rows of logits, on the device.

    starts:  [B+1] int32  sequence b has rows starts[b] .. starts[b+1]-1
    firsts:  [L] int32    the first row of each row's sequence
    guesses: [L] int32    the guess after each row; the last row's is not read
    drawn:   [L] int32    the row of probs that it was drawn from; -1: it was given
    probs:   [R, W] f32   draft laws, rows contiguous
    """

    starts: Tensor
    firsts: Tensor
    guesses: Tensor
    drawn: Tensor
    probs: Tensor


class Judged(NamedTuple):
    """Scratch of L rows and B sequences.

    laws:    [L, 4] f64   sum of exp(weights); that of the guess; q of the guess; mass of q
    left:    [L, 2] f64   mass of what is left; w
    rows:    [B] int32    the row that the last token comes from after a failed test; -1: none
    """

    laws: Tensor
    left: Tensor
    rows: Tensor


@triton.jit
def _likelihoods(x, ids, best, temperature, cut_weight, cut_last_id, choice):
    """[n] fp64 exp(weights) of what the filters leave; greedy: 1 for the choice alone."""
    possible = x > float("-inf")
    likelihoods = (possible & (ids == choice)).to(tl.float64)
    if temperature > 0.0:
        weights = weights_of(x, best, temperature)
        kept = possible & is_kept(weights, ids, cut_weight, cut_last_id)
        likelihoods = tl.where(kept, tl.exp(weights.to(tl.float64)), 0.0)
    return likelihoods


@triton.jit
def _drawn_from(probs_ptr, drawn, width, ids):
    """[n] fp64 q of tokens ids, not normalised; NaN counts as 0. drawn: a row of probs."""
    at = probs_ptr + drawn.to(tl.int64) * width + ids
    q = tl.load(at, mask=(ids >= 0) & (ids < width), other=0.0).to(tl.float64)
    return tl.where(q > 0.0, q, 0.0)


@triton.jit
def _load_row(row, logits_ptr, row_stride, temperatures_ptr, cut_weights_ptr, cut_last_ids_ptr,
              edit_starts_ptr, bests_ptr):  # fmt: skip
    """Where a row's logits and edits are, and what its law follows from besides."""
    first_edit = tl.load(edit_starts_ptr + row)
    num_edits = tl.load(edit_starts_ptr + row + 1) - first_edit
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    best, temperature = tl.load(bests_ptr + row), tl.load(temperatures_ptr + row)
    cut_weight, cut_last_id = tl.load(cut_weights_ptr + row), tl.load(cut_last_ids_ptr + row)
    return row_ptr, first_edit, num_edits, best, temperature, cut_weight, cut_last_id


@triton.jit
def law_kernel(
    logits_ptr, row_stride, num_tokens, temperatures_ptr, cut_weights_ptr, cut_last_ids_ptr,
    edit_starts_ptr, edit_ids_ptr, edit_values_ptr, choices_ptr, bests_ptr,
    guesses_ptr, drawn_ptr, probs_ptr, width,
    laws_ptr,  # [L, 4], out
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    choice, guess = tl.load(choices_ptr + row), tl.load(guesses_ptr + row)
    if choice < 0:
        return
    row_ptr, first_edit, num_edits, best, temperature, cut_weight, cut_last_id = _load_row(
        row, logits_ptr, row_stride, temperatures_ptr, cut_weights_ptr, cut_last_ids_ptr,
        edit_starts_ptr, bests_ptr,
    )  # fmt: skip
    total, of_guess = tl.full((), 0, tl.float64), tl.full((), 0, tl.float64)
    for start in range(0, num_tokens + num_edits, CHUNK):
        x, ids = tokens_of(row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit,
                           num_edits, start + tl.arange(0, CHUNK))  # fmt: skip
        each = _likelihoods(x, ids, best, temperature, cut_weight, cut_last_id, choice)
        total += tl.sum(each, 0)
        of_guess += tl.sum(tl.where(ids == guess, each, 0.0), 0)
    drawn = tl.load(drawn_ptr + row)
    mass, q_of_guess = tl.full((), 0, tl.float64), tl.full((), 0, tl.float64)
    if drawn >= 0:
        for start in range(0, width, CHUNK):
            ids = start + tl.arange(0, CHUNK)
            q = _drawn_from(probs_ptr, drawn, width, ids)
            mass += tl.sum(q, 0)
            q_of_guess += tl.sum(tl.where(ids == guess, q, 0.0), 0)
    tl.store(laws_ptr + 4 * row, total)
    tl.store(laws_ptr + 4 * row + 1, of_guess)
    tl.store(laws_ptr + 4 * row + 2, q_of_guess)
    tl.store(laws_ptr + 4 * row + 3, mass)


@triton.jit
def _left(likelihoods, ids, total, weight, guess, drawn, probs_ptr, width, mass):
    """[n] fp64 max(w p - q, 0); drawn: -1 where the guess was given."""
    left = weight * (likelihoods / total)
    if drawn >= 0:
        left = left - _drawn_from(probs_ptr, drawn, width, ids) / mass
        left = tl.where(left > 0.0, left, 0.0)
    else:
        left = tl.where(ids == guess, 0.0, left)
    return left


@triton.jit
def left_kernel(
    logits_ptr, row_stride, num_tokens, temperatures_ptr, cut_weights_ptr, cut_last_ids_ptr,
    edit_starts_ptr, edit_ids_ptr, edit_values_ptr, choices_ptr, bests_ptr,
    firsts_ptr, guesses_ptr, drawn_ptr, probs_ptr, width, laws_ptr,
    left_ptr,  # [L, 2], out
    BLOCK_RULE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    choice, guess = tl.load(choices_ptr + row), tl.load(guesses_ptr + row)
    weight = tl.full((), 1.0, tl.float64)
    if BLOCK_RULE:
        for before in range(tl.load(firsts_ptr + row), row):
            weight = accept_weight(weight, laws_ptr, before)
    if choice < 0:
        return
    row_ptr, first_edit, num_edits, best, temperature, cut_weight, cut_last_id = _load_row(
        row, logits_ptr, row_stride, temperatures_ptr, cut_weights_ptr, cut_last_ids_ptr,
        edit_starts_ptr, bests_ptr,
    )  # fmt: skip
    total, mass = tl.load(laws_ptr + 4 * row), tl.load(laws_ptr + 4 * row + 3)
    drawn = tl.where(is_drawn(laws_ptr, row), tl.load(drawn_ptr + row), -1)
    remaining = tl.full((), 0, tl.float64)
    for start in range(0, num_tokens + num_edits, CHUNK):
        x, ids = tokens_of(row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit,
                           num_edits, start + tl.arange(0, CHUNK))  # fmt: skip
        each = _likelihoods(x, ids, best, temperature, cut_weight, cut_last_id, choice)
        remaining += tl.sum(
            _left(each, ids, total, weight, guess, drawn, probs_ptr, width, mass), 0
        )
    tl.store(left_ptr + 2 * row, remaining)
    tl.store(left_ptr + 2 * row + 1, weight)


@triton.jit
def _leader(left, ids, cells, position, key_0, key_1, winner, top_score):
    """(winner, its score) after tokens ids [n], of which `left` [n] remains, have run as well."""
    weights = tl.where(left > 0.0, tl.log(tl.where(left > 0.0, left, 1.0)), float("-inf"))
    if tl.max(weights + gumbel_at(cells).to(tl.float64), 0) >= top_score - SLACK:
        uniforms = uniforms_of(ids, cells, position, _RESIDUAL, key_0, key_1)
        scores = tl.where(left > 0.0, weights + gumbel_of(uniforms), float("-inf"))
        score = tl.max(scores, 0)
        first = tl.min(tl.where(scores == score, ids, 0x7FFFFFFF), 0)
        if (score > top_score) | ((score == top_score) & (first < winner)):
            winner, top_score = first, score
    return winner, top_score


@triton.jit
def last_kernel(
    logits_ptr, row_stride, num_tokens, temperatures_ptr, cut_weights_ptr, cut_last_ids_ptr,
    edit_starts_ptr, edit_ids_ptr, edit_values_ptr, choices_ptr, bests_ptr,
    seeds_ptr, positions_ptr, guesses_ptr, drawn_ptr, probs_ptr, width, laws_ptr, left_ptr,
    rows_ptr, verdicts_ptr, max_guesses,
    CHUNK: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    row = tl.load(rows_ptr + seq)
    if row < 0:
        return
    row_ptr, first_edit, num_edits, best, temperature, cut_weight, cut_last_id = _load_row(
        row, logits_ptr, row_stride, temperatures_ptr, cut_weights_ptr, cut_last_ids_ptr,
        edit_starts_ptr, bests_ptr,
    )  # fmt: skip
    choice, guess = tl.load(choices_ptr + row), tl.load(guesses_ptr + row)
    total, mass = tl.load(laws_ptr + 4 * row), tl.load(laws_ptr + 4 * row + 3)
    remaining, weight = tl.load(left_ptr + 2 * row), tl.load(left_ptr + 2 * row + 1)
    drawn = tl.where(is_drawn(laws_ptr, row), tl.load(drawn_ptr + row), -1)
    if remaining <= _NEGLIGIBLE * weight:  # p itself: no token is out, and nothing is subtracted
        drawn, guess, weight = -1, -1, tl.full((), 1.0, tl.float64)
    key_0, key_1 = load_key(seeds_ptr, row)
    position = tl.load(positions_ptr + row)
    winner, top_score = 0x7FFFFFFF, tl.full((), float("-inf"), tl.float64)
    for start in range(0, num_tokens + num_edits, CHUNK):
        items = start + tl.arange(0, CHUNK)
        x, ids = tokens_of(row_ptr, num_tokens, edit_ids_ptr, edit_values_ptr, first_edit,
                           num_edits, items)  # fmt: skip
        each = _likelihoods(x, ids, best, temperature, cut_weight, cut_last_id, choice)
        left = _left(each, ids, total, weight, guess, drawn, probs_ptr, width, mass)
        cells = tile_cells(start, position, _RESIDUAL, key_0, key_1, CHUNK)
        if start + CHUNK > num_tokens:
            cells = cells_of(ids, position, _RESIDUAL, key_0, key_1)
        winner, top_score = _leader(left, ids, cells, position, key_0, key_1, winner, top_score)
    num_emitted = tl.load(verdicts_ptr + seq * (2 * max_guesses + 2))
    tl.store(verdicts_ptr + seq * (2 * max_guesses + 2) + num_emitted, winner)


def make_judged(num_rows: int, num_sequences: int, device: torch.device | str = "cpu") -> Judged:
    return Judged(
        torch.empty(num_rows, 4, dtype=torch.float64, device=device),
        torch.empty(num_rows, 2, dtype=torch.float64, device=device),
        torch.empty(num_sequences, dtype=torch.int32, device=device),
    )


def verify_by_test(
    logits: Tensor,
    rows: Rows,
    cuts: Cuts,
    edited: Edited,
    choices: Choices,
    chains: Chains,
    judged: Judged,
    verdicts: Tensor,
    *,
    vocab_size: int,
    block: bool,
    chunk: int = CHUNK,
) -> None:
    """Fill `verdicts` [B, 2K+2] as verification.verify_replay does.

    logits to choices: as they were given to and came from sampling.choose_tokens
    block:             the rule; False: `rejection`
    """
    num_rows, (num_sequences, width) = logits.shape[0], verdicts.shape
    common = (
        *(logits, logits.stride(0), vocab_size, rows.temperatures, *cuts[1:]),
        *(*edited, *choices),
    )
    laws, left, judged_rows = judged
    drafts = chains.guesses, chains.drawn, chains.probs, chains.probs.shape[1]
    options = {"CHUNK": chunk, "num_warps": 8, "enable_fp_fusion": False}
    law_kernel[(num_rows,)](*common, *drafts, laws, **options)
    left_kernel[(num_rows,)](
        *common, chains.firsts, *drafts, laws, left, BLOCK_RULE=block, **options
    )
    judge_kernel[(num_sequences,)](
        *(rows.seeds, rows.positions, choices.token_ids, chains.starts, chains.guesses),
        *(laws, left, judged_rows, verdicts, width // 2 - 1),
        BLOCK_RULE=block,
        MAX_ROWS=triton.next_power_of_2(width // 2),
        num_warps=1,
        enable_fp_fusion=False,
    )
    last_kernel[(num_sequences,)](
        *(*common, rows.seeds, rows.positions, *drafts),
        *(laws, left, judged_rows, verdicts, width // 2 - 1),
        **{**options, "CHUNK": chunk // 2},  # registers: it holds the noise as well
    )


def aot_cases(shape: ModelShape) -> Iterator[Case]:
    rows = [Row()] * 5
    edits, ints = pack_edits(rows), torch.zeros(8, dtype=torch.int32)
    logits = torch.empty(5, shape.vocab_size, dtype=torch.bfloat16)
    chains = Chains(ints, ints, ints, ints, torch.empty(4, shape.vocab_size))
    arguments = (
        *(logits, pack_rows(rows), no_cuts(5), Edited(edits.starts, edits.ids, edits.biases)),
        *(empty_choices(5), chains, make_judged(5, 1), torch.empty(1, 10, dtype=torch.int32)),
    )
    for name, block in (("block", True), ("rejection", False)):
        call = partial(verify_by_test, *arguments, vocab_size=shape.vocab_size, block=block)
        yield Case(name, call)

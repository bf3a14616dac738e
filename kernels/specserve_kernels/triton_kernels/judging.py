"""The coins of rejection.py: from a chain's probabilities to how many of its guesses pass.

All of it is scalars in fp64; see specserve.acceptance for what they mean.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

from specserve_kernels.triton_kernels.noise import accept_uniform, load_key

_ACCEPT: Final = tl.constexpr(2)  # the noise stream, as specserve.noise.Purpose numbers it
_NODE_SHIFT: Final = tl.constexpr(40)  # of a coin's position


@triton.jit
def is_drawn(laws_ptr, row):
    """Whether the guess after a row was drawn; what q calls impossible was given."""
    q, mass = tl.load(laws_ptr + 4 * row + 2), tl.load(laws_ptr + 4 * row + 3)
    return (q > 0.0) & (mass < float("inf"))


@triton.jit
def accept_weight(weight, laws_ptr, row):
    """min(1, weight p(x) / q(x)) of the guess after a row."""
    likelihood = weight * (tl.load(laws_ptr + 4 * row + 1) / tl.load(laws_ptr + 4 * row))
    q = tl.full((), 1.0, tl.float64)
    if is_drawn(laws_ptr, row):
        q = tl.load(laws_ptr + 4 * row + 2) / tl.load(laws_ptr + 4 * row + 3)
    return tl.where(likelihood >= q, 1.0, likelihood / q)


@triton.jit
def _coin(coins, places, place, probability):
    """Whether the coin of a guess, counted from 0, falls below its probability."""
    return tl.sum(tl.where(places == place, coins, 0.0), 0) < probability


@triton.jit
def _num_accepted_up(first, num_guesses, laws_ptr, left_ptr, coins, places):
    """`block`: the longest prefix that passes, leaves first."""
    weight = tl.full((), 1.0, tl.float64)
    for idx in range(num_guesses):
        weight = accept_weight(weight, laws_ptr, first + idx)
    depth = num_guesses
    going = depth > 0
    if going:
        going = _coin(coins, places, depth - 1, weight) == 0
    while going:
        depth -= 1
        at = left_ptr + 2 * (first + depth)
        mass, weight = tl.load(at), tl.load(at + 1)
        remaining = mass + (1.0 - weight)
        passes = tl.where(remaining > 0.0, mass / tl.where(remaining > 0.0, remaining, 1.0), 1.0)
        passes = tl.where(weight == 0.0, 0.0, passes)
        going = depth > 0
        if going:
            going = _coin(coins, places, depth - 1, passes) == 0
    return depth


@triton.jit
def _num_accepted_down(first, num_guesses, laws_ptr, coins, places):
    """`rejection`: guesses before the first that fails."""
    depth = 0
    one = tl.full((), 1.0, tl.float64)
    going = num_guesses > 0
    while going:
        going = _coin(coins, places, depth, accept_weight(one, laws_ptr, first + depth))
        if going:
            depth += 1
            going = depth < num_guesses
    return depth


@triton.jit
def judge_kernel(
    seeds_ptr, positions_ptr, choices_ptr, starts_ptr, guesses_ptr, laws_ptr, left_ptr,
    rows_ptr,  # [B], out
    verdicts_ptr,  # [B, 2K+2], out
    max_guesses,
    BLOCK_RULE: tl.constexpr, MAX_ROWS: tl.constexpr,
):  # fmt: skip
    seq, places = tl.program_id(0), tl.arange(0, MAX_ROWS)
    first = tl.load(starts_ptr + seq)
    num_rows = tl.load(starts_ptr + seq + 1) - first
    choices = tl.load(choices_ptr + first + places, mask=places < num_rows, other=-1)
    # Behind a row that has nothing to choose no guess can be judged.
    blind = tl.min(tl.where((choices < 0) & (places < num_rows), places, MAX_ROWS), 0)
    num_guesses = tl.minimum(num_rows - 1, blind)
    key_0, key_1 = load_key(seeds_ptr, first)
    at = tl.load(positions_ptr + first) + (places.to(tl.int64) << _NODE_SHIFT)
    coins = accept_uniform(at, _ACCEPT, key_0, key_1)
    if BLOCK_RULE:
        depth = _num_accepted_up(first, num_guesses, laws_ptr, left_ptr, coins, places)
    else:
        depth = _num_accepted_down(first, num_guesses, laws_ptr, coins, places)
    failed = depth < num_guesses
    last = tl.sum(tl.where(places == depth, choices, 0), 0)
    # A guess before a row without a choice is emitted all the same, as the token after the rest.
    has_last = failed | (last >= 0)
    num_tokens = depth + has_last.to(tl.int32)
    verdict_ptr = verdicts_ptr + seq * (2 * max_guesses + 2)
    guesses = tl.load(guesses_ptr + first + places, mask=places < depth, other=-1)
    tokens = tl.where(has_last & (places == depth), last, guesses)
    tl.store(verdict_ptr, num_tokens)
    tl.store(verdict_ptr + 1 + places, tokens, mask=places <= max_guesses)
    path = tl.where(places < num_tokens - 1, places, -1)
    tl.store(verdict_ptr + 2 + max_guesses + places, path, mask=places < max_guesses)
    tl.store(rows_ptr + seq, tl.where(failed, first + depth, -1))

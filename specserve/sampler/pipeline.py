"""The pipeline in its readable form, and the oracle of choose.py: full width, no short cuts.

fp32 logits -> penalties -> logit bias -> min_tokens mask -> temperature -> top-k -> top-p -> min-p.
A filter never cuts between equal logits by accident: of equals the lowest token ids stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.noise import Floats
from specserve.sampler.rows import LogitsRow, as_rows, best_logit, edited

MASS_UNIT: Final = 2.0**-40  # masses are whole multiples of it
_F32: Final = np.float32


def process_logits(logits: Tensor, rows: Seq[LogitsRow], *, vocab_size: int) -> Tensor:
    """Log weights that a token is drawn from: softmax of each row is the distribution p.

    logits:     [L, V]
    vocab_size: ids from here on are padding and can never win
    returns:    [L, V] fp32 (fp64 for fp64 logits), -inf where impossible, largest value 0.
                A greedy row is 0 at its choice and -inf elsewhere
    """
    plain = as_rows(logits, vocab_size)
    result = np.full(logits.shape, -np.inf, dtype=plain.dtype)
    for idx, row in enumerate(rows):
        result[idx, :vocab_size] = process_row(plain[idx], row)
    return torch.from_numpy(result)


def process_row(logits: Floats, row: LogitsRow) -> Floats:
    """[V] -> [V], one row of process_logits."""
    params = row.request.params
    logits = edited(logits, row)
    best_id, best = best_logit(logits, row)
    if row.is_greedy:
        result = np.full_like(logits, -np.inf)
        result[best_id] = 0.0
        return result
    weights = tempered(logits, best, params.temperature)
    if params.top_k > 0:
        weights = _keep_top_k(weights, params.top_k)
    if params.top_p < 1:
        weights = _keep_top_p(weights, params.top_p)
    if params.min_p > 0:
        weights[weights < math.log(params.min_p)] = -np.inf
    return weights


def tempered(logits: Floats, best: float, temperature: float) -> Floats:
    """[V] distances to the best logit (0 and below), divided by the temperature."""
    with np.errstate(over="ignore"):  # a model's own "never" (-3e38) becomes -inf, as it should
        weights: Floats = (logits - best) / temperature
    return weights


def sharpened(weights: Floats, sharpness: float) -> Floats:
    """[n] log weights of the law raised to the power of `sharpness`, not normalised."""
    with np.errstate(over="ignore"):  # as in tempered
        return weights * sharpness


def best_first(weights: Floats) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """[n] indices by falling weight, equals by rising index."""
    return np.argsort(-weights, kind="stable")


def masses(weights: Floats) -> NDArray[np.int64]:
    """[n] weights <= 0 -> [n] their exp in MASS_UNIT, to the nearest whole number.

    Whole numbers, so that no sum of them depends on an order of adding. Range reduction to half a
    power of two, then a polynomial (relative error 3e-9) in float32, step by step as the native
    sampler takes them: numpy's exp differs from machine to machine in the last bits.
    """
    r = np.maximum(weights.astype(np.float32, copy=False), _F32(-40.0))  # a mass of 0
    n = r * _F32(1.44269504)
    n += _F32(1.5 * 2**23)  # adding it rounds to a whole number
    n -= _F32(1.5 * 2**23)
    # In place from here on: fresh arrays, at this size, cost several times the arithmetic.
    p = n * _F32(0.693359375)
    r -= p
    r -= np.multiply(n, _F32(-2.12194440e-4), out=p)
    np.multiply(r, _F32(0.00138148281), out=p)
    for coefficient in (0.00836878456, 0.0416683853, 0.166665196, 0.49999994):
        p += _F32(coefficient)
        p *= r
    p *= r
    p += r
    p += _F32(1.0)
    power = n.astype(np.int32)  # 2^(n + 40), by its bits
    power += 127 + 40
    power <<= 23
    p *= power.view(np.float32)
    wide = p.astype(np.float64)
    return np.rint(wide, out=wide).astype(np.int64)


def mass(weights: Floats) -> int:
    """Sum of exp over [V], in MASS_UNIT."""
    return int(masses(weights).sum())


def nucleus_mass(top_p: float, total: int) -> int:
    """The mass that a nucleus of a row with mass `total` must hold."""
    # Rounding may ask for more than there is; and even a top_p of 0 keeps one token.
    return max(1, min(math.ceil(top_p * total), total))


def num_in_nucleus(sorted_weights: Floats, enough: int) -> int:
    """How many of [n] weights, best first, it takes to hold that mass; at least 1."""
    held = np.cumsum(masses(sorted_weights))
    return 1 + int(np.count_nonzero(held[:-1] < enough))


def _keep_top_k(weights: Floats, top_k: int) -> Floats:
    kept = np.full_like(weights, -np.inf)
    ids = best_first(weights)[:top_k]
    kept[ids] = weights[ids]
    return kept


def _keep_top_p(weights: Floats, top_p: float) -> Floats:
    order = best_first(weights)
    ids = order[: num_in_nucleus(weights[order], nucleus_mass(top_p, mass(weights)))]
    kept = np.full_like(weights, -np.inf)
    kept[ids] = weights[ids]
    return kept

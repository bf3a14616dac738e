"""The pipeline in its readable form, and the oracle of choose.py: full width, no short cuts.

fp32 logits -> penalties -> logit bias -> min_tokens mask -> temperature -> top-k -> top-p -> min-p.
A filter never cuts between equal logits by accident: of equals the lowest token ids stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from specserve.noise import F64, Floats
from specserve.sampler.rows import LogitsRow, as_rows, best_logit, edited


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


def best_first(weights: Floats) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
    """[n] indices by falling weight, equals by rising index."""
    return np.argsort(-weights, kind="stable")


def mass(weights: Floats) -> float:
    """Sum of exp over [V], always over all V in the same order."""
    return float(np.add.reduce(np.exp(weights), dtype=np.float64))


def num_in_nucleus(sorted_weights: Floats, top_p: float, total: float) -> int:
    """How many of [n] weights, best first, it takes to hold top_p of the total mass; at least 1."""
    held: F64 = np.cumsum(np.exp(sorted_weights), dtype=np.float64)
    return 1 + int(np.count_nonzero(held[:-1] < top_p * total))


def _keep_top_k(weights: Floats, top_k: int) -> Floats:
    kept = np.full_like(weights, -np.inf)
    ids = best_first(weights)[:top_k]
    kept[ids] = weights[ids]
    return kept


def _keep_top_p(weights: Floats, top_p: float) -> Floats:
    order = best_first(weights)
    ids = order[: num_in_nucleus(weights[order], top_p, mass(weights))]
    kept = np.full_like(weights, -np.inf)
    kept[ids] = weights[ids]
    return kept

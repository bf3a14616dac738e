"""What rejection.py computes, readably: numpy, one chain at a time. Equal to specserve.verifier."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from specserve_kernels.triton_kernels.reference_sampling import (
    F32,
    F64,
    choose_token,
    edited,
    kept,
    uniforms,
    words,
)
from specserve_kernels.triton_kernels.rows import Row

_ACCEPT, _RESIDUAL = 2, 3  # noise streams


def law(logits: F32, row: Row) -> F64 | None:
    """[V] the target's probabilities; None where there is nothing to choose."""
    choice = choose_token(logits, row)
    if choice < 0:
        return None
    x = edited(logits, row)
    p = np.zeros(len(x))
    if row.temperature <= 0:
        p[choice] = 1.0
        return p
    weights = (x - x.max()) / np.float32(row.temperature)
    some = kept(weights, row)
    p[some] = np.exp(weights[some].astype(np.float64))
    result: F64 = p / p.sum()
    return result


def guess_law(probs: F32 | None, token_id: int, size: int) -> F64:
    """[V] what a guess was drawn from; 1 at itself if it was given, or q calls it impossible."""
    q = np.zeros(size)
    if probs is not None and 0 <= token_id < len(probs) and probs[token_id] > 0:
        positive = np.where(probs > 0, probs, 0.0).astype(np.float64)
        q[: len(probs)] = (positive / positive.sum())[:size]
    elif 0 <= token_id < size:
        q[token_id] = 1.0
    return q


def chain_verdict(
    logits: F32,
    rows: Seq[Row],
    guesses: Seq[int],
    probs: Seq[F32 | None],
    *,
    max_guesses: int,
    block: bool,
) -> list[int]:
    """One chain's row of the buffer that rejection.verify_by_test fills.

    logits: [n+1, V]; rows: n+1; guesses: n; probs: n of [W], None for a given guess
    """
    laws = [law(x, row) for x, row in zip(logits, rows, strict=True)]
    count = next((idx for idx, p in enumerate(laws) if p is None), len(guesses))
    drafts = [guess_law(q, x, logits.shape[1]) for q, x in zip(probs, guesses, strict=True)]

    def passes(weight: float, idx: int) -> float:
        """min(1, weight p(x) / q(x))"""
        p, q, x = laws[idx], drafts[idx], guesses[idx]
        return min(1.0, weight * p[x] / q[x]) if p is not None and 0 <= x < len(p) else 0.0

    def left(weight: float, idx: int) -> F64:
        result: F64 = np.maximum(weight * np.asarray(laws[idx]) - drafts[idx], 0.0)
        return result

    def heads(idx: int, probability: float) -> bool:
        position = rows[0].position + (idx << 40)
        word = int(words(rows[0].key, position, _ACCEPT, 0, 1)[0])
        return ((word >> 11) + 0.5) * 2.0**-53 < probability

    weights = [1.0]
    for idx in range(count):
        weights.append(passes(weights[-1], idx) if block else 1.0)
    if block:
        depth, probability = count, weights[count]
        while depth > 0 and not heads(depth - 1, probability):
            depth -= 1
            mass = float(left(weights[depth], depth).sum())
            probability = mass / (mass + 1 - weights[depth]) if weights[depth] > 0 else 0.0
    else:
        depth = next((idx for idx in range(count) if not heads(idx, passes(1.0, idx))), count)
    if depth == count:
        token = choose_token(logits[depth], rows[depth])
    else:
        rest = left(weights[depth], depth)
        if rest.sum() <= 1e-8 * weights[depth]:
            rest = np.asarray(laws[depth])
        row = rows[depth]
        noise = -np.log(-np.log1p(-uniforms(row.key, row.position, _RESIDUAL, len(rest))))
        with np.errstate(divide="ignore"):
            token = int((np.log(rest) + noise).argmax())
    tokens = [*guesses[:depth], *([token] if token >= 0 else [])]
    path = range(max(len(tokens) - 1, 0))
    padding = [-1] * (max_guesses + 1)
    return [
        *(len(tokens), *[*tokens, *padding][: max_guesses + 1]),
        *[*path, *padding][:max_guesses],
    ]

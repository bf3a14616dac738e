"""What the sampling kernels compute, readably: numpy, one row at a time, full width.

Equal to specserve.sampler, to the bit; written apart because the kernels import nothing of the
engine and `gpu_check` runs where the engine cannot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from specserve_kernels.triton_kernels.rows import Row

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


def words(
    key: tuple[int, int], position: int, purpose: int, part: int, count: int
) -> NDArray[np.uint64]:
    """[count] words of one stream."""
    counter = np.array([0, part, position, purpose], dtype=np.uint64)
    philox = np.random.Philox(counter=counter, key=np.array(key, dtype=np.uint64))
    return philox.random_raw(count)


def uniforms(key: tuple[int, int], position: int, purpose: int, n: int) -> F64:
    """[n] the uniforms in (0, 1) of tokens 0..n-1: 16 leading bits and 48 trailing ones."""
    cells = words(key, position, purpose, 0, (n + 3) // 4).astype("<u8").view("<u2")[:n]
    trailing = words(key, position, purpose, 1, n) >> np.uint64(16)
    fraction = (trailing.astype(np.float64) + 0.5) * 2.0**-48
    result: F64 = np.minimum((cells + fraction) / 2**16, 1.0 - 2.0**-53)
    return result


def edited(logits: F32, row: Row) -> F32:
    """[V] with the row's edits."""
    x = logits.copy()
    for token_id, seen, times, bias in row.edits:
        value = x[token_id]
        if seen and row.repetition != 1:
            factor = np.float32(row.repetition)
            value = value / factor if value > 0 else value * factor
        if times > 0:
            value = np.float32(float(value) - row.frequency * times) - np.float32(row.presence)
        x[token_id] = -np.inf if bias == -math.inf else value + np.float32(bias)
    return x


def masses(weights: F32) -> NDArray[np.int64]:
    """[n] weights <= 0 -> their exp in 2^-40, to the nearest whole number."""
    f = np.float32
    r = np.maximum(weights, f(-40.0))
    n = (r * f(1.44269504) + f(1.5 * 2**23)) - f(1.5 * 2**23)
    r = (r - n * f(0.693359375)) - n * f(-2.12194440e-4)
    p = r * f(0.00138148281)
    for coefficient in (0.00836878456, 0.0416683853, 0.166665196, 0.49999994):
        p = (p + f(coefficient)) * r
    p = (p * r + r) + f(1.0)
    power = ((n.astype(np.int32) + 167) << 23).view(np.float32)
    result: NDArray[np.int64] = np.rint((p * power).astype(np.float64)).astype(np.int64)
    return result


def kept(weights: F32, row: Row) -> NDArray[np.bool_]:
    """[V] what top-k, then top-p, then min-p leave; of equal weights the lowest ids."""
    order = np.argsort(-weights, kind="stable")
    if row.top_k > 0:
        order = order[: row.top_k]
    if row.top_p < 1:
        held = np.cumsum(masses(weights[order]))
        enough = max(1, min(math.ceil(row.top_p * int(held[-1])), int(held[-1])))
        order = order[: 1 + int(np.count_nonzero(held[:-1] < enough))]
    result = np.zeros(len(weights), dtype=np.bool_)
    result[order] = True
    return result & (weights >= np.float32(row.min_weight))


def choose_token(logits: F32, row: Row, purpose: int = 0) -> int:
    """[V] -> argmax(weights + Gumbel noise), the lowest id of equals; -1: nothing to choose."""
    x = edited(logits, row)
    best_id = int(x.argmax())
    if not math.isfinite(x[best_id]):
        return -1
    if row.temperature <= 0:
        return best_id
    with np.errstate(over="ignore", divide="ignore"):
        weights = (x - x[best_id]) / np.float32(row.temperature)
        sharpened = (weights * np.float32(row.sharpness)).astype(np.float64)
        noise = -np.log(-np.log1p(-uniforms(row.key, row.position, purpose, len(x))))
    scores = np.where(kept(weights, row), sharpened + noise, -np.inf)
    return int(scores.argmax())


def choose_tokens(logits: F32, rows: Seq[Row], purpose: int = 0) -> list[int]:
    """[L, V] -> a token per row."""
    return [choose_token(x, row, purpose) for x, row in zip(logits, rows, strict=True)]


def share(logits: F32, row: Row, token_id: int) -> float:
    """[V] -> how much of exp(weights + noise) is the chosen token's; 0: there was none.

    The others' noise is the low end of its cell, as shares.py takes it.
    """
    if token_id < 0:
        return 0.0
    x = np.nan_to_num(logits, nan=-np.inf, neginf=-np.inf)
    scores = (x - x.max()).astype(np.float64)
    if row.temperature > 0:
        weights = (x - x.max()) / np.float32(row.temperature)
        drawn = uniforms(row.key, row.position, 0, len(x))
        ends = np.minimum((np.floor(drawn * 2**16) + 1) / 2**16, 1.0 - 2.0**-53)
        ends[token_id] = drawn[token_id]
        sharpened = (weights * np.float32(row.sharpness)).astype(np.float64)
        noise = -np.log(-np.log1p(-ends))
        scores = np.where(kept(weights, row), sharpened + noise, -np.inf)
    return float(1 / np.exp(scores - scores[token_id]).sum())


def replay_verdict(
    token_ids: Seq[int], parents: Seq[int], choices: Seq[int], max_guesses: int
) -> list[int]:
    """One sequence's row of the buffer that verification.verify_replay fills.

    token_ids, parents, choices: per row of the sequence, its root first; see verification.Guesses
    """
    tokens, path, node = list[int](), list[int](), 0
    token = int(choices[0])
    while token >= 0:
        tokens.append(token)
        children = (
            row for row, parent in enumerate(parents) if parent == node and token_ids[row] == token
        )
        node = next(children, -1)
        token = int(choices[node]) if node >= 0 else -1
        if token >= 0:
            path.append(node - 1)
    padding = [-1] * (max_guesses + 1)
    return [
        len(tokens),
        *(tokens + padding)[: max_guesses + 1],
        *(path + padding)[:max_guesses],
    ]

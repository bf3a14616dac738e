"""What one attention program does with its next keys, and how partial results become one.

R rows of a tile, `keys` keys of a step. Running state of a row: the peak of its scores so far (in
powers of two), the total of its weights relative to that peak, and the weighted sums of values.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _slot_offsets(
    key, seen, table_ptr, MASKED: tl.constexpr, SLOTS: tl.constexpr, GH: tl.constexpr
):
    """[keys] int64: where slot index `key` of a sequence begins in a cache [P, S, G, H]."""
    if MASKED:
        block = tl.load(table_ptr + key // SLOTS, mask=seen, other=0)
    else:
        block = tl.load(table_ptr + key // SLOTS)
    return (block.to(tl.int64) * SLOTS + key % SLOTS) * GH


@triton.jit
def _load_part(ptr, offset, seen, MASKED: tl.constexpr):
    """Zeros where unseen: what lies there need not be a number."""
    if MASKED:
        return tl.load(ptr + offset, mask=seen, other=0.0)
    return tl.load(ptr + offset)


@triton.jit
def _scores(q, k_ptr, offset, seen, MASKED: tl.constexpr, H: tl.constexpr, HEAD: tl.constexpr):
    """q [R, HEAD] times the keys at offset [keys] -> [R, keys] fp32."""
    d = tl.arange(0, HEAD)
    mask = seen[None, :] & (d < H)[:, None]
    k = _load_part(k_ptr, offset[None, :] + d[:, None], mask, MASKED or H != HEAD)
    return tl.dot(q, k.to(q.dtype), input_precision="ieee")


@triton.jit
def _add_values(
    sums, weights, v_ptr, offset, seen, MASKED: tl.constexpr, H: tl.constexpr, dtype: tl.constexpr
):
    """sums [R, HEAD] plus weights [R, keys] times the values at offset [keys]."""
    d = tl.arange(0, sums.shape[1])
    mask = seen[:, None] & (d < H)[None, :]
    v = _load_part(v_ptr, offset[:, None] + d[None, :], mask, MASKED or sums.shape[1] != H)
    return tl.dot(weights.to(dtype), v.to(dtype), sums, input_precision="ieee")


@triton.jit
def _online_softmax(scores, sees, peak, total, score_scale, cap_scale, SOFT_CAP: tl.constexpr):
    """Weights [R, keys] of these keys, the new peak and total, and what shrinks earlier sums."""
    scores = scores * score_scale
    if SOFT_CAP:
        scores = cap_scale * (1.0 - 2.0 / (1.0 + tl.exp2(scores)))  # cap * tanh
    scores = tl.where(sees, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - finite[:, None])
    shrink = tl.exp2(peak - finite)
    return weights, new_peak, tl.fma(total, shrink, tl.sum(weights, axis=1)), shrink


@triton.jit
def _sees(key, position, window, WINDOW: tl.constexpr):
    """[R, keys]: which keys each row sees."""
    sees = key[None, :] <= position[:, None]
    if WINDOW:
        sees &= key[None, :] > position[:, None] - window
    return sees


@triton.jit
def _step(
    q, offset, seen, sees, peak, total, sums, k_ptr, v_ptr, score_scale, cap_scale,
    MASKED: tl.constexpr, H: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """The keys and values at offset [keys], for the rows that see them: sees [R or 1, keys]."""
    scores = _scores(q, k_ptr, offset, seen, MASKED, H, sums.shape[1])
    weights, peak, total, shrink = _online_softmax(
        scores, sees, peak, total, score_scale, cap_scale, SOFT_CAP
    )
    sums = sums * shrink[:, None]
    return peak, total, _add_values(sums, weights, v_ptr, offset, seen, MASKED, H, q.dtype)


@triton.jit
def shared_step(
    step, high, q, position, peak, total, sums, k_ptr, v_ptr, table_ptr,
    score_scale, cap_scale, window, KEYS: tl.constexpr, MASKED: tl.constexpr,
    SLOTS: tl.constexpr, GH: tl.constexpr, H: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """KEYS keys from `step` on, read once for all rows. Unless MASKED every row sees each."""
    key = step + tl.arange(0, KEYS)
    seen = key < high
    sees = seen[None, :]
    if MASKED:
        sees = _sees(key, position, window, WINDOW)
    offset = _slot_offsets(key, seen, table_ptr, MASKED, SLOTS, GH)
    return _step(
        q, offset, seen, sees, peak, total, sums, k_ptr, v_ptr, score_scale, cap_scale,
        MASKED, H, SOFT_CAP,
    )  # fmt: skip


@triton.jit
def tree_step(
    step, row, row_token, token, context_len, q, position, peak, total, sums,
    k_ptr, v_ptr, table_ptr, positions_ptr, paths_ptr, path_width, score_scale, cap_scale, window,
    KEYS: tl.constexpr, SLOTS: tl.constexpr, GH: tl.constexpr, H: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """KEYS positions from `step` on of the path of one token (packed row `row`), for its rows.

    Nothing changes for other rows: they see none of these keys. So a row's sums are those of
    shared_step, and so is the code that takes them: the compiler lays both out alike.
    """
    key = step + tl.arange(0, KEYS)
    seen = key <= tl.load(positions_ptr + row)
    depth = key - context_len
    path_ptr = paths_ptr + row.to(tl.int64) * path_width
    ancestor = tl.load(path_ptr + depth, mask=seen & (depth >= 0), other=0)
    slot = tl.where(depth >= 0, context_len + ancestor, key)
    offset = _slot_offsets(slot, seen, table_ptr, True, SLOTS, GH)
    sees = _sees(key, position, window, WINDOW) & (row_token == token)[:, None]
    return _step(
        q, offset, seen, sees, peak, total, sums, k_ptr, v_ptr, score_scale, cap_scale,
        True, H, SOFT_CAP,
    )  # fmt: skip


@triton.jit
def fold(peak, total, sums, more_peak, more_total, more_sums):
    """A row's earlier splits and its next one as one: peak and total [R], sums [R, HEAD]."""
    new_peak = tl.maximum(peak, more_peak)
    finite = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    keep = tl.exp2(peak - finite)
    add = tl.exp2(more_peak - finite)
    wide_add = tl.broadcast_to(add[:, None], sums.shape)
    new_sums = tl.fma(more_sums, wide_add, sums * keep[:, None])
    return new_peak, tl.fma(more_total, add, total * keep), new_sums

"""RoPE on queries and keys (with QK-norm before it where a model has one), and the KV write.

qkv [T, (N + 2G) * H] = [query heads | key heads | value heads]       one program per token
  query heads: norm, rotate -> query [T, N, H]
  key heads:   norm, rotate -> k_cache at the token's slot
  value heads:                v_cache at the token's slot
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.triton_kernels.model_shapes import Case, ModelShape


@dataclass(frozen=True)
class QkNorm:
    """RMSNorm of each query and key head before rotation: weights [H]."""

    query_weight: Tensor
    key_weight: Tensor
    epsilon: float


@triton.jit
def _rotated_heads(
    x_ptr, weight_ptr, cos, sin, epsilon,
    COUNT: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Both halves [HEADS, HALF] of COUNT heads of H numbers, fp32, and where they lie."""
    head = tl.arange(0, HEADS)[:, None]
    d = tl.arange(0, HALF)[None, :]
    mask = (head < COUNT) & (d < H // 2)
    first = tl.load(x_ptr + head * H + d, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + head * H + H // 2 + d, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        dtype = x_ptr.dtype.element_ty
        square = tl.sum(first * first + second * second, axis=1) / H
        scale = tl.rsqrt(square + epsilon)[:, None]
        low = tl.load(weight_ptr + d, mask=d < H // 2, other=0.0).to(tl.float32)
        high = tl.load(weight_ptr + H // 2 + d, mask=d < H // 2, other=0.0).to(tl.float32)
        first = ((first * scale).to(dtype).to(tl.float32) * low).to(dtype).to(tl.float32)
        second = ((second * scale).to(dtype).to(tl.float32) * high).to(dtype).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin, head * H + d, mask


@triton.jit
def _to_cache(x, inverse_scale, ptr, NARROW: tl.constexpr):
    """fp32 as the cache holds it: fp8 after scaling, within its range."""
    if NARROW:
        x = tl.clamp(x * inverse_scale, -448.0, 448.0)
    return x.to(ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["epsilon"])
def rope_kv_kernel(
    qkv_ptr,  # [T, (N + 2G) * H]
    positions_ptr,  # [T]
    slots_ptr,  # [T]; -1: padding, nothing is written
    cos_ptr,  # [positions, H / 2] fp32
    sin_ptr,  # [positions, H / 2] fp32
    query_weight_ptr,  # [H]; unread unless NORM, as is the next
    key_weight_ptr,  # [H]
    query_ptr,  # [T, N, H]
    k_ptr,  # [P * S, G, H]
    v_ptr,  # [P * S, G, H]
    epsilon, k_inverse_scale, v_inverse_scale,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr,
    N_HEADS: tl.constexpr, G_HEADS: tl.constexpr, HALF: tl.constexpr,  # powers of two
    NORM: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    x_ptr = qkv_ptr + row * ((N + 2 * G) * H)
    d = tl.arange(0, HALF)
    angle = tl.load(positions_ptr + row).to(tl.int64) * (H // 2) + d
    cos = tl.load(cos_ptr + angle, mask=d < H // 2, other=0.0)[None, :]
    sin = tl.load(sin_ptr + angle, mask=d < H // 2, other=0.0)[None, :]
    first, second, offset, mask = _rotated_heads(
        x_ptr, query_weight_ptr, cos, sin, epsilon, N, N_HEADS, H, HALF, NORM
    )
    dtype = query_ptr.dtype.element_ty
    out_ptr = query_ptr + row * (N * H)
    tl.store(out_ptr + offset, first.to(dtype), mask=mask)
    tl.store(out_ptr + H // 2 + offset, second.to(dtype), mask=mask)
    first, second, offset, mask = _rotated_heads(
        x_ptr + N * H, key_weight_ptr, cos, sin, epsilon, G, G_HEADS, H, HALF, NORM
    )
    # Rounded to the activations' dtype first, so that a key is what the query's rule makes it.
    key_ptr = k_ptr + slot * (G * H)
    first = _to_cache(first.to(dtype).to(tl.float32), k_inverse_scale, k_ptr, NARROW)
    second = _to_cache(second.to(dtype).to(tl.float32), k_inverse_scale, k_ptr, NARROW)
    tl.store(key_ptr + offset, first, mask=mask)
    tl.store(key_ptr + H // 2 + offset, second, mask=mask)
    column = tl.arange(0, G_HEADS * HALF * 2)
    there = column < G * H
    values = tl.load(x_ptr + (N + G) * H + column, mask=there, other=0.0).to(tl.float32)
    values = _to_cache(values, v_inverse_scale, v_ptr, NARROW)
    tl.store(v_ptr + slot * (G * H) + column, values, mask=there)


def rope_and_write_kv(
    qkv: Tensor,  # [T, (N + 2G) * H]
    positions: Tensor,  # [T] int32 or int64
    slots: Tensor,  # [T] flat slots, int32 or int64; -1: a padding row
    cos: Tensor,  # [positions, H / 2] fp32, of the first half's frequencies
    sin: Tensor,  # [positions, H / 2] fp32
    k_cache: Tensor,  # [P, S, G, H] of qkv's dtype, or float8_e4m3fn: then values are / scale
    v_cache: Tensor,  # [P, S, G, H] likewise
    norm: QkNorm | None = None,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:  # [T, N, H] rotated queries; padding rows stay unwritten
    """Rotates queries and keys by their positions and writes keys and values at their slots."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    for tensor in (qkv, cos, sin, k_cache, v_cache):
        if not tensor.is_contiguous():
            raise ValueError(f"rope_and_write_kv needs contiguous tensors, got {tensor.stride()}")
    query = torch.empty(qkv.shape[0], num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if qkv.shape[0]:
        rope_kv_kernel[(qkv.shape[0],)](
            *(qkv, positions, slots, cos, sin),
            *((qkv, qkv) if norm is None else (norm.query_weight, norm.key_weight)),
            *(query, k_cache, v_cache, 0.0 if norm is None else norm.epsilon),
            *(1.0 / k_scale, 1.0 / v_scale),
            N=num_heads,
            G=num_kv_heads,
            H=head_dim,
            N_HEADS=triton.next_power_of_2(num_heads),
            G_HEADS=triton.next_power_of_2(num_kv_heads),
            HALF=triton.next_power_of_2(head_dim // 2),
            NORM=norm is not None,
            NARROW=k_cache.dtype == torch.float8_e4m3fn,
            num_warps=4,
        )
    return query


def aot_cases(shape: ModelShape) -> Iterator[Case]:
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    qkv = torch.empty(5, width, dtype=torch.bfloat16)
    weight = torch.empty(shape.head_dim, dtype=torch.bfloat16)
    norm = QkNorm(weight, weight, 1e-6) if shape.qk_norm else None
    index = torch.zeros(5, dtype=torch.int32)
    angles = torch.empty(64, shape.head_dim // 2)
    cache = torch.empty(4, 16, shape.num_kv_heads, shape.head_dim, dtype=torch.bfloat16)
    narrow = torch.empty_like(cache, dtype=torch.float8_e4m3fn)

    def write(kv: Tensor) -> Tensor:
        return rope_and_write_kv(qkv, index, index, angles, angles, kv, kv, norm)

    yield Case("bf16 KV", lambda: write(cache))
    yield Case("fp8 KV", lambda: write(narrow), has_fp8=True)

"""RMSNorm, alone or fused with the residual addition before it: one program per row.

    residual += x            read x, residual; write residual        (add_rms_norm only)
    y = weight * residual / rms(residual)                            write y

A row is one tile, so its sum of squares has one order, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.triton_kernels.model_shapes import Case, ModelShape


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [T, C]
    residual_ptr,  # [T, C]; x_ptr again where there is none
    weight_ptr,  # [C]
    out_ptr,  # [T, C]
    epsilon,
    num_columns,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least C
):
    row = tl.program_id(0).to(tl.int64) * num_columns
    column = tl.arange(0, BLOCK)
    there = column < num_columns
    x = tl.load(x_ptr + row + column, mask=there, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row + column, mask=there, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row + column, rounded, mask=there)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / num_columns + epsilon)
    weight = tl.load(weight_ptr + column, mask=there, other=0.0).to(tl.float32)
    y = (x * scale).to(out_ptr.dtype.element_ty).to(tl.float32) * weight
    tl.store(out_ptr + row + column, y.to(out_ptr.dtype.element_ty), mask=there)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x [T, C] contiguous, weight [C] -> [T, C] in x's dtype. ValueError for other layouts."""
    return _launch(x, None, weight, epsilon)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """residual [T, C] becomes residual + x in place; returns its rms_norm, [T, C]."""
    return _launch(x, residual, weight, epsilon)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    stream = x if residual is None else residual
    if not (x.is_contiguous() and stream.is_contiguous()) or x.shape != stream.shape:
        raise ValueError(
            f"rms_norm needs contiguous rows of one shape, got {tuple(x.shape)} stride {x.stride()}"
            f" and {tuple(stream.shape)} stride {stream.stride()}"
        )
    out = torch.empty_like(stream)
    if x.shape[0]:
        block = triton.next_power_of_2(x.shape[1])
        rms_norm_kernel[(x.shape[0],)](
            *(x, stream, weight, out, epsilon, x.shape[1]),
            ADD=residual is not None,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
    return out


def aot_cases(shape: ModelShape) -> Iterator[Case]:
    x, residual = torch.empty(2, 5, shape.hidden_size, dtype=torch.bfloat16)
    weight = torch.empty(shape.hidden_size, dtype=torch.bfloat16)
    yield Case("alone", lambda: rms_norm(x, weight, 1e-6))
    yield Case("add", lambda: add_rms_norm(x, residual, weight, 1e-6))

"""SwiGLU: silu(gate) * up, one program per row and 1024 columns.

gate_up [T, 2I] = [gate | up]  ->  [T, I]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.triton_kernels.model_shapes import Case, ModelShape

_BLOCK = 1024


@triton.jit
def swiglu_kernel(
    gate_up_ptr,  # [T, 2I]
    out_ptr,  # [T, I]
    num_columns,  # I
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = column < num_columns
    gate_ptr = gate_up_ptr + row * 2 * num_columns
    gate = tl.load(gate_ptr + column, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + num_columns + column, mask=there, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out_ptr + row * num_columns + column, (silu * up).to(dtype), mask=there)


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2I] contiguous -> [T, I] in its dtype. ValueError for other layouts."""
    if not gate_up.is_contiguous() or gate_up.shape[1] % 2:
        raise ValueError(
            f"swiglu needs contiguous rows [gate | up], got {tuple(gate_up.shape)} "
            f"stride {gate_up.stride()}"
        )
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, num_columns, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(num_columns, _BLOCK))
        swiglu_kernel[grid](gate_up, out, num_columns, BLOCK=_BLOCK, num_warps=4)
    return out


def aot_cases(shape: ModelShape) -> Iterator[Case]:
    gate_up = torch.empty(5, 2 * shape.intermediate_size, dtype=torch.bfloat16)
    yield Case("bf16", lambda: swiglu(gate_up))

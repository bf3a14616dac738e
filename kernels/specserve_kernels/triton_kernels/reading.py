"""One plain read of a tensor: what kernels that read the logits once are measured against."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.triton_kernels.model_shapes import Case, ModelShape

_BLOCK = 4096


@triton.jit
def read_kernel(x_ptr, out_ptr, num_elements, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < num_elements, other=float("-inf")).to(tl.float32)
    tl.store(out_ptr + tl.program_id(0), tl.max(x, 0))


def read_once(x: Tensor) -> Tensor:
    """x: n contiguous numbers -> [ceil(n / 4096)] f32, the largest of each 4096."""
    out = torch.empty(triton.cdiv(x.numel(), _BLOCK), device=x.device)
    read_kernel[(len(out),)](x, out, x.numel(), BLOCK=_BLOCK, num_warps=8)
    return out


def aot_cases(shape: ModelShape) -> Iterator[Case]:
    logits = torch.empty(5, shape.vocab_size, dtype=torch.bfloat16)
    yield Case("bf16", lambda: read_once(logits))

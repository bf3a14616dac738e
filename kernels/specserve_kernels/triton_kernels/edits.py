"""Penalties, logit bias and masks: the few tokens of a row that are not as the model left them.

The edited fp32 logit goes to a list, and the token's place in [L, V] becomes -inf. So 16-bit logits
lose nothing to an edit, the big array is written in a few places only, and whoever reads it next
needs no search. `restore` puts the model's own logits back, for log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.triton_kernels.model_shapes import Case, ModelShape
from specserve_kernels.triton_kernels.rows import Edits, Row, pack_edits

_BLOCK = 256


@triton.jit
def edit_kernel(
    logits_ptr,  # [L, row_stride]
    row_stride,
    starts_ptr,
    ids_ptr,
    seen_ptr,
    counts_ptr,
    biases_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    values_ptr,  # [E] f32, out
    originals_ptr,  # [E] as the logits, out
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    first, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    repetition = tl.load(repetition_ptr + row)
    frequency, presence = tl.load(frequency_ptr + row), tl.load(presence_ptr + row)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    for start in range(first, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        there = entry < end
        ids = tl.load(ids_ptr + entry, mask=there, other=0)
        original = tl.load(row_ptr + ids, mask=there, other=0.0)
        tl.store(originals_ptr + entry, original, mask=there)
        x = original.to(tl.float32)
        shrunk = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        seen = tl.load(seen_ptr + entry, mask=there, other=0)
        x = tl.where((seen > 0) & (repetition != 1.0), shrunk, x)
        counts = tl.load(counts_ptr + entry, mask=there, other=0)
        fewer = (x.to(tl.float64) - frequency * counts.to(tl.float64)).to(tl.float32) - presence
        x = tl.where(counts > 0, fewer, x)
        bias = tl.load(biases_ptr + entry, mask=there, other=0.0)
        x = tl.where(bias == float("-inf"), float("-inf"), x + bias)
        tl.store(values_ptr + entry, x, mask=there)
        masked = tl.full((BLOCK,), float("-inf"), tl.float32).to(logits_ptr.dtype.element_ty)
        tl.store(row_ptr + ids, masked, mask=there)


@triton.jit
def restore_kernel(logits_ptr, row_stride, starts_ptr, ids_ptr, originals_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    first, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    for start in range(first, end, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + entry, mask=entry < end, other=0)
        original = tl.load(originals_ptr + entry, mask=entry < end, other=0.0)
        tl.store(logits_ptr + row.to(tl.int64) * row_stride + ids, original, mask=entry < end)


def edit(logits: Tensor, edits: Edits, values: Tensor, originals: Tensor) -> None:
    """Fill `values` [E] f32 and `originals` [E] (of logits' dtype); the tokens become -inf.

    logits: [L, V] f32, bf16 or fp16, rows contiguous
    """
    edit_kernel[(logits.shape[0],)](
        logits, logits.stride(0), *edits, values, originals,
        BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def restore(logits: Tensor, edits: Edits, originals: Tensor) -> None:
    """Undo `edit`."""
    restore_kernel[(logits.shape[0],)](
        logits, logits.stride(0), edits.starts, edits.ids, originals, BLOCK=_BLOCK, num_warps=4
    )


def aot_cases(shape: ModelShape) -> Iterator[Case]:
    logits = torch.empty(5, shape.vocab_size, dtype=torch.bfloat16)
    edits, values = pack_edits([Row()] * 5), torch.empty(1)
    yield Case("edit", lambda: edit(logits, edits, values, logits[0]))
    yield Case("restore", lambda: restore(logits, edits, logits[0]))

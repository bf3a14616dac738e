"""What a request's constraint forbids: a bit per token, applied before everything else.

    bit 1: may come    bit 0: the logit becomes -inf, in place

Forbidding first gives the law of forbidding last (specserve.sampler.allowed): no penalty or bias
makes anything of -inf. The logits of a row with a mask are lost; log-probabilities of the model's
own law are taken before. A row without one is not read.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.triton_kernels.model_shapes import Case, ModelShape

_TILE = 4096


@triton.jit
def mask_kernel(
    logits_ptr,  # [L, row_stride]
    row_stride,
    num_tokens,
    masks_ptr,  # [R, mask_stride] int32
    mask_stride,
    mask_rows_ptr,  # [L] int32
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    mask_row = tl.load(mask_rows_ptr + row)
    if mask_row < 0:
        return
    ids = tl.program_id(1) * TILE + tl.arange(0, TILE)
    word_ptr = masks_ptr + mask_row.to(tl.int64) * mask_stride + ids // 32
    words = tl.load(word_ptr, mask=ids < num_tokens, other=-1)
    forbidden = (words >> (ids % 32)) & 1 == 0
    lowest = tl.full((TILE,), float("-inf"), tl.float32).to(logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row.to(tl.int64) * row_stride + ids, lowest, mask=forbidden)


def forbid(logits: Tensor, masks: Tensor, mask_rows: Tensor, *, vocab_size: int) -> None:
    """Tokens whose bit is 0 become -inf.

    logits:    [L, >= vocab_size] f32, bf16 or fp16, rows contiguous
    masks:     [R, >= ceil(vocab_size / 32)] int32, rows contiguous; token i is bit i % 32 of word
               i // 32: a constraint's bytes, little-endian
    mask_rows: [L] int32, the row of masks of each row of logits; -1: all tokens may come
    """
    mask_kernel[(logits.shape[0], triton.cdiv(vocab_size, _TILE))](
        *(logits, logits.stride(0), vocab_size, masks, masks.stride(0), mask_rows),
        TILE=_TILE,
        num_warps=8,
    )


def aot_cases(shape: ModelShape) -> Iterator[Case]:
    logits = torch.empty(5, shape.vocab_size, dtype=torch.bfloat16)
    masks = torch.zeros(2, -(-shape.vocab_size // 32), dtype=torch.int32)
    index = torch.zeros(5, dtype=torch.int32)
    yield Case("bf16", lambda: forbid(logits, masks, index, vocab_size=shape.vocab_size))

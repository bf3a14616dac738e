"""int8 x int8 products whose rows depend on nothing but themselves: the oracle of the native ones.

Weights are symmetric per output channel, activations symmetric per row, both with
scale = amax / 127 and round-to-nearest-even, so that

    out[m, n] = float(sum over k of xq[m, k] * wq[n, k]) * row_scale[m] * column_scale[n]

Before that, blocks of 64 inputs of rows and weights alike are multiplied by one orthogonal matrix
(`mix_rows`), which changes no product and spreads outliers, so that they no longer set the scale of
their whole row (the idea of QuaRot, arXiv 2404.00456, with a block small enough to be free).

The sum is of integers and exact, hence without an order; the two products are taken in fp32 from
left to right. So no bit of a row depends on its batch mates, and every right implementation gives
the same bits. No clipping: |x| <= amax by definition. An activation scale per tensor instead of per
row would be cheaper, and would make a row depend on its batch.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64  # inputs that are mixed
LARGEST = 127  # -128 is not used: symmetric, and |product| <= 127 * 127
LEAST_AMAX = 2.0**-120  # below it 127 / amax may overflow: such a row counts as zeros
# 1040 products of at most 127 * 127 stay below 2**24: each partial sum is an exact fp32.
_EXACT_FP32_TERMS = 1024


def mix_rows(x: Tensor) -> Tensor:
    """x [M, k] -> fp32 [M, k padded to 64]: each block of 64 times Hadamard's matrix / 8.

    Six rounds of sums and differences in one order: the same bits as in native/gemm_mix.h.
    """
    num_rows, width = x.shape
    mixed = F.pad(x.to(torch.float32), (0, -width % BLOCK)) * 0.125
    for distance in (1, 2, 4, 8, 16, 32):
        low, high = mixed.reshape(num_rows, -1, 2, distance).unbind(2)
        mixed = torch.stack([low + high, low - high], dim=2)
    return mixed.reshape(num_rows, -1)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, k] any float -> int8 [M, k padded to 64] and fp32 scales [M].

    `mix_rows(x)` is about ints * scales.

    A row with NaN or Inf is zeros with a NaN scale: all that is computed from it is NaN.
    """
    wide = mix_rows(x)
    amax = wide.abs().amax(dim=1)  # [M], NaN where the row holds one
    is_usable = (amax >= LEAST_AMAX) & amax.isfinite()
    # Not LARGEST / amax: torch takes that as a reciprocal times 127, another rounding, and half of
    # amax (common in bf16 checkpoints) would land on the other side of 63.5 than in native code.
    inverse = torch.where(is_usable, torch.full_like(amax, LARGEST) / amax, 0.0)
    scales = torch.where(is_usable, amax / LARGEST, torch.where(amax < LEAST_AMAX, 0.0, torch.nan))
    products = torch.where(is_usable[:, None], wide * inverse[:, None], 0.0)
    return products.round_().to(torch.int8), scales


class Int8Weight:
    """A matrix [out, in] as int8 with one scale per output channel, in the torch path's layout.

    The seam's other kind of weight beside `linear.GemmWeight`; `apply` takes and gives fp32.
    """

    def __init__(self, weight: Tensor) -> None:
        self.dtype = torch.float32
        self.is_packed = True
        self.is_exact = True
        self.shape = (weight.shape[0], weight.shape[1])
        self._matrix, self._scales = quantize_rows(weight)
        self.nbytes = self._matrix.nbytes + self._scales.nbytes

    def apply(self, x: Tensor) -> Tensor:
        """x [M, in] fp32 -> x @ weight.T [M, out] fp32."""
        rows, row_scales = quantize_rows(x)
        sums = int_matmul(rows, self._matrix)
        return sums.to(torch.float32).mul_(row_scales[:, None]).mul_(self._scales)


def int_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, k] int8, weight [n, k] int8 -> their exact products' sums [M, n] int32."""
    if _library_is_exact():
        return torch._int_mm(x, weight.t())
    return exact_int_matmul(x, weight)


def exact_int_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """The same from fp32 products of so few terms that nothing is ever rounded."""
    sums = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.int32)
    for first in range(0, x.shape[1], _EXACT_FP32_TERMS):
        terms = slice(first, first + _EXACT_FP32_TERMS)
        sums += (x[:, terms].to(torch.float32) @ weight[:, terms].to(torch.float32).t()).to(
            torch.int32
        )
    return sums


@cache
def _library_is_exact() -> bool:
    """Whether torch's own int8 product is exact here: without VNNI some kernels saturate pairs."""
    generator = torch.Generator().manual_seed(0)
    for num_rows in (1, 3, 16, 40):
        for num_outputs, num_inputs in ((48, 64), (33, 1500)):
            x = torch.randint(-LARGEST, LARGEST + 1, (num_rows, num_inputs), generator=generator)
            weight = torch.full((num_outputs, num_inputs), LARGEST)
            weight[::2] = -LARGEST
            x[0] = LARGEST
            x, weight = x.to(torch.int8), weight.to(torch.int8)
            try:
                sums = torch._int_mm(x, weight.t())
            except RuntimeError:  # not in this build of torch
                return False
            if not torch.equal(sums, exact_int_matmul(x, weight)):
                return False
    return True

"""The one seam through which the decoder multiplies matrices.

A GEMM library picks its code path by the number of rows, and paths round differently: a row's bits
would depend on how many others share its step. So GEMMs are called only with row counts that were
seen, at start and on the loaded weights, to agree bit for bit with `BASE_ROWS`; other counts are
padded up. Which counts agree is a property of library, machine and number of threads, so nothing
is assumed, and where no count agrees the base is left.

Weights are packed once into oneDNN's blocked layout where it has one. Measured on 2 AVX2 cores,
torch 2.13, fp32, [49152, 576] by 1 / 4 / 16 / 64 rows: packed 4 / 12 / 26 / 70 ms, all row counts
from 1 to 512 agree; F.linear 10 / 37 / 56 / 100 ms, only multiples of 4 agree.

int8 weights (`quantize.py`) are exact by construction: any row count agrees, none is measured.
bf16 weights are called with the base alone: other counts round a sum otherwise so seldom (an output
is rounded to 8 bits, which hides it) that a measurement of a second misses it. With AMX one row
costs what 16 do (92, 86 ms for the demo's layers, two busy cores); 512 rows cost 1.4 s instead of
0.17. Native kernels, which are exact at any count, are what bf16 should run on.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

BASE_ROWS = 16
# Steps of at most a quarter, so that padding wastes at most that
CANDIDATE_ROWS = (
    *range(1, 17),
    *range(20, 33, 4),
    *(40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512),
)
_CHECK_FLOPS = 4e10  # per weight: about half a second. Larger candidates are left out
_PACKED_FOR_ROWS = 64  # packed for 1 row, oneDNN's calls of 1, 3 and 7 rows rounded otherwise


class Weight(Protocol):
    """A matrix [out, in] in the layout its GEMM reads."""

    shape: tuple[int, int]
    dtype: torch.dtype  # of rows that go in and come out
    nbytes: int
    is_packed: bool  # the tensor it was made from is not kept
    is_exact: bool  # its sums are never rounded: calls of any size give a row the same bits

    def apply(self, x: Tensor) -> Tensor:
        """x [M, in] -> x @ weight.T [M, out], one call of the library whatever M."""
        ...


class GemmWeight:
    """A floating-point matrix [out, in]; the given tensor is not kept if packed."""

    is_exact = False

    def __init__(self, weight: Tensor) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self.dtype = weight.dtype
        self.nbytes = weight.nbytes
        self.is_packed = _can_pack(weight.dtype)
        if self.is_packed:
            with torch.no_grad():
                weight = torch.ops.mkldnn._reorder_linear_weight(
                    weight.contiguous(), _PACKED_FOR_ROWS
                )
        self._matrix = weight

    def apply(self, x: Tensor) -> Tensor:
        """x [M, in] -> x @ weight.T [M, out], one call of the library whatever M."""
        if self.is_packed:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._matrix, None, "none", [], "")
            return out
        return F.linear(x, self._matrix)


def _can_pack(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def measure_call_sizes(
    weights: Seq[Weight], candidates: Seq[int] = CANDIDATE_ROWS
) -> tuple[int, ...]:
    """Row counts at which every one of these weights gives a row the same bits, ascending.

    One weight of each distinct shape is enough.
    """
    allowed = sorted({BASE_ROWS, *candidates})
    for weight in {weight.shape: weight for weight in weights if not weight.is_exact}.values():
        if weight.dtype == torch.bfloat16:
            return (BASE_ROWS,)
        allowed = _agreeing(weight, allowed)
    return tuple(allowed)


def _agreeing(weight: Weight, candidates: Seq[int]) -> list[int]:
    """The candidates that agree with the base on this weight, in any place inside the call."""
    num_outputs, num_inputs = weight.shape
    most_rows = int(_CHECK_FLOPS / (2 * num_outputs * num_inputs))
    within, total = [], 0
    for rows in candidates:
        total += max(rows, BASE_ROWS)
        if rows == BASE_ROWS or total <= most_rows:
            within.append(rows)
    num_rows = -(-max(within) // BASE_ROWS) * BASE_ROWS
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, num_inputs, generator=generator).to(weight.dtype)
    base = torch.cat([weight.apply(part) for part in torch.split(x, BASE_ROWS)])
    agreeing = {BASE_ROWS}
    for rows in within:
        covered = max(rows, BASE_ROWS // rows * rows)
        parts = [weight.apply(part) for part in torch.split(x[:covered], rows)]
        if torch.equal(torch.cat(parts), base[:covered]):
            agreeing.add(rows)
    return sorted(agreeing)


class RowInvariantLinear:
    """x @ weight.T whose rows depend on nothing but themselves.

    weights: all it will be called with, or one of each distinct shape
    Measures at once for the number of threads in force, and again when that has changed.
    """

    def __init__(self, weights: Seq[Weight], candidates: Seq[int] = CANDIDATE_ROWS) -> None:
        self._weights = list(weights)
        self._candidates = tuple(candidates)
        self._sizes_by_threads: dict[int, tuple[int, ...]] = {}
        _ = self.call_sizes

    @property
    def call_sizes(self) -> tuple[int, ...]:
        """Rows per GEMM call, ascending: they agree bit for bit with one another."""
        threads = torch.get_num_threads()
        if threads not in self._sizes_by_threads:
            measured = measure_call_sizes(self._weights, self._candidates)
            self._sizes_by_threads[threads] = measured
        return self._sizes_by_threads[threads]

    def padded(self, num_rows: int) -> int:
        """The least number of rows >= num_rows that calls of allowed sizes cover exactly."""
        sizes = self.call_sizes
        whole = num_rows // sizes[-1] * sizes[-1]
        rest = num_rows - whole
        return whole + (next(size for size in sizes if size >= rest) if rest else 0)

    def __call__(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x [M, in], bias [out] -> [M, out]. Rows need no padding beforehand, but gain by it."""
        num_rows = x.shape[0]
        padded = self.padded(num_rows)
        if padded != num_rows:
            x = F.pad(x, (0, 0, 0, padded - num_rows))
        largest = self.call_sizes[-1]
        if 0 < padded <= largest:
            out = weight.apply(x)
        else:
            parts = [weight.apply(part) for part in torch.split(x, largest)] if padded else []
            out = torch.cat([x.new_empty(0, weight.shape[0]), *parts])
        if bias is not None:
            out = out + bias  # apart: a GEMM that starts from the bias is another code path
        return out[:num_rows]

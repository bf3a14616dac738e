"""The one seam through which the decoder multiplies matrices.

A GEMM library picks its code path by the number of rows, and paths round differently: a row's bits
would depend on how many others share its step. So GEMMs are called only with row counts that were
seen, at start and on the loaded weights, to agree bit for bit with `BASE_ROWS`; other counts are
padded up. Which counts agree is a property of library, machine and number of threads (AVX2 fp32:
multiples of 4; bf16: all; with AMX other classes), so nothing is assumed, and where no count agrees
the base is left.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor

BASE_ROWS = 16
# Steps of at most a quarter, so that padding wastes at most that
CANDIDATE_ROWS = (
    *range(1, 8),
    *range(8, 33, 4),
    *(40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512),
)
_SEEDS = (0, 1)  # sets of random rows that every candidate is compared on
_CHECK_FLOPS = 4e10  # per weight: about half a second. Larger candidates are left out


def measure_call_sizes(
    weights: Seq[Tensor], candidates: Seq[int] = CANDIDATE_ROWS
) -> tuple[int, ...]:
    """Row counts at which every one of these weights gives a row the same bits, ascending.

    weights: [out, in] each; one of each distinct shape is enough
    """
    allowed = sorted({BASE_ROWS, *candidates})
    for weight in {tuple(weight.shape): weight for weight in weights}.values():
        allowed = _agreeing(weight, allowed)
    return tuple(allowed)


def _agreeing(weight: Tensor, candidates: Seq[int]) -> list[int]:
    """The candidates that agree with the base on this weight, in any place inside the call."""
    flops_per_row = 2 * weight.numel() * len(_SEEDS)
    most_rows = int(_CHECK_FLOPS / flops_per_row)
    within, total = [], 0
    for rows in candidates:
        total += max(rows, BASE_ROWS)
        if rows == BASE_ROWS or total <= most_rows:
            within.append(rows)
    num_rows = -(-max(within) // BASE_ROWS) * BASE_ROWS
    agreeing = set(within)
    for seed in _SEEDS:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_rows, weight.shape[1], generator=generator).to(weight.dtype)
        base = torch.cat([F.linear(part, weight) for part in torch.split(x, BASE_ROWS)])
        for rows in within:
            covered = max(rows, BASE_ROWS // rows * rows)
            parts = [F.linear(part, weight) for part in torch.split(x[:covered], rows)]
            if not torch.equal(torch.cat(parts), base[:covered]):
                agreeing.discard(rows)
    return sorted(agreeing | {BASE_ROWS})


class RowInvariantLinear:
    """x @ weight.T whose rows depend on nothing but themselves.

    weights: [out, in] each, all it will be called with, or one of each distinct shape
    Measures at once for the number of threads in force, and again when that has changed.
    """

    def __init__(self, weights: Seq[Tensor], candidates: Seq[int] = CANDIDATE_ROWS) -> None:
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

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [M, in], weight [out, in], bias [out] -> [M, out]. M needs no padding, but gains."""
        num_rows = x.shape[0]
        padded = self.padded(num_rows)
        if padded != num_rows:
            x = F.pad(x, (0, 0, 0, padded - num_rows))
        largest = self.call_sizes[-1]
        if padded <= largest:
            out = F.linear(x, weight)
        else:
            out = torch.cat([F.linear(part, weight) for part in torch.split(x, largest)])
        if bias is not None:
            out = out + bias  # apart: a GEMM that starts from the bias is another code path
        return out[:num_rows]

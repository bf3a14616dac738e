"""The one seam through which the decoder multiplies matrices.

A GEMM library picks its code path by the number of rows, and paths round differently: a row's bits
would depend on how many others share its step. So GEMMs are called only with row counts that were
seen, at start and on the loaded weights, to agree bit for bit with `BASE_ROWS`; other counts are
padded up. Which counts agree is a property of the library and the machine (fp32 here: multiples of
4; bf16: all; with AMX other classes), so nothing is assumed, and where none agrees the base is left.
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
        base = torch.cat([F.linear(part, weight) for part in x.split(BASE_ROWS)])
        for rows in within:
            covered = max(rows, BASE_ROWS // rows * rows)
            parts = [F.linear(part, weight) for part in x[:covered].split(rows)]
            if not torch.equal(torch.cat(parts), base[:covered]):
                agreeing.discard(rows)
    return sorted(agreeing | {BASE_ROWS})


class RowInvariantLinear:
    """x @ weight.T whose rows depend on nothing but themselves.

    call_sizes: from `measure_call_sizes`, ascending
    """

    def __init__(self, call_sizes: Seq[int]) -> None:
        self.call_sizes = tuple(call_sizes)

    def padded(self, num_rows: int) -> int:
        """The least number of rows >= num_rows that calls of allowed sizes cover exactly."""
        largest = self.call_sizes[-1]
        whole = num_rows // largest * largest
        rest = num_rows - whole
        return whole + (next(s for s in self.call_sizes if s >= rest) if rest else 0)

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
            out = torch.cat([F.linear(part, weight) for part in x.split(largest)])
        if bias is not None:
            out = out + bias  # apart: a GEMM that starts from the bias is another code path
        return out[:num_rows]

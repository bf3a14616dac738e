"""What is wanted of rows of logits: as values, and packed for a device. Needs no triton."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

ALL_IDS = 2**31 - 1


class Edit(NamedTuple):
    """One token that is not as the model left it.

    seen: known before this row, in the prompt or after; times: how often after the prompt, guesses
    included; bias: added last; -inf forbids the token
    """

    token_id: int
    seen: bool = False
    times: int = 0
    bias: float = 0.0


class Row(NamedTuple):
    """One row's seed, position and sampling parameters, as specserve's LogitsRow has them.

    seed: -2^63 .. 2^64-1; position: of the token being chosen; temperature: 0 is greedy;
    sharpness: > 0, weights are multiplied by it after the filters; top_k: 0 and below is off;
    top_p: 1 and above is off; min_weight: log(min_p); edits: at most one per token
    """

    seed: int = 0
    position: int = 0
    temperature: float = 1.0
    sharpness: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_weight: float = -math.inf
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    edits: tuple[Edit, ...] = ()

    @property
    def key(self) -> tuple[int, int]:
        """Philox's: the seed's low 64 bits, and 1 if it is negative."""
        return self.seed & (2**64 - 1), int(self.seed < 0)


class Rows(NamedTuple):
    """L of `Row`, on the device.

    seeds: [L, 2] int64; positions: [L] int64; temperatures, sharpness: [L] f32;
    top_ks: [L] int32; top_ps: [L] f64; min_weights: [L] f32
    """

    seeds: Tensor
    positions: Tensor
    temperatures: Tensor
    sharpness: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_weights: Tensor


class Edits(NamedTuple):
    """The edits of L rows, on the device; applied in the order of the fields.

    starts:     [L+1] int32  row l has entries starts[l] .. starts[l+1]-1
    ids:        [E] int32    tokens, each once per row
    seen:       [E] int32    0 or 1
    counts:     [E] int32
    biases:     [E] f32
    repetition: [L] f32      1: off
    frequency:  [L] f64      0: off
    presence:   [L] f32      0: off
    """

    starts: Tensor
    ids: Tensor
    seen: Tensor
    counts: Tensor
    biases: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor


class Edited(NamedTuple):
    """What the edits came to. starts: [L+1] int32; ids: [E] int32; values: [E] f32 logits."""

    starts: Tensor
    ids: Tensor
    values: Tensor


class Cuts(NamedTuple):
    """What filters leave of each row: weight > cut, and of those equal to it ids up to last_ids.

    bests:    [L] f32    largest logit, read only where there is a cut
    weights:  [L] f32    the cut; -inf: none
    last_ids: [L] int32
    """

    bests: Tensor
    weights: Tensor
    last_ids: Tensor


class Choices(NamedTuple):
    """token_ids: [L] int32, -1 where nothing can be chosen; bests: [L] f32, then not finite."""

    token_ids: Tensor
    bests: Tensor


def pack_rows(rows: Seq[Row], device: torch.device | str = "cpu") -> Rows:
    """At least one row."""
    keys = np.array([row.key for row in rows], dtype=np.uint64).reshape(-1, 2)
    columns = zip(*(row[1:7] for row in rows), strict=True)
    dtypes = torch.int64, torch.float32, torch.float32, torch.int32, torch.float64, torch.float32
    return Rows(
        torch.from_numpy(keys.view(np.int64)).to(device),
        *(
            torch.tensor(column, dtype=dtype, device=device)
            for column, dtype in zip(columns, dtypes, strict=True)
        ),
    )


def pack_edits(rows: Seq[Row], device: torch.device | str = "cpu") -> Edits:
    """At least one row."""
    starts = np.cumsum([0, *(len(row.edits) for row in rows)])
    # One entry more than there are, so that there is always something to point at.
    entries = [*(edit for row in rows for edit in row.edits), Edit(0)]
    ids, seen, times, biases = zip(*entries, strict=True)
    rest = zip(*((row.repetition, row.frequency, row.presence) for row in rows), strict=True)
    columns = (starts, ids, seen, times, biases, *rest)
    dtypes = *[torch.int32] * 4, torch.float32, torch.float32, torch.float64, torch.float32
    return Edits(
        *(
            torch.tensor(column, dtype=dtype, device=device)
            for column, dtype in zip(columns, dtypes, strict=True)
        )
    )


def no_cuts(num_rows: int, device: torch.device | str = "cpu") -> Cuts:
    return Cuts(
        torch.zeros(num_rows, device=device),
        torch.full((num_rows,), -torch.inf, device=device),
        torch.full((num_rows,), ALL_IDS, dtype=torch.int32, device=device),
    )


def empty_choices(num_rows: int, device: torch.device | str = "cpu") -> Choices:
    return Choices(
        torch.empty(num_rows, dtype=torch.int32, device=device),
        torch.empty(num_rows, device=device),
    )

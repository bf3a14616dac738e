"""What an EAGLE-3 drafter asks of whatever computes its layer, in torch or natively."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple, Protocol

import torch

from specserve.drafting import Draft, DraftRow
from specserve_drafts.eagle3_states import State, Track
from specserve_drafts.growing import Wish


class Work(NamedTuple):
    """One row's part of a step.

    num_slots: slots track.end, track.end + 1, ... to be filled first
    depth:     most guesses in a row after that; 0: none
    """

    row: DraftRow
    track: Track
    num_slots: int
    depth: int


class Compute(Protocol):
    """The layer's weights, its KV and the state at each block's last position."""

    @property
    def dtype(self) -> torch.dtype:
        """In which it reads the target's states."""
        ...

    def tail(self, block_id: int) -> State:
        """The fused state at the last position of a block."""
        ...

    def run(self, works: Seq[Work]) -> list[Draft]:
        """Fills slots and tells the tracks, then guesses; kv_len is the caller's to fill in."""
        ...


def wish_of(work: Work) -> Wish:
    row = work.row
    return Wish(
        row, max_tokens=row.max_tokens if row.width > 1 else work.depth, max_depth=work.depth
    )

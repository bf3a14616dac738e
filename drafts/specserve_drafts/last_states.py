"""The target's last state of each sequence: all that a drafter of independent heads reads."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from specserve.drafting import DraftRow, Outcome
from specserve_drafts.scripted import wants_guesses


class LastStates:
    """[D] per sequence, at the last position that the target has computed."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._known: dict[int, tuple[int, Tensor]] = {}  # seq_id -> (position, state)

    def observe(self, outcomes: Seq[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.hidden is not None and outcome.num_computed:
                state = outcome.hidden[-1, 0].to(self._dtype, copy=True)
                self._known[outcome.seq_id] = (outcome.start + outcome.num_computed - 1, state)

    def of(self, row: DraftRow) -> Tensor | None:
        """The state before the last known token, if this row is to be guessed and it is there."""
        position, state = self._known.get(row.seq_id, (-1, None))
        return state if wants_guesses(row) and position == len(row.history) - 2 else None

    def forget(self, seq_id: int) -> None:
        self._known.pop(seq_id, None)

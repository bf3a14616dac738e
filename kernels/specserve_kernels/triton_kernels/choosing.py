"""From logits to tokens with static buffers: edit, cut, race, decide. No host sync.

Rows under a constraint go through masks.forbid before, verification comes after.

Every call launches the same kernels with the same addresses, so a CUDA graph may hold it; which
rows are greedy, filtered or edited is read on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specserve_kernels.triton_kernels import cuts, edits, sampling
from specserve_kernels.triton_kernels.rows import (
    Choices,
    Cuts,
    Edited,
    Edits,
    Rows,
    empty_choices,
    no_cuts,
)


class Chooser:
    """Buffers for num_rows rows of logits and num_edits edits of them.

    tile, num_slots, capacity, chunk: of the kernels, see there; smaller ones give the same tokens
    cuts, choices: of the last `choose`, for rejection.verify_by_test
    """

    def __init__(
        self,
        num_rows: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        num_edits: int = 1,
        tile: int = sampling.TILE,
        num_slots: int = sampling.NUM_SLOTS,
        capacity: int = cuts.CAPACITY,
        chunk: int = 2048,
    ) -> None:
        self._vocab_size, self._tile, self._chunk = vocab_size, tile, chunk
        self._values = torch.empty(num_edits, device=device)
        self._originals = torch.empty(num_edits, dtype=dtype, device=device)
        self.cuts: Cuts = no_cuts(num_rows, device)
        self._lists = cuts.make_lists(num_rows, device, capacity)
        self._tiles = sampling.make_tiles(
            num_rows, vocab_size, device, tile=tile, num_slots=num_slots
        )
        self.choices = empty_choices(num_rows, device)
        self._room = num_rows, num_edits

    def holds(self, num_rows: int, num_edits: int) -> bool:
        """Whether so many rows and edits of them have room."""
        return num_rows <= self._room[0] and num_edits <= self._room[1]

    def choose(self, logits: Tensor, rows: Rows, wanted: Edits, *, purpose: int = 0) -> Choices:
        """[L, >= vocab_size] -> a token per row, in this object's own buffer; at most num_rows.

        Tokens with an edit are left -inf in `logits`; `restore` undoes that.
        """
        edited = self.edited(wanted)
        edits.edit(logits, wanted, self._values, self._originals)
        size = self._vocab_size
        cuts.find_cuts(
            logits, rows, edited, self._lists, self.cuts, vocab_size=size, chunk=self._chunk
        )
        sampling.choose_tokens(
            *(logits, rows, self.cuts, edited, self._tiles, self.choices),
            vocab_size=size,
            purpose=purpose,
            tile=self._tile,
        )
        return self.choices

    def edited(self, wanted: Edits) -> Edited:
        """What the edits of the last `choose` came to."""
        return Edited(wanted.starts, wanted.ids, self._values)

    def restore(self, logits: Tensor, wanted: Edits) -> None:
        """Undo the edits of the last `choose`."""
        edits.restore(logits, wanted, self._originals)

"""A draft language model with its own KV over the target's blocks, and how far that KV is valid.

Its KV is a prefix of the sequence like the target's: draft prefill, the token missing after full
acceptance, rollback, recompute and the return from K = 0 are all the same catch-up, bounded per
step, so that a long prompt does not stall its neighbours.

What the runner knows (DraftRow.kv_len) is what prefix hits and finished steps tell it; what was
accepted of a tree is known here alone, for only here is it known where its KV was written.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

import msgspec
import torch
from torch import Tensor

from specserve.drafting import DraftRow, Outcome
from specserve.models.interface import CausalLM
from specserve_kernels.interface import PagedBatch

MAX_CATCH_UP: Final = 512  # tokens per step, all rows together


class Segment(msgspec.Struct, frozen=True):
    """Tokens of one row for one forward, after `start` positions of valid KV.

    parents: of a tree, as in PagedBatch: token j sits in slot start + j, at its depth's position
    """

    row: DraftRow
    start: int
    token_ids: Seq[int]
    parents: tuple[int, ...] | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def positions(self) -> list[int]:
        if self.parents is None:
            return list(range(self.start, self.end))
        positions: list[int] = []
        for parent in self.parents:
            positions.append(self.start if parent < 0 else positions[parent] + 1)
        return positions


class _Written(msgspec.Struct, frozen=True):
    """Guesses whose KV was written after position `start`, in slots start, start + 1, ..."""

    start: int
    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    block_table: tuple[int, ...]


class PagedDraft:
    """Model, KV, and the valid length of each sequence. One thread only."""

    def __init__(
        self,
        model: CausalLM,
        *,
        num_blocks: int,
        block_size: int,
        max_positions: int | None,
        max_catch_up: int,
    ) -> None:
        self._model = model
        self._block_size = block_size
        self._max_positions = max_positions
        self._max_catch_up = max_catch_up
        self.kv_cache = model.new_kv_cache(num_blocks, block_size)
        self._valid: dict[int, int] = {}  # by seq_id
        self._written: dict[int, _Written] = {}

    def catch_up(self, rows: Seq[DraftRow]) -> list[Segment]:
        """What each row computes now, in the rows' order; the nearest to done are served first."""
        left = self._max_catch_up
        starts = [self._valid_of(row) for row in rows]
        segments: dict[int, Segment] = {}
        for idx in sorted(range(len(rows)), key=lambda idx: rows[idx].num_known - starts[idx]):
            row = rows[idx]
            # The last known token is computed again if need be: guessing starts from its logits.
            start = min(starts[idx], len(row.history) - 1)
            end = min(row.num_known, self._max_positions or row.num_known, start + left)
            known = row.history[start:end]
            left -= len(known)
            segments[idx] = Segment(row, start, known)
        return [segments[idx] for idx in range(len(rows))]

    def room(self, row: DraftRow, kv_len: int) -> int:
        """How many guesses may follow one another: 0 until all known tokens have KV."""
        if kv_len < len(row.history):
            return 0
        if self._max_positions is None:
            return row.max_tokens
        # The last guess is never fed, so it may stand one past the model's last position.
        return min(row.max_tokens, self._max_positions - kv_len + 1)

    def forward(self, segments: Seq[Segment], wanted: Seq[Seq[int]]) -> Tensor:
        """[L, W] logits after the wanted tokens of each segment, segment by segment.

        wanted: per segment, indices of its tokens; segments without a token are left out
        """
        packed = [(seg, want) for seg, want in zip(segments, wanted, strict=True) if seg.token_ids]
        if not packed:
            return torch.empty(0, self._model.vocab_size)
        starts, input_ids, positions = [0], list[int](), list[int]()
        logits_indices: list[int] = []
        for seg, want in packed:
            logits_indices += [len(input_ids) + token for token in want]
            input_ids += seg.token_ids
            positions += seg.positions
            starts.append(len(input_ids))
        batch = PagedBatch(
            query_start_loc=tuple(starts),
            context_lens=tuple(seg.start for seg, _ in packed),
            block_tables=tuple(seg.row.block_table for seg, _ in packed),
            parents=tuple(seg.parents for seg, _ in packed),
            block_size=self._block_size,
        )
        return self._model.forward(
            torch.tensor(input_ids, dtype=torch.int64),
            torch.tensor(positions, dtype=torch.int64),
            batch,
            self.kv_cache,
            logits_indices,
        )

    # ---- how much is valid ---------------------------------------------------------------

    def _valid_of(self, row: DraftRow) -> int:
        return max(row.kv_len, self._valid.get(row.seq_id, 0))

    def is_known(self, row: DraftRow, kv_len: int) -> None:
        """All of history before kv_len has KV now, and no guess behind it."""
        self._valid[row.seq_id] = kv_len
        self._written.pop(row.seq_id, None)

    def is_written(self, row: DraftRow, start: int, token_ids: Seq[int], parents: Seq[int]) -> None:
        """Guesses were fed in this order, too; which of them become history, `settle` finds out."""
        self._written[row.seq_id] = _Written(
            start, tuple(token_ids), tuple(parents), row.block_table
        )

    def settle(self, outcome: Outcome) -> None:
        """Keep the KV of guesses that became history, moved to where a chain would have it."""
        written = self._written.pop(outcome.seq_id, None)
        if written is None or outcome.start > written.start:
            return
        computed = outcome.token_ids[written.start - outcome.start : outcome.num_computed]
        path: list[int] = []
        for token_id in computed:
            parent = path[-1] if path else -1
            node = _child(written, parent, token_id)
            if node is None:
                break
            path.append(node)
        moves = [(node, at) for at, node in enumerate(path) if node != at]
        if moves:
            self.kv_cache.move(
                [self._slot(written, node) for node, _ in moves],
                [self._slot(written, at) for _, at in moves],
            )
        self._valid[outcome.seq_id] = written.start + len(path)

    def _slot(self, written: _Written, offset: int) -> int:
        block, place = divmod(written.start + offset, self._block_size)
        return written.block_table[block] * self._block_size + place

    def forget(self, seq_id: int) -> None:
        self._valid.pop(seq_id, None)
        self._written.pop(seq_id, None)


def _child(written: _Written, parent: int, token_id: int) -> int | None:
    for node, (own, its_parent) in enumerate(zip(written.token_ids, written.parents, strict=True)):
        if own == token_id and its_parent == parent:
            return node
    return None

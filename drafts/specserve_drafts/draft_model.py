"""A smaller language model with the target's tokenizer guesses, over the same blocks as the target.

Its KV is a prefix of the sequence like the target's: draft prefill, the one token missing after
full acceptance, rollback, recompute and the return from K = 0 are all the same catch-up. Catch-up
is bounded per step, so that a long prompt does not stall its neighbours: a row that is not caught
up proposes nothing. Under `replay` it proposes with the target's own noise (coupled), under
`rejection` it samples with its own and reports the distribution.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

import msgspec
import torch
from torch import Tensor

from specserve.drafting import Draft, DraftRow, Outcome, chain
from specserve.errors import ConfigError
from specserve.models.interface import CausalLM
from specserve.noise import Purpose
from specserve.sampler import LogitsRow, Proposal, draft_choice
from specserve_drafts.resources import DrafterResources
from specserve_kernels.interface import PagedBatch

MAX_CATCH_UP: Final = 512  # tokens per step, all rows together


class _Segment(msgspec.Struct, frozen=True):
    """Tokens of one row for one forward, after `start` positions of valid KV."""

    row: DraftRow
    start: int
    token_ids: Seq[int]


class DraftModelDrafter:
    name = "draft_model"
    keeps_kv = True
    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: CausalLM,
        *,
        vocab_size: int,
        num_blocks: int,
        block_size: int,
        max_positions: int | None = None,
        max_catch_up: int = MAX_CATCH_UP,
        sharpness: float = 1.0,
    ) -> None:
        """vocab_size: the target's; ids from there on are never proposed.

        sharpness: beta, proposals are drawn from softmax(beta * log q)
        """
        self._model = model
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._max_positions = max_positions
        self._max_catch_up = max_catch_up
        self._sharpness = sharpness
        self._kv_cache = model.new_kv_cache(num_blocks, block_size)

    @torch.inference_mode()
    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        segments = self._catch_up_segments(rows)
        kv_lens = [seg.start + len(seg.token_ids) for seg in segments]
        active = [idx for idx, row in enumerate(rows) if self._num_guesses(row, kv_lens[idx]) > 0]
        logits = self._forward(segments, active)  # [len(active), V_draft]
        guesses: list[list[Proposal]] = [[] for _ in rows]
        while active:
            chosen = self._choose(logits, [rows[idx] for idx in active], guesses, active)
            active = [
                idx
                for idx in chosen
                if len(guesses[idx]) < self._num_guesses(rows[idx], kv_lens[idx])
            ]
            segments = [
                _Segment(
                    rows[idx],
                    kv_lens[idx] + len(guesses[idx]) - 1,
                    [guesses[idx][-1].token_id],
                )
                for idx in active
            ]
            logits = self._forward(segments, range(len(active)))
        return [_draft(found, kv_len) for found, kv_len in zip(guesses, kv_lens, strict=True)]

    def observe(self, outcomes: Seq[Outcome]) -> None:
        return

    def forget(self, seq_id: int) -> None:
        return  # KV belongs to blocks, and blocks to the pool

    def _catch_up_segments(self, rows: Seq[DraftRow]) -> list[_Segment]:
        """What each row computes now, in the rows' order; the nearest to done are served first."""
        left = self._max_catch_up
        segments: dict[int, _Segment] = {}
        for idx in sorted(range(len(rows)), key=lambda idx: rows[idx].num_known - rows[idx].kv_len):
            row = rows[idx]
            # The last known token is computed again if need be: guessing starts from its logits.
            start = min(row.kv_len, len(row.history) - 1)
            end = min(row.num_known, self._max_positions or row.num_known, start + left)
            known = row.history[start:end]
            left -= len(known)
            segments[idx] = _Segment(row, start, known)
        return [segments[idx] for idx in range(len(rows))]

    def _num_guesses(self, row: DraftRow, kv_len: int) -> int:
        """K of a row that is caught up with all known tokens, within the model's own length."""
        if kv_len < len(row.history):
            return 0
        if self._max_positions is None:
            return row.max_tokens
        # The last guess is never fed back, so it may stand one past the model's last position.
        return min(row.max_tokens, self._max_positions - kv_len + 1)

    def _forward(self, segments: Seq[_Segment], wanted: Seq[int]) -> Tensor:
        """[len(wanted), V_draft] logits after the last token of the wanted segments.

        Segments without a token are left out; a wanted one always has at least one.
        """
        packed = [(idx, seg) for idx, seg in enumerate(segments) if len(seg.token_ids)]
        if not packed:
            return torch.empty(0, self._model.vocab_size)
        starts, input_ids, positions = [0], list[int](), list[int]()
        last = {}
        for idx, seg in packed:
            input_ids += seg.token_ids
            positions += range(seg.start, seg.start + len(seg.token_ids))
            starts.append(len(input_ids))
            last[idx] = len(input_ids) - 1
        batch = PagedBatch(
            query_start_loc=tuple(starts),
            context_lens=tuple(seg.start for _, seg in packed),
            block_tables=tuple(seg.row.block_table for _, seg in packed),
            parents=(None,) * len(packed),
            block_size=self._block_size,
        )
        return self._model.forward(
            torch.tensor(input_ids, dtype=torch.int64),
            torch.tensor(positions, dtype=torch.int64),
            batch,
            self._kv_cache,
            [last[idx] for idx in wanted],
        )

    def _choose(
        self,
        logits: Tensor,  # [len(active), V_draft]
        rows: Seq[DraftRow],
        guesses: list[list[Proposal]],
        active: Seq[int],
    ) -> list[int]:
        """Append one guess per active row; returns the rows that got one."""
        places = [
            LogitsRow(row.request, row.history, tuple(g.token_id for g in guesses[idx]))
            for row, idx in zip(rows, active, strict=True)
        ]
        purposes = [
            Purpose.TARGET if row.request.verify == "replay" else Purpose.DRAFT for row in rows
        ]
        proposals = draft_choice(
            logits, places, purposes, vocab_size=self._vocab_size, sharpness=self._sharpness
        )
        chosen = []
        for idx, proposal in zip(active, proposals, strict=True):
            if proposal is not None:
                guesses[idx].append(proposal)
                chosen.append(idx)
        return chosen


def _draft(guesses: Seq[Proposal], kv_len: int) -> Draft:
    """KV of the guesses is written too, but only the verdict tells how much of it is history."""
    probs = [guess.probs for guess in guesses if guess.probs is not None]
    return chain(
        [guess.token_id for guess in guesses],
        probs=torch.stack(probs) if probs else None,
        kv_len=kv_len,
    )


def make_draft_model(resources: DrafterResources) -> DraftModelDrafter:
    if resources.model is None:
        raise ConfigError("drafter 'draft_model' needs a model: write draft_model:PATH")
    return DraftModelDrafter(
        resources.model,
        vocab_size=resources.vocab_size,
        num_blocks=resources.num_blocks,
        block_size=resources.block_size,
        max_positions=resources.max_positions,
    )

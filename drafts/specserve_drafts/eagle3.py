"""EAGLE-3 (2503.01840): one layer that reads three of the target's hidden states guesses on.

Each step the states that the last one made known become KV (`eagle3_states.py`), the last known
token goes through the layer, and then guesses are fed back with the layer's own output in place of
the target's. Catching up is bounded per step; with K = 0 states wait in a buffer until there are
enough to be worth a product, so a row that does not speculate costs a copy per token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

import msgspec
import torch

from specserve.drafting import Draft, DraftRow, Outcome
from specserve_drafts.eagle3_files import Eagle3Config
from specserve_drafts.eagle3_head import load_eagle3_head
from specserve_drafts.eagle3_model import Eagle3Layer
from specserve_drafts.eagle3_native import NativeEagle3, NativeEagle3Weights
from specserve_drafts.eagle3_states import MAX_BUFFERED, MAX_BUFFERED_BYTES, Track, begin
from specserve_drafts.eagle3_torch import TorchEagle3
from specserve_drafts.eagle3_work import Compute, Work
from specserve_drafts.head_files import need_parts
from specserve_drafts.resources import DrafterResources
from specserve_drafts.scripted import wants_guesses

MAX_CATCH_UP: Final = 512  # slots per step, all rows together
MAX_UNSEEN: Final = 16  # steps whose outcomes wait to be looked at
WORTH_A_PRODUCT: Final = 16  # waiting states of a row that does not guess now


class Eagle3Drafter:
    name = "eagle3"
    keeps_kv = True

    def __init__(
        self,
        config: Eagle3Config,
        compute: Compute,
        *,
        block_size: int,
        max_catch_up: int = MAX_CATCH_UP,
    ) -> None:
        self.hidden_layers = config.hidden_layers
        self._compute = compute
        self._block_size = block_size
        self._max_catch_up = max_catch_up
        position_bytes = len(config.hidden_layers) * config.target_hidden_size * 4
        self._most_buffered = MAX_BUFFERED_BYTES // position_bytes  # positions of all sequences
        self._max_positions = config.layer.max_position_embeddings
        self._tracks: dict[int, Track] = {}
        self._unseen: list[Seq[Outcome]] = []  # outcomes of steps, in order

    # ---- states --------------------------------------------------------------------------

    def observe(self, outcomes: Seq[Outcome]) -> None:
        """Only kept: who does not guess for a while shall cost a step nothing. Ten steps looked at
        together take a fraction of what they take one by one, each behind a forward."""
        self._unseen.append(outcomes)
        if len(self._unseen) >= MAX_UNSEEN:
            self._look()

    def _look(self) -> None:
        for outcomes in self._unseen:
            self._see(outcomes)
        self._unseen.clear()

    def _see(self, outcomes: Seq[Outcome]) -> None:
        dtype = self._compute.dtype
        room = self._most_buffered - sum(track.num_buffered for track in self._tracks.values())
        for outcome in outcomes:
            track = self._tracks.get(outcome.seq_id)
            # A state at the last position is of no use: its slot would be one too far.
            if track is None or outcome.hidden is None or outcome.start >= self._max_positions:
                continue
            before = track.num_buffered
            track.see(outcome.start, outcome.hidden.to(dtype), min(MAX_BUFFERED, before + room))
            room += before - track.num_buffered

    def forget(self, seq_id: int) -> None:
        self._look()  # it may come back, and begin anew
        self._tracks.pop(seq_id, None)

    def _track_of(self, row: DraftRow) -> Track:
        track = self._tracks.get(row.seq_id)
        if track is None:
            whole = row.kv_len // self._block_size  # blocks of a prefix hit
            tail = self._compute.tail(row.block_table[whole - 1]) if whole else None
            track = self._tracks[row.seq_id] = begin(whole * self._block_size, tail)
        return track

    # ---- propose -------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        self._look()
        tracks = [self._track_of(row) for row in rows]
        shares = self._shares(rows, tracks)
        works = {
            idx: Work(row, track, num_slots, depth)
            for idx, (row, track, num_slots) in enumerate(zip(rows, tracks, shares, strict=True))
            if (depth := self._depth(row, track, num_slots)) or num_slots
        }
        found = dict(zip(works, self._compute.run(list(works.values())), strict=True))
        return [
            _with_claim(found[idx], track) if idx in found else Draft(kv_len=track.claim)
            for idx, track in enumerate(tracks)
        ]

    def _depth(self, row: DraftRow, track: Track, num_slots: int) -> int:
        """How many guesses may follow one another: 0 until all known tokens have their slots.

        The last known token stands at RoPE position len(history) - 2, the guess at depth d at
        len(history) + d - 2; the last guess is never fed.
        """
        is_ready = track.end + num_slots == len(row.history)
        if not is_ready or not wants_guesses(row) or not (num_slots or track.last):
            return 0
        return max(0, min(row.max_tokens, self._max_positions - len(row.history) + 2))

    def _shares(self, rows: Seq[DraftRow], tracks: Seq[Track]) -> list[int]:
        """Slots filled now, per row; rows that guess come first, those nearest to done first."""
        left = self._max_catch_up
        ready = [track.num_ready for track in tracks]
        shares = [0] * len(rows)
        for idx in sorted(
            range(len(rows)), key=lambda idx: (not wants_guesses(rows[idx]), ready[idx])
        ):
            row, track = rows[idx], tracks[idx]
            last = min(len(row.history), self._max_positions + 1)
            num_slots = min(ready[idx], last - track.end, left)
            if num_slots > 0 and (wants_guesses(row) or ready[idx] >= WORTH_A_PRODUCT):
                shares[idx] = num_slots
                left -= num_slots
        return shares


def _with_claim(draft: Draft, track: Track) -> Draft:
    return msgspec.structs.replace(draft, kv_len=track.claim)


def make_eagle3(resources: DrafterResources) -> Eagle3Drafter:
    head = resources.head
    if not isinstance(head, Eagle3Layer | NativeEagle3Weights):
        path, target = need_parts("eagle3", resources.argument, resources.target)
        head = load_eagle3_head(path, target, resources.vocab_size)
    compute: Compute
    if isinstance(head, NativeEagle3Weights):
        compute = NativeEagle3(
            head,
            vocab_size=resources.vocab_size,
            num_blocks=resources.num_blocks,
            block_size=resources.block_size,
        )
    else:
        compute = TorchEagle3(
            head,
            vocab_size=resources.vocab_size,
            num_blocks=resources.num_blocks,
            block_size=resources.block_size,
        )
    return Eagle3Drafter(head.config, compute, block_size=resources.block_size)

"""EAGLE-3 (2503.01840): one layer that reads three of the target's hidden states guesses on.

Each step the states that the last one made known become KV (`eagle3_states.py`), the last known
token goes through the layer, and then guesses are fed back with the layer's own output in place of
the target's. Catching up is bounded per step; with K = 0 states wait in a buffer until there are
enough to be worth a product, so a row that does not speculate costs a copy per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Final, NamedTuple

import msgspec
import torch
from torch import Tensor

from specserve.drafting import Draft, DraftRow, Outcome
from specserve.kv_cache import KVCache
from specserve_drafts.eagle3_attention import DenseContext
from specserve_drafts.eagle3_model import Eagle3Layer
from specserve_drafts.eagle3_states import Track, begin
from specserve_drafts.growing import Node, Vocabulary, Wish, grow
from specserve_drafts.head_files import need_parts
from specserve_drafts.resources import DrafterResources
from specserve_drafts.scripted import wants_guesses

MAX_CATCH_UP: Final = 512  # slots per step, all rows together
WORTH_A_PRODUCT: Final = 16  # waiting states of a row that does not guess now
MAX_DENSE: Final = 2**16  # context positions gathered at once, rows times the longest


class _Filling(NamedTuple):
    """Slots track.end .. track.end + num_slots - 1 of one row."""

    row: DraftRow
    track: Track
    num_slots: int


class Eagle3Drafter:
    name = "eagle3"
    keeps_kv = True

    def __init__(
        self,
        layer: Eagle3Layer,
        *,
        vocab_size: int,
        num_blocks: int,
        block_size: int,
        max_catch_up: int = MAX_CATCH_UP,
    ) -> None:
        """vocab_size: of the target's tokenizer."""
        config = layer.config
        self.hidden_layers = config.hidden_layers
        self._layer = layer
        self._vocabulary = Vocabulary(vocab_size, layer.weights.target_ids)
        self._block_size = block_size
        self._max_catch_up = max_catch_up
        self._max_positions = config.layer.max_position_embeddings
        self._kv_cache = KVCache(
            layers=1,
            num_blocks=num_blocks,
            block_size=block_size,
            kv_heads=config.layer.num_kv_heads,
            head_dim=config.layer.head_dim,
            dtype=layer.dtype,
        )
        # The state at each block's last position: [P, H']
        self._tails = torch.zeros(num_blocks, config.layer.hidden_size, dtype=layer.dtype)
        self._tracks: dict[int, Track] = {}

    # ---- states --------------------------------------------------------------------------

    @torch.inference_mode()
    def observe(self, outcomes: Seq[Outcome]) -> None:
        for outcome in outcomes:
            track = self._tracks.get(outcome.seq_id)
            # A state at the last position is of no use: its slot would be one too far.
            if track is None or outcome.hidden is None or outcome.start >= self._max_positions:
                continue
            track.see(outcome.start, outcome.hidden.to(self._layer.dtype, copy=True))

    def forget(self, seq_id: int) -> None:
        self._tracks.pop(seq_id, None)

    def _track_of(self, row: DraftRow) -> Track:
        if row.seq_id not in self._tracks:
            whole = row.kv_len // self._block_size  # blocks of a prefix hit
            tail = self._tails[row.block_table[whole - 1]] if whole else None
            self._tracks[row.seq_id] = begin(whole * self._block_size, tail)
        return self._tracks[row.seq_id]

    # ---- propose -------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        tracks = [self._track_of(row) for row in rows]
        self._fill(self._fillings(rows, tracks))
        drafts = [Draft(kv_len=track.claim) for track in tracks]
        ready = [
            idx
            for idx, (row, track) in enumerate(zip(rows, tracks, strict=True))
            if wants_guesses(row)
            and track.end == len(row.history)
            and track.last is not None
            and self._depth(row) > 0
        ]
        for group in _groups(ready, [track.end - track.base for track in tracks]):
            grown = self._grow([rows[idx] for idx in group], [tracks[idx] for idx in group])
            for idx, draft in zip(group, grown, strict=True):
                drafts[idx] = msgspec.structs.replace(draft, kv_len=tracks[idx].claim)
        return drafts

    def _depth(self, row: DraftRow) -> int:
        """How many guesses may follow one another within the layer's own length.

        The last known token stands at RoPE position len(history) - 2, the guess at depth d at
        len(history) + d - 2; the last guess is never fed.
        """
        return min(row.max_tokens, self._max_positions - len(row.history) + 2)

    def _fillings(self, rows: Seq[DraftRow], tracks: Seq[Track]) -> list[_Filling]:
        """What is filled now; rows that guess first, among them those nearest to done."""
        left = self._max_catch_up
        fillings = []
        order = sorted(
            range(len(rows)), key=lambda idx: (not wants_guesses(rows[idx]), tracks[idx].num_ready)
        )
        for idx in order:
            row, track = rows[idx], tracks[idx]
            num_slots = min(
                track.num_ready,
                min(len(row.history), self._max_positions + 1) - track.end,
                left,
            )
            if num_slots > 0 and (wants_guesses(row) or track.num_ready >= WORTH_A_PRODUCT):
                fillings.append(_Filling(row, track, num_slots))
                left -= num_slots
        return fillings

    def _fill(self, fillings: Seq[_Filling]) -> None:
        if not fillings:
            return
        states = self._states(fillings)  # per filling [num_slots, H']
        token_ids, positions, slots = list[int](), list[int](), list[int]()
        for row, track, num_slots in fillings:
            token_ids += row.history[track.end : track.end + num_slots]
            positions += range(track.end - 1, track.end - 1 + num_slots)
            slots += self._slots(row, range(track.end, track.end + num_slots))
        mixed, _ = self._layer.mixed(torch.cat(states), torch.tensor(token_ids))
        keys, values = self._layer.keys_values(mixed, torch.tensor(positions))
        self._write(keys, values, torch.tensor(slots))
        for (row, track, num_slots), own in zip(fillings, states, strict=True):
            self._keep_tails(row, track.end - 1, own)
            track.filled(num_slots, own[-1].clone())

    def _states(self, fillings: Seq[_Filling]) -> list[Tensor]:
        """Fused states that the slots are made of, per filling [num_slots, H']."""
        parts: list[Tensor] = []
        counts = []
        for _, track, num_slots in fillings:
            num_raw = num_slots - (track.carry is not None)
            counts.append(num_raw)
            parts += [track.take(num_raw)] if num_raw else []
        fused: Iterator[Tensor] = iter(())
        if parts:
            fused = iter(torch.split(self._layer.fuse(torch.cat(parts)), [n for n in counts if n]))
        states = []
        for (_, track, _), num_raw in zip(fillings, counts, strict=True):
            own = [] if track.carry is None else [track.carry[None]]
            states.append(torch.cat([*own, *([next(fused)] if num_raw else [])]))
        return states

    def _write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """[n, G, H] each, into flat slots [n]"""
        for cache, new in ((self._kv_cache.keys[0], keys), (self._kv_cache.values[0], values)):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, new)

    def _keep_tails(self, row: DraftRow, start: int, states: Tensor) -> None:
        """states [m, H'] at positions start, start + 1, ..."""
        size = self._block_size
        for block in range((start + 1) // size, (start + len(states)) // size + 1):
            position = block * size - 1
            if start <= position < start + len(states):
                self._tails[row.block_table[block - 1]] = states[position - start]

    def _slots(self, row: DraftRow, indices: range) -> list[int]:
        size = self._block_size
        return [row.block_table[index // size] * size + index % size for index in indices]

    # ---- guess ---------------------------------------------------------------------------

    def _grow(self, rows: Seq[DraftRow], tracks: Seq[Track]) -> list[Draft]:
        context = DenseContext(
            self._kv_cache,
            [
                self._slots(row, range(track.base, track.end))
                for row, track in zip(rows, tracks, strict=True)
            ],
        )
        last = torch.stack([track.last for track in tracks if track.last is not None])
        feeding = _Feeding(self._layer, context, [len(row.history) for row in rows])
        logits = feeding.root(last, [row.history[-1] for row in rows])
        wishes = [
            Wish(
                row,
                max_tokens=row.max_tokens if row.width > 1 else self._depth(row),
                max_depth=self._depth(row),
            )
            for row in rows
        ]
        return grow(wishes, logits, feeding.feed, self._vocabulary)


class _Feeding:
    """The layer's outputs for the guesses of one step."""

    def __init__(self, layer: Eagle3Layer, context: DenseContext, num_known: Seq[int]) -> None:
        self._layer = layer
        self._context = context
        self._num_known = num_known
        self._feedback: list[Tensor] = []  # [H'] each: the roots' first, then as guesses were fed
        self._index: dict[int, int] = {}  # id(node) -> order in which it was fed
        self._paths: dict[int, list[int]] = {}

    def root(self, states: Tensor, token_ids: Seq[int]) -> Tensor:
        """The last known token of each row, whose KV is in the context: [R, W] logits."""
        positions = torch.tensor([num_known - 2 for num_known in self._num_known])
        mixed, residual = self._layer.mixed(states, torch.tensor(token_ids))
        rows = range(len(token_ids))
        return self._through(
            self._layer.queries(mixed, positions), residual, rows, [[] for _ in rows]
        )

    def feed(self, nodes: Seq[Node]) -> Tensor:
        """[n, W] logits after each of n nodes of one depth."""
        num_rows = len(self._num_known)
        for node in nodes:
            self._index[id(node)] = len(self._index)
            before = self._paths[id(node.parent)] if node.parent else []
            self._paths[id(node)] = [*before, self._index[id(node)]]
        states = torch.stack(
            [
                self._feedback[
                    node.row_idx if node.parent is None else num_rows + self._index[id(node.parent)]
                ]
                for node in nodes
            ]
        )
        positions = torch.tensor([self._num_known[node.row_idx] + node.depth - 2 for node in nodes])
        mixed, residual = self._layer.mixed(states, torch.tensor([node.token_id for node in nodes]))
        self._context.add(*self._layer.keys_values(mixed, positions))
        return self._through(
            self._layer.queries(mixed, positions),
            residual,
            [node.row_idx for node in nodes],
            [self._paths[id(node)] for node in nodes],
        )

    def _through(
        self, queries: Tensor, residual: Tensor, rows: Seq[int], paths: Seq[Seq[int]]
    ) -> Tensor:
        seen = self._context.attend(queries, rows, paths)
        output = self._layer.after_attention(seen, residual)
        logits, feedback = self._layer.logits_and_feedback(output)
        self._feedback += feedback.unbind()
        return logits


def _groups(indices: Seq[int], lengths: Seq[int]) -> Iterator[list[int]]:
    """Rows of similar length together, each group within MAX_DENSE positions."""
    group: list[int] = []
    for idx in sorted(indices, key=lambda idx: lengths[idx]):
        if group and (len(group) + 1) * lengths[idx] > MAX_DENSE:
            yield group
            group = []
        group.append(idx)
    if group:
        yield group


def make_eagle3(resources: DrafterResources) -> Eagle3Drafter:
    layer = resources.head
    if not isinstance(layer, Eagle3Layer):
        path, target = need_parts("eagle3", resources.argument, resources.target)
        layer = Eagle3Layer.load(path, target, resources.vocab_size)
    return Eagle3Drafter(
        layer,
        vocab_size=resources.vocab_size,
        num_blocks=resources.num_blocks,
        block_size=resources.block_size,
    )

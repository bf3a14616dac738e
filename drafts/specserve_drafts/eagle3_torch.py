"""EAGLE-3 in torch: the readable form, the oracle of the native one, and what runs without it."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Final

import torch
from torch import Tensor

from specserve.drafting import Draft, DraftRow
from specserve.kv_cache import KVCache
from specserve_drafts.eagle3_attention import DenseContext
from specserve_drafts.eagle3_model import Eagle3Layer
from specserve_drafts.eagle3_states import State
from specserve_drafts.eagle3_work import Work, wish_of
from specserve_drafts.growing import Node, Vocabulary, grow

MAX_DENSE: Final = 2**16  # context positions gathered at once, rows times the longest


class TorchEagle3:
    """Implements `eagle3_work.Compute`."""

    def __init__(
        self, layer: Eagle3Layer, *, vocab_size: int, num_blocks: int, block_size: int
    ) -> None:
        config = layer.config.layer
        self._layer = layer
        self._vocabulary = Vocabulary(vocab_size, layer.weights.target_ids)
        self._block_size = block_size
        self._kv_cache = KVCache(
            layers=1,
            num_blocks=num_blocks,
            block_size=block_size,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=layer.dtype,
        )
        # The state at each block's last position: [P, H']
        self._tails = torch.zeros(num_blocks, config.hidden_size, dtype=layer.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self._layer.dtype

    def tail(self, block_id: int) -> State:
        return State(self._tails[block_id : block_id + 1].clone(), 0)

    def run(self, works: Seq[Work]) -> list[Draft]:
        self._fill([work for work in works if work.num_slots])
        drafts = [Draft()] * len(works)
        guessing = [idx for idx, work in enumerate(works) if work.depth]
        for group in _groups(guessing, [work.track.end - work.track.base for work in works]):
            grown = self._grow([works[idx] for idx in group])
            for idx, draft in zip(group, grown, strict=True):
                drafts[idx] = draft
        return drafts

    # ---- slots ---------------------------------------------------------------------------

    def _fill(self, works: Seq[Work]) -> None:
        if not works:
            return
        states = self._states(works)  # per row [num_slots, H']
        token_ids, positions, slots = list[int](), list[int](), list[int]()
        for row, track, num_slots, _ in works:
            token_ids += row.history[track.end : track.end + num_slots]
            positions += range(track.end - 1, track.end - 1 + num_slots)
            slots += self._slots(row, range(track.end, track.end + num_slots))
        mixed, _ = self._layer.mixed(torch.cat(states), torch.tensor(token_ids))
        keys, values = self._layer.keys_values(mixed, torch.tensor(positions))
        self._write(keys, values, torch.tensor(slots))
        for (row, track, num_slots, _), own in zip(works, states, strict=True):
            self._keep_tails(row, track.end - 1, own)
            track.filled(num_slots, State(own[-1:].clone(), 0))

    def _states(self, works: Seq[Work]) -> list[Tensor]:
        """Fused states that the slots are made of, per row [num_slots, H']."""
        parts: list[Tensor] = []
        counts = []
        for _, track, num_slots, _ in works:
            num_raw = num_slots - (track.carry is not None)
            counts.append(num_raw)
            parts += track.take(num_raw)
        fused: Iterator[Tensor] = iter(())
        if parts:
            fused = iter(torch.split(self._layer.fuse(torch.cat(parts)), [n for n in counts if n]))
        states = []
        for work, num_raw in zip(works, counts, strict=True):
            own = [] if work.track.carry is None else [_row(work.track.carry)]
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

    # ---- guesses -------------------------------------------------------------------------

    def _grow(self, works: Seq[Work]) -> list[Draft]:
        rows, tracks = [work.row for work in works], [work.track for work in works]
        context = DenseContext(
            self._kv_cache,
            [
                self._slots(row, range(track.base, track.end))
                for row, track in zip(rows, tracks, strict=True)
            ],
        )
        last = torch.cat([_row(track.last) for track in tracks if track.last is not None])
        feeding = _Feeding(self._layer, context, [len(row.history) for row in rows])
        logits = feeding.root(last, [row.history[-1] for row in rows])
        return grow([wish_of(work) for work in works], logits, feeding.feed, self._vocabulary)


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


def _row(state: State) -> Tensor:
    """[1, H']"""
    return state.rows[state.idx : state.idx + 1]


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

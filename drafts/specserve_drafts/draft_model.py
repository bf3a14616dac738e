"""A smaller language model with the target's tokenizer guesses, over the same blocks as the target.

A row that is not caught up proposes nothing. Chains are fed token by token; of a tree, all nodes
that have children are fed again at each depth (rows are few, and a small model's forward costs the
same for 16 rows as for one), so that each sees its ancestors and no other branch.
Under `replay` it proposes with the target's own noise (coupled), under the rules with a test it
samples with its own and reports the distribution.

On a device plain chains are grown there in one go (`ChainGrower`), known tokens included.

A draft whose context is shorter than the target's stops guessing at its own last position, request
by request; one in another dtype is fine, for the two never share a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import msgspec
import torch
from torch import Tensor

from specserve.drafting import Draft, DraftRow, Outcome
from specserve.errors import ConfigError
from specserve.kv_cache import KVCache
from specserve.models.interface import CausalLM, ChainAsk, ChainGrower
from specserve_drafts.growing import Node, Vocabulary, Wish, grow
from specserve_drafts.paged_draft import MAX_CATCH_UP, PagedDraft, Segment
from specserve_drafts.resources import DrafterResources


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
        chains: Callable[[KVCache], ChainGrower] | None = None,
    ) -> None:
        """vocab_size: the target's; ids from there on are never proposed

        chains: makes what grows the chains that it takes, in place of forwards
        """
        self._vocabulary = Vocabulary(vocab_size)
        self._paged = PagedDraft(
            model,
            num_blocks=num_blocks,
            block_size=block_size,
            max_positions=max_positions,
            max_catch_up=max_catch_up,
        )
        self._chains = None if chains is None else chains(self._paged.kv_cache)

    @torch.inference_mode()
    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        segments = self._paged.catch_up(rows)
        asks = self._asks(segments)
        drafts = self._grown(asks)
        others = [idx for idx in range(len(rows)) if idx not in asks]
        if others:
            by_forwards = self._by_forwards([segments[idx] for idx in others])
            drafts |= dict(zip(others, by_forwards, strict=True))
        return [drafts[idx] for idx in range(len(rows))]

    def _asks(self, segments: Seq[Segment]) -> dict[int, ChainAsk]:
        """Of those rows whose chains need no forward here, by index."""
        if self._chains is None:
            return {}
        asks = {}
        for idx, seg in enumerate(segments):
            room = self._paged.room(seg.row, seg.end)
            ask = ChainAsk(seg.row, seg.start, room)
            if room > 0 and self._chains.takes(ask):
                asks[idx] = ask
        return asks

    def _grown(self, asks: Mapping[int, ChainAsk]) -> dict[int, Draft]:
        if self._chains is None or not asks:
            return {}
        drafts = self._chains.grow(list(asks.values()))
        for ask, draft in zip(asks.values(), drafts, strict=True):
            known = len(ask.row.history)
            self._paged.is_known(ask.row, known)
            self._paged.is_written(ask.row, known, draft.token_ids[:-1], draft.parents[:-1])
        return dict(zip(asks, drafts, strict=True))

    def _by_forwards(self, segments: Seq[Segment]) -> list[Draft]:
        rows = [seg.row for seg in segments]
        rooms = [self._paged.room(row, seg.end) for row, seg in zip(rows, segments, strict=True)]
        active = [idx for idx, room in enumerate(rooms) if room > 0]
        wanted = [
            [len(seg.token_ids) - 1] if room > 0 else []
            for seg, room in zip(segments, rooms, strict=True)
        ]
        logits = self._paged.forward(segments, wanted)
        for row, seg in zip(rows, segments, strict=True):
            self._paged.is_known(row, seg.end)
        drafts = [Draft(kv_len=seg.end) for seg in segments]
        if not active:
            return drafts
        wishes = [
            Wish(
                rows[idx],
                max_tokens=rows[idx].max_tokens if rows[idx].width > 1 else rooms[idx],
                max_depth=rooms[idx],
            )
            for idx in active
        ]
        feeding = _Feeding(self._paged, wishes)
        grown = grow(wishes, logits, feeding.feed, self._vocabulary)
        feeding.remember()
        for idx, draft in zip(active, grown, strict=True):
            drafts[idx] = msgspec.structs.replace(draft, kv_len=segments[idx].end)
        return drafts

    def observe(self, outcomes: Seq[Outcome]) -> None:
        for outcome in outcomes:
            self._paged.settle(outcome)

    def forget(self, seq_id: int) -> None:
        self._paged.forget(seq_id)


class _Feeding:
    """The guesses fed so far in one step, by row."""

    def __init__(self, paged: PagedDraft, wishes: Seq[Wish]) -> None:
        self._paged = paged
        self._rows = [wish.row for wish in wishes]
        self._branches = [wish.width > 1 for wish in wishes]
        self._fed: list[list[Node]] = [[] for _ in wishes]

    def feed(self, nodes: Seq[Node]) -> Tensor:
        """[len(nodes), W] logits after each node. Nodes of a row stand together."""
        new: dict[int, int] = {}
        for node in nodes:
            self._fed[node.row_idx].append(node)
            new[node.row_idx] = new.get(node.row_idx, 0) + 1
        segments = [self._segment(row_idx) for row_idx in new]
        wanted = [
            range(len(seg.token_ids) - count, len(seg.token_ids))
            for seg, count in zip(segments, new.values(), strict=True)
        ]
        return self._paged.forward(segments, wanted)

    def _segment(self, row_idx: int) -> Segment:
        row, fed = self._rows[row_idx], self._fed[row_idx]
        num_known = len(row.history)
        if not self._branches[row_idx]:
            return Segment(row, num_known + len(fed) - 1, [fed[-1].token_id])
        return Segment(
            row, num_known, [node.token_id for node in fed], parents=self._parents(row_idx)
        )

    def _parents(self, row_idx: int) -> tuple[int, ...]:
        index = {id(node): at for at, node in enumerate(self._fed[row_idx])}
        return tuple(index[id(node.parent)] if node.parent else -1 for node in self._fed[row_idx])

    def remember(self) -> None:
        for row_idx, (row, fed) in enumerate(zip(self._rows, self._fed, strict=True)):
            self._paged.is_written(
                row,
                len(row.history),
                [node.token_id for node in fed],
                self._parents(row_idx),
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
        chains=resources.chains,
    )

"""Growing drafts over a batch of rows: chains where a node may have one child, trees otherwise.

Depth by depth: of each row the most promising nodes of the last depth are fed to the draft, all
rows in one call. A node's reach is the product of scores on its path. A row goes on while a node
of the last depth reaches further than the K-th best so far, and keeps its K furthest reaching
nodes, as EAGLE-2 does (2406.16858). A chain is the same loop, K depths of one node.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from specserve.drafting import Draft, DraftRow
from specserve.noise import Ids
from specserve.sampler import LogitsRow
from specserve_drafts.children import Place, children


@dataclass(eq=False, slots=True)
class Node:
    """One guess.

    place:  order of creation in its row, from 1: the root is 0
    reach:  the product of scores from the root to here
    prefix: token ids from the root's child to this node
    """

    row_idx: int
    place: int
    parent: Node | None
    prefix: tuple[int, ...]
    score: float
    reach: float
    probs: Tensor | None

    @property
    def token_id(self) -> int:
        return self.prefix[-1]

    @property
    def depth(self) -> int:
        """1 for what follows the last known token."""
        return len(self.prefix)


# Feeds nodes to the draft: [n] nodes of one depth -> [n, W] logits of what follows each.
Feed = Callable[[Seq[Node]], Tensor]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a draft's logits stand for; see `children`."""

    size: int
    target_ids: Ids | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """What one row is to get.

    max_tokens: most nodes, and most nodes fed
    max_depth:  most guesses in a row; the deepest are never fed
    draws:      see `Place`: a draft whose guesses do not know of one another must not draw them
    """

    row: DraftRow
    max_tokens: int
    max_depth: int
    draws: bool = True

    @property
    def width(self) -> int:
        return max(1, min(self.row.width, self.max_tokens))


class _Growth:
    """One row's nodes while they grow."""

    def __init__(self, row_idx: int, wish: Wish) -> None:
        self.row_idx = row_idx
        self.wish = wish
        self.nodes: list[Node] = []
        self.num_fed = 0

    def place_of(self, node: Node | None) -> Place:
        row = self.wish.row
        prefix = node.prefix if node else ()
        return Place(
            LogitsRow(row.request, row.history, prefix),
            node.place if node else 0,
            self.wish.width,
            row.sharpness,
            self.wish.draws,
        )

    def best(self) -> list[Node]:
        """The K furthest reaching nodes, in order of creation: parents before children."""
        if len(self.nodes) <= self.wish.max_tokens:
            return self.nodes
        kept = sorted(self.nodes, key=lambda node: -node.reach)[: self.wish.max_tokens]
        return sorted(kept, key=lambda node: node.place)

    def to_feed(self, latest: Seq[Node]) -> list[Node]:
        """Which of the last depth's nodes deserve children."""
        wish = self.wish
        if not latest or latest[0].depth >= wish.max_depth:
            return []
        lowest = -1.0
        if len(self.nodes) >= wish.max_tokens:
            lowest = min(node.reach for node in self.best())
        room = min(wish.width, wish.max_tokens - self.num_fed)
        ahead = sorted(latest, key=lambda node: -node.reach)[:room]
        chosen = [node for node in ahead if node.reach > lowest]
        self.num_fed += len(chosen)
        return chosen


def grow(wishes: Seq[Wish], root_logits: Tensor, feed: Feed, vocabulary: Vocabulary) -> list[Draft]:
    """One draft per wish, in order; kv_len is for the caller to fill in.

    root_logits: [len(wishes), W] of what follows each row's last known token
    """
    growths = [_Growth(idx, wish) for idx, wish in enumerate(wishes)]
    parents: list[tuple[_Growth, Node | None]] = [(growth, None) for growth in growths]
    logits = root_logits
    while parents:
        latest = _bear(parents, logits, vocabulary)
        parents = []
        for growth in growths:
            parents += [(growth, node) for node in growth.to_feed(latest.get(growth.row_idx, []))]
        if parents:
            logits = feed([node for _, node in parents if node is not None])
    return [_draft(growth.best()) for growth in growths]


def _bear(
    parents: Seq[tuple[_Growth, Node | None]], logits: Tensor, vocabulary: Vocabulary
) -> dict[int, list[Node]]:
    """Give each parent its children; returns the new nodes by row."""
    latest: dict[int, list[Node]] = {growth.row_idx: [] for growth, _ in parents}
    families = children(
        logits,
        [growth.place_of(node) for growth, node in parents],
        vocab_size=vocabulary.size,
        target_ids=vocabulary.target_ids,
    )
    for (growth, parent), family in zip(parents, families, strict=True):
        for guess in family:
            node = Node(
                row_idx=growth.row_idx,
                place=len(growth.nodes) + 1,
                parent=parent,
                prefix=(*(parent.prefix if parent else ()), guess.token_id),
                score=guess.score,
                reach=guess.score * (parent.reach if parent else 1.0),
                probs=guess.probs,
            )
            growth.nodes.append(node)
            latest[growth.row_idx].append(node)
    return latest


def _draft(nodes: Seq[Node]) -> Draft:
    index = {id(node): at for at, node in enumerate(nodes)}
    laws = [node.probs for node in nodes if node.probs is not None]
    return Draft(
        token_ids=tuple(node.token_id for node in nodes),
        parents=tuple(index[id(node.parent)] if node.parent else -1 for node in nodes),
        probs=torch.stack(laws) if laws else None,
        scores=tuple(node.score for node in nodes),
    )

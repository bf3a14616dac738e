"""Drafters that are a head on the target: loaded before memory is planned, for they take some."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import Final

from specserve_drafts.eagle3_head import load_eagle3_head
from specserve_drafts.head_files import Head, TargetParts, need_parts
from specserve_drafts.medusa import load_medusa
from specserve_drafts.mlp_speculator import load_mlp_speculator
from specserve_drafts.shipped import checkpoint_of

# (path, target, vocab_size of the target's tokenizer) -> head
HEADS: Final[Mapping[str, Callable[[str, TargetParts, int], Head]]] = {
    "eagle3": load_eagle3_head,
    "medusa": load_medusa,
    "mlp_speculator": load_mlp_speculator,
}


def load_heads(
    specs: Seq[tuple[str, str | None]], target: TargetParts | None, *, vocab_size: int
) -> dict[str, Head]:
    """By drafter, those of the (name, argument) pairs that are heads. ConfigError, ModelError."""
    heads = {}
    for name, argument in specs:
        if name in HEADS:
            path, parts = need_parts(name, argument, target)
            heads[name] = HEADS[name](checkpoint_of(name, path), parts, vocab_size)
    return heads

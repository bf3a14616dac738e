"""PARD (2504.18583): a draft language model that says a whole block in one forward.

It is fed what it does not know yet and then mask tokens; the row after the last known token guesses
the first unknown one, each mask row the next. A causal model's known rows are not touched by masks,
so their KV stays; the masks' is written behind them and never counted.
Rows of a block do not know one another's guesses, so they propose the likeliest tokens, or under
`replay` those that share the target's noise; drawn independently a block would not hang together
(verification.md 2.6, 4: 1.16 accepted instead of 2.96).

Format: a causal language model whose config.json names the mask as `pard_token` (or
`ptd_token_id`).
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any  # JSON documents

import msgspec
import torch
from torch import Tensor

from specserve.drafting import Draft, DraftRow
from specserve.errors import ConfigError, ModelError
from specserve.models.interface import CausalLM
from specserve.weights import read_config, resolve_model
from specserve_drafts.growing import Node, Vocabulary, Wish, grow
from specserve_drafts.paged_draft import MAX_CATCH_UP, PagedDraft, Segment
from specserve_drafts.resources import DrafterResources


class ParallelDrafter:
    name = "pard"
    keeps_kv = True
    hidden_layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: CausalLM,
        *,
        mask_token: int,
        vocab_size: int,
        num_blocks: int,
        block_size: int,
        max_positions: int | None = None,
        max_catch_up: int = MAX_CATCH_UP,
    ) -> None:
        """vocab_size: the target's; ids from there on are never proposed."""
        self._mask_token = mask_token
        self._vocabulary = Vocabulary(vocab_size)
        self._paged = PagedDraft(
            model,
            num_blocks=num_blocks,
            block_size=block_size,
            max_positions=max_positions,
            max_catch_up=max_catch_up,
        )

    @torch.inference_mode()
    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        known = self._paged.catch_up(rows)
        rooms = [self._paged.room(row, seg.end) for row, seg in zip(rows, known, strict=True)]
        segments = [
            Segment(seg.row, seg.start, [*seg.token_ids, *[self._mask_token] * (room - 1)])
            for seg, room in zip(known, rooms, strict=True)
        ]
        wanted = [
            range(len(seg.token_ids) - room, len(seg.token_ids))
            for seg, room in zip(segments, rooms, strict=True)
        ]
        logits = self._paged.forward(segments, wanted)  # [sum of rooms, W]
        # One short of what is valid, which is known here: the runner adds to a full claim the
        # guesses it accepts, as fed ones, and these were not.
        drafts = [
            Draft(kv_len=seg.end - (room > 0)) for seg, room in zip(known, rooms, strict=True)
        ]
        for row, seg in zip(rows, known, strict=True):
            self._paged.is_known(row, seg.end)
        active = [idx for idx, room in enumerate(rooms) if room > 0]
        if not active:
            return drafts
        first = torch.tensor([0, *rooms]).cumsum(0)[active]  # each active row's first logits
        wishes = [
            Wish(
                rows[idx],
                max_tokens=rows[idx].max_tokens if rows[idx].width > 1 else rooms[idx],
                max_depth=rooms[idx],
                draws=False,
            )
            for idx in active
        ]

        def feed(nodes: Seq[Node]) -> Tensor:
            return logits[[int(first[node.row_idx]) + node.depth for node in nodes]]

        grown = grow(wishes, logits[first], feed, self._vocabulary)
        for idx, draft in zip(active, grown, strict=True):
            drafts[idx] = msgspec.structs.replace(draft, kv_len=drafts[idx].kv_len)
        return drafts

    def forget(self, seq_id: int) -> None:
        self._paged.forget(seq_id)


def mask_token_of(config: Mapping[str, Any], source: str, vocab_size: int) -> int:
    """vocab_size: rows of the draft's embedding."""
    fields = ("pard_token", "ptd_token_id")
    found = next((config[field] for field in fields if config.get(field) is not None), None)
    if found is None:
        raise ModelError(
            f"{source}: config.json names no mask token ({' or '.join(fields)}): it is no PARD "
            "model; use draft_model:PATH for an ordinary one"
        )
    if not isinstance(found, int) or not 0 <= found < vocab_size:
        raise ModelError(
            f"{source}: the mask token {found!r} is none of the model's {vocab_size} tokens"
        )
    return found


def make_pard(resources: DrafterResources) -> ParallelDrafter:
    if resources.model is None or not resources.argument:
        raise ConfigError("drafter 'pard' needs a model: write pard:PATH")
    config = read_config(resolve_model(resources.argument))
    return ParallelDrafter(
        resources.model,
        mask_token=mask_token_of(config, resources.argument, resources.model.vocab_size),
        vocab_size=resources.vocab_size,
        num_blocks=resources.num_blocks,
        block_size=resources.block_size,
        max_positions=resources.max_positions,
    )

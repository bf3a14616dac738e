"""Medusa (2401.10774): heads on the target's last state, head i guesses the token i + 2 behind it.

The state at the last computed position already chose the last known token, so head 0 guesses the
first unknown one. Heads do not know of one another: what they say is a marginal, so under rules
with a test their likeliest tokens are given, never drawn independently (verification.md 2.6, 4).

Format: config.json with medusa_num_heads and medusa_num_layers; tensors `i.j.linear.{weight,bias}`
for the residual blocks of head i and `i.<layers>.weight` for its matrix over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specserve.drafting import NO_DRAFT, Draft, DraftRow, Outcome
from specserve.models.linear import Weight
from specserve_drafts.growing import Node, Vocabulary, Wish, grow
from specserve_drafts.head_files import (
    TargetParts,
    Tensors,
    need_parts,
    read_checkpoint,
    whole_number,
)
from specserve_drafts.last_states import LastStates
from specserve_drafts.resources import DrafterResources

FILE = "medusa_lm_head.safetensors"
HOW_TO_CONVERT = (
    "Convert Medusa's medusa_lm_head.pt once, where you trust it: python -c \"import torch; from "
    "safetensors.torch import save_file; save_file(torch.load('medusa_lm_head.pt', "
    f"weights_only=True), '{FILE}')\""
)


class MedusaHead(NamedTuple):
    """blocks: (weight [D, D], bias [D]) each; out: [V, D]"""

    blocks: tuple[tuple[Weight, Tensor], ...]
    out: Weight

    def logits(self, states: Tensor) -> Tensor:
        """[n, D] -> [n, V]"""
        x = states
        for weight, bias in self.blocks:
            x = x + F.silu(weight.apply(x) + bias)
        return self.out.apply(x)


class MedusaHeads(NamedTuple):
    heads: tuple[MedusaHead, ...]

    def weight_bytes(self) -> int:
        return sum(
            head.out.nbytes + sum(weight.nbytes + bias.nbytes for weight, bias in head.blocks)
            for head in self.heads
        )

    def kv_bytes_per_token(self, block_size: int) -> int:
        return 0


class MedusaDrafter:
    name = "medusa"
    keeps_kv = False

    def __init__(self, heads: MedusaHeads, target: TargetParts, *, vocab_size: int) -> None:
        self.hidden_layers = (target.num_layers,)
        self._heads = heads.heads
        self._final_norm = target.final_norm
        self._vocabulary = Vocabulary(vocab_size)
        self._states = LastStates(target.dtype)

    @torch.inference_mode()
    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(rows)
        known = {
            idx: state
            for idx, row in enumerate(rows)
            if (state := self._states.of(row)) is not None
        }
        if not known:
            return drafts
        states = self._final_norm(torch.stack(list(known.values())))  # [R, D]
        wishes = [
            Wish(
                rows[idx],
                max_tokens=rows[idx].max_tokens
                if rows[idx].width > 1
                else min(rows[idx].max_tokens, len(self._heads)),
                max_depth=min(rows[idx].max_tokens, len(self._heads)),
                draws=False,
            )
            for idx in known
        ]

        def feed(nodes: Seq[Node]) -> Tensor:
            by_row = sorted({node.row_idx for node in nodes})
            logits = self._heads[nodes[0].depth].logits(states[by_row])
            return logits[[by_row.index(node.row_idx) for node in nodes]]

        grown = grow(wishes, self._heads[0].logits(states), feed, self._vocabulary)
        for idx, draft in zip(known, grown, strict=True):
            drafts[idx] = draft
        return drafts

    @torch.inference_mode()
    def observe(self, outcomes: Seq[Outcome]) -> None:
        self._states.observe(outcomes)

    def forget(self, seq_id: int) -> None:
        self._states.forget(seq_id)


def load_medusa(path: str, target: TargetParts, vocab_size: int) -> MedusaHeads:
    """ModelError says what does not fit, and how to convert a pickle."""
    config, tensors = read_checkpoint(path, FILE, HOW_TO_CONVERT)
    num_heads = whole_number(config, path, "medusa_num_heads", None)
    num_layers = whole_number(config, path, "medusa_num_layers", 1)
    own = Tensors(
        path,
        {name.removeprefix("medusa_head."): tensor for name, tensor in tensors.items()},
        target.dtype,
    )
    width = target.hidden_size
    heads = []
    for head in range(num_heads):
        blocks = tuple(
            (
                target.pack(own.take(f"{head}.{layer}.linear.weight", width, width)),
                own.take(f"{head}.{layer}.linear.bias", width),
            )
            for layer in range(num_layers)
        )
        out = f"{head}.{num_layers}.weight"
        rows = max(own.num_rows(out), vocab_size)  # padding is fine, missing tokens are not
        heads.append(MedusaHead(blocks, target.pack(own.take(out, rows, width))))
    own.refuse_leftovers()
    return MedusaHeads(tuple(heads))


def make_medusa(resources: DrafterResources) -> MedusaDrafter:
    path, target = need_parts("medusa", resources.argument, resources.target)
    heads = resources.head
    if not isinstance(heads, MedusaHeads):
        heads = load_medusa(path, target, resources.vocab_size)
    return MedusaDrafter(heads, target, vocab_size=resources.vocab_size)

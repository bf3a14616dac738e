"""MLP speculator (2404.19124): a small recurrent network from the target's last state and tokens.

Step i: state' = gelu(norm(proj_i(state) + c * emb_i(token))), logits = head_i(state'). The first
state is the target's (normed) one before the last known token, the first token is that token.

Format: model_type mlp_speculator; vocab_size, emb_dim (the target's width), inner_dim, n_predict,
tie_weights, scale_input; tensors `[speculator.]{emb,proj,head}.i.weight`, `ln.i.{weight,bias}`.
Tied, all steps share number 0, but for proj, where the steps after the first share number 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specserve.drafting import NO_DRAFT, Draft, DraftRow, Outcome
from specserve.errors import ModelError
from specserve.models.linear import Weight
from specserve_drafts.growing import Node, Vocabulary, Wish, grow
from specserve_drafts.head_files import (
    TargetParts,
    Tensors,
    flag,
    need_parts,
    read_checkpoint,
    refuse_other_width,
    whole_number,
)
from specserve_drafts.last_states import LastStates
from specserve_drafts.resources import DrafterResources

_EPS = 1e-6  # of all its norms; no field of the format changes it


class MlpStep(NamedTuple):
    """E the target's width, I the inner one: proj [I, E or I], norm and bias [I]."""

    embedding: Tensor  # [V, I]
    proj: Weight
    norm: Tensor
    bias: Tensor
    head: Weight  # [V, I]


class MlpSpeculator(NamedTuple):
    steps: tuple[MlpStep, ...]
    scales_input: bool

    def weight_bytes(self) -> int:
        """Steps may share tensors: each counts once."""
        parts = [part for step in self.steps for part in step]
        return sum({id(part): part.nbytes for part in parts}.values())

    def kv_bytes_per_token(self, block_size: int) -> int:
        return 0

    def first_state(self, states: Tensor) -> Tensor:
        """[n, E] of the target -> [n, E]"""
        return _rms(states) / math.sqrt(2) if self.scales_input else states

    def advance(self, step_idx: int, states: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """States [n, E or I], tokens [n] -> ([n, V] logits, [n, I] states)"""
        step = self.steps[step_idx]
        inner = step.norm.shape[0]
        # Both shares of the sum keep its variance whatever the number of steps.
        state_share = 0.5 ** (0.5 / len(self.steps))
        token_share = math.sqrt((1 - state_share**2) * inner / 2)
        embedded = F.embedding(token_ids, step.embedding) * (token_share / state_share)
        x = F.gelu(_rms(step.proj.apply(states) + embedded) * step.norm + step.bias)
        return step.head.apply(x), x


def _rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _EPS)


class MlpSpeculatorDrafter:
    name = "mlp_speculator"
    keeps_kv = False

    def __init__(self, speculator: MlpSpeculator, target: TargetParts, *, vocab_size: int) -> None:
        self.hidden_layers = (target.num_layers,)
        self._speculator = speculator
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
        first = self._speculator.first_state(self._final_norm(torch.stack(list(known.values()))))
        last_ids = torch.tensor([rows[idx].history[-1] for idx in known])
        logits, roots = self._speculator.advance(0, first, last_ids)
        num_steps = len(self._speculator.steps)
        wishes = [
            Wish(
                rows[idx],
                max_tokens=rows[idx].max_tokens
                if rows[idx].width > 1
                else min(rows[idx].max_tokens, num_steps),
                max_depth=min(rows[idx].max_tokens, num_steps),
            )
            for idx in known
        ]
        after: dict[int, Tensor] = {}  # id(node) -> [I]

        def feed(nodes: Seq[Node]) -> Tensor:
            before = [after[id(n.parent)] if n.parent else roots[n.row_idx] for n in nodes]
            token_ids = torch.tensor([node.token_id for node in nodes])
            logits, states = self._speculator.advance(
                nodes[0].depth, torch.stack(before), token_ids
            )
            after.update((id(node), state) for node, state in zip(nodes, states, strict=True))
            return logits

        for idx, draft in zip(known, grow(wishes, logits, feed, self._vocabulary), strict=True):
            drafts[idx] = draft
        return drafts

    @torch.inference_mode()
    def observe(self, outcomes: Seq[Outcome]) -> None:
        self._states.observe(outcomes)

    def forget(self, seq_id: int) -> None:
        self._states.forget(seq_id)


def load_mlp_speculator(path: str, target: TargetParts, vocab_size: int) -> MlpSpeculator:
    """ModelError says what does not fit."""
    config, tensors = read_checkpoint(path)
    if config.get("model_type") != "mlp_speculator":
        raise ModelError(
            f"{path}: model_type is {config.get('model_type')!r}, it must be 'mlp_speculator'"
        )
    emb_dim = whole_number(config, path, "emb_dim", None)
    refuse_other_width(path, "emb_dim", emb_dim, target.hidden_size)
    inner = whole_number(config, path, "inner_dim", emb_dim)
    num_steps = whole_number(config, path, "n_predict", None)
    own_vocab = whole_number(config, path, "vocab_size", None)
    if own_vocab < vocab_size:
        raise ModelError(
            f"{path}: vocab_size is {own_vocab}, but the target has {vocab_size} tokens: this "
            "drafter was trained for another target"
        )
    tied = flag(config, path, "tie_weights")
    own = Tensors(
        path,
        {name.removeprefix("speculator."): tensor for name, tensor in tensors.items()},
        target.dtype,
    )

    def step(idx: int) -> MlpStep:
        at = 0 if tied else idx
        proj = min(idx, 1) if tied else idx
        return MlpStep(
            embedding=own.take(f"emb.{at}.weight", own_vocab, inner),
            proj=target.pack(own.take(f"proj.{proj}.weight", inner, inner if idx else emb_dim)),
            norm=own.take(f"ln.{at}.weight", inner),
            bias=own.take(f"ln.{at}.bias", inner),
            head=target.pack(own.take(f"head.{at}.weight", own_vocab, inner)),
        )

    steps = [step(idx) for idx in range(min(num_steps, 2) if tied else num_steps)]
    if tied:  # one copy of each matrix, however many steps
        steps = [step._replace(embedding=steps[0].embedding, head=steps[0].head) for step in steps]
        steps += steps[-1:] * (num_steps - len(steps))
        own.refuse_leftovers("emb.", "proj.", "ln.", "head.")
    else:
        own.refuse_leftovers()
    return MlpSpeculator(tuple(steps), flag(config, path, "scale_input"))


def make_mlp_speculator(resources: DrafterResources) -> MlpSpeculatorDrafter:
    path, target = need_parts("mlp_speculator", resources.argument, resources.target)
    speculator = resources.head
    if not isinstance(speculator, MlpSpeculator):
        speculator = load_mlp_speculator(path, target, resources.vocab_size)
    return MlpSpeculatorDrafter(speculator, target, vocab_size=resources.vocab_size)

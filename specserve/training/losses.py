"""What a draft is taught: to be accepted.

A guess drawn from q where the target's law is p is accepted with probability sum(min(p, q)), the
overlap (1 - total variation); common-noise verification comes close to it. Its gradient is weak
where p and q hardly meet, and there KL is strong: the mixture (LK, after the losses of the
`speculators` project) takes KL with weight exp(-3 * overlap) and the overlap with the rest.

Laws are sparse: the target's best M tokens among those that the draft knows, with their
probabilities under the whole law. Below the best 64 hardly any mass is left at the temperatures
that are served, and what is left out cannot be won by a draft that fits the rest.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

BLEND_RATE = 3.0  # of exp(-rate * overlap), the weight of KL
LOSSES = ("lk", "kl", "overlap")


class Law(NamedTuple):
    """The target's law at n places, at one temperature.

    entries:   [n, M] int64 of the draft's vocabulary
    log_probs: [n, M] fp32, of the law over the whole vocabulary: exp sums to at most 1
    is_known:  [n] bool: the target's likeliest token is one that the draft knows
    """

    entries: Tensor
    log_probs: Tensor
    is_known: Tensor


class Parts(NamedTuple):
    """Per place, [n] fp32."""

    kl: Tensor  # nats, of the law restricted to the draft's vocabulary
    overlap: Tensor  # 0..1, with the law over the whole vocabulary


def parts(logits: Tensor, law: Law, temperature: float) -> Parts:
    """logits: [n, W] of the draft, before temperature."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    own = wide.gather(1, law.entries) - torch.logsumexp(wide, dim=1, keepdim=True)  # [n, M] log q
    restricted = torch.log_softmax(law.log_probs, dim=1)
    kl = (restricted.exp() * (restricted - own)).sum(dim=1)
    overlap = torch.minimum(own, law.log_probs).exp().sum(dim=1)
    return Parts(kl, overlap)


def blend_of(overlap: Tensor) -> Tensor:
    """[n] weight of KL: constant in the backward pass."""
    return torch.exp(-BLEND_RATE * overlap.detach())


def loss_of(kind: str, found: Parts, blend: Tensor | None = None) -> Tensor:
    """[n] of one of LOSSES. blend: [n] weight of KL in `lk`; None: blend_of."""
    if kind == "kl":
        return found.kl
    if kind == "overlap":
        return 1 - found.overlap
    weight = blend_of(found.overlap) if blend is None else blend
    return weight * found.kl + (1 - weight) * (1 - found.overlap)


def law_of(logits: Tensor, target_ids: Tensor, num_top: int, temperature: float) -> Law:
    """From the target's logits [n, V] and the target's ids [W] of the draft's entries."""
    scaled = logits / temperature
    mass = torch.logsumexp(scaled, dim=1, keepdim=True)
    known = scaled[:, target_ids]
    best, entries = known.topk(min(num_top, known.shape[1]), dim=1)
    return Law(entries, best - mass, best[:, 0] >= scaled.max(dim=1).values)


def decayed(depth: int, decay: float) -> float:
    """Weight of the loss at a depth: deep guesses matter only where all before were right."""
    return math.pow(decay, depth)

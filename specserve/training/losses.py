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
from torch.autograd.function import FunctionCtx

_ROWS = 32  # of logits at a time: 1 MB at W = 8,192
_ROWS_OF_TARGET = 8  # 1.6 MB at V = 49,152
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
    own = log_probs_at(logits, law.entries, temperature)  # [n, M] log q
    restricted = torch.log_softmax(law.log_probs, dim=1)
    kl = (restricted.exp() * (restricted - own)).sum(dim=1)
    overlap = torch.minimum(own, law.log_probs).exp().sum(dim=1)
    return Parts(kl, overlap)


class _LogProbsAt(torch.autograd.Function):
    """See log_probs_at. A few rows at a time stay in the cache, and nothing wide is kept: in plain
    operations a step of a head with 8,192 entries spent half its time here.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, logits: Tensor, entries: Tensor, temperature: float) -> Tensor:
        kind = torch.promote_types(logits.dtype, torch.float32)
        out = torch.empty(entries.shape, dtype=kind, device=logits.device)
        mass = torch.empty(len(logits), 1, dtype=kind, device=logits.device)
        for first in range(0, len(logits), _ROWS):
            rows = slice(first, first + _ROWS)
            wide = logits[rows].to(kind) / temperature
            mass[rows] = torch.logsumexp(wide, dim=1, keepdim=True)
            out[rows] = wide.gather(1, entries[rows]) - mass[rows]
        ctx.save_for_backward(logits, entries, mass)
        ctx.temperature = temperature  # type: ignore[attr-defined] # torch's way
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits, entries, mass = ctx.saved_tensors  # type: ignore[attr-defined] # torch's way
        temperature = ctx.temperature  # type: ignore[attr-defined] # torch's way
        [gradient] = gradients  # [n, M]
        out = torch.empty_like(logits)
        for first in range(0, len(logits), _ROWS):
            rows = slice(first, first + _ROWS)
            wide = (logits[rows].to(mass.dtype) / temperature).sub_(mass[rows]).exp_()
            wide *= -gradient[rows].sum(dim=1, keepdim=True)
            out[rows] = wide.scatter_add_(1, entries[rows], gradient[rows]).div_(temperature)
        return out, None, None


def log_probs_at(logits: Tensor, entries: Tensor, temperature: float) -> Tensor:
    """[n, W] logits, [n, M] entries -> [n, M] fp32 log softmax(logits / temperature) there."""
    found: Tensor = _LogProbsAt.apply(logits, entries, temperature)  # type: ignore[no-untyped-call]
    return found


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
    rows = [
        _law_of_few(few, target_ids, num_top, temperature)
        for few in torch.split(logits, _ROWS_OF_TARGET)
    ]
    if not rows:
        return _law_of_few(logits, target_ids, num_top, temperature)
    return Law(*(torch.cat([own[part] for own in rows]) for part in range(3)))


def _law_of_few(logits: Tensor, target_ids: Tensor, num_top: int, temperature: float) -> Law:
    highest = logits.amax(dim=1, keepdim=True)
    mass = ((logits - highest) / temperature).exp_().sum(dim=1, keepdim=True).log_()
    best, entries = logits[:, target_ids].topk(min(num_top, len(target_ids)), dim=1)
    log_probs = (best - highest) / temperature - mass
    return Law(entries, log_probs, best[:, 0] >= highest[:, 0])


def decayed(depth: int, decay: float) -> float:
    """Weight of the loss at a depth: deep guesses matter only where all before were right."""
    return math.pow(decay, depth)

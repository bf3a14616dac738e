"""Rotary position embedding: default, linear, llama3 and yarn, as transformers computes them.

Angles are fp32 whatever the model's dtype, because checkpoints were trained that way. Cosines are
taken per step for the step's own positions: no table to size, and a position always gets the same
bits (torch.cos gives a number the same bits anywhere in a tensor; the tests hold it).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specserve.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """[H/2] fp32 radians per position of each pair, and the factor on cosine and sine."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim  # [H/2]
    plain = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, head_dim), _yarn_attention_factor(rope)
    return plain, 1.0


def cos_sin(
    positions: Tensor, inv_freq: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """positions [T] -> cosine and signed sine, [T, 1, H] each, for `rotate`."""
    angles = positions.float()[:, None] * inv_freq  # [T, H/2]
    cos, sin = torch.cos(angles) * factor, torch.sin(angles) * factor
    cos = torch.cat([cos, cos], dim=-1).to(dtype)
    sin = torch.cat([-sin, sin], dim=-1).to(dtype)
    return cos[:, None], sin[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, H], cos and sin [T, 1, H] -> [T, heads, H].

    Products and sum are separate operations: fused ones round otherwise in the tail of a vector.
    """
    return x * cos + torch.roll(x, x.shape[-1] // 2, dims=-1) * sin


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are stretched, short ones kept, those between blended."""
    low_wavelen = rope.original_max_positions / rope.low_freq_factor
    high_wavelen = rope.original_max_positions / rope.high_freq_factor
    wavelen = 2 * math.pi / plain
    stretched = torch.where(wavelen > low_wavelen, plain / rope.factor, plain)
    smooth = (rope.original_max_positions / wavelen - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    between = ~(wavelen < high_wavelen) & ~(wavelen > low_wavelen)
    return torch.where(between, blended, stretched)


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """Pairs that turn often extrapolate, pairs that turn seldom interpolate, a ramp between."""

    def pair_that_turns(num_turns: float) -> float:
        turns = rope.original_max_positions / (num_turns * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # no division by zero
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    extrapolates = 1 - torch.clamp((pairs - low) / (high - low), 0, 1)  # [H/2]
    wavelen = rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    return (1.0 / (rope.factor * wavelen)) * (1 - extrapolates) + (1.0 / wavelen) * extrapolates


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def magnitude(scale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * scale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return magnitude(rope.mscale) / magnitude(rope.mscale_all_dim)
    return magnitude(1.0)

"""Pieces of a Llama layer for training: fp32, but for products, which autocast may make bf16."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from specserve.models.config import ModelConfig
from specserve.models.rope import cos_sin, inverse_frequencies, rotate

Params = dict[str, Tensor]


class Turn:
    """Rotary positions of one model."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._inv_freq, self._factor = inverse_frequencies(config.rope, config.head_dim)
        self._dtype = dtype

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [..., heads, H] at positions [...] -> the same shape."""
        flat = positions.reshape(-1)
        cos, sin = cos_sin(flat, self._inv_freq.to(flat.device), self._factor, self._dtype)
        shape = (*positions.shape, 1, x.shape[-1])
        return rotate(x, cos.view(shape), sin.view(shape))


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm in the weight's dtype."""
    wide = x.to(weight.dtype)
    out: Tensor = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * weight
    return out


def heads(x: Tensor, params: Params, name: str, head_dim: int) -> Tensor:
    """x [..., in] -> [..., heads, H]"""
    weight = params[f"{name}.weight"]
    out: Tensor = F.linear(x, weight)
    return out.view(*out.shape[:-1], -1, head_dim).to(weight.dtype)


def mlp(x: Tensor, params: Params, prefix: str) -> Tensor:
    gate = F.linear(x, params[f"{prefix}.gate_proj.weight"])
    up = F.linear(x, params[f"{prefix}.up_proj.weight"])
    out: Tensor = F.linear(F.silu(gate) * up, params[f"{prefix}.down_proj.weight"])
    return out


def random_matrix(generator: torch.Generator, rows: int, columns: int, scale: float = 1) -> Tensor:
    """Normal, with the deviation that keeps a unit input's scale (times `scale`)."""
    return torch.randn(rows, columns, generator=generator) * (scale / math.sqrt(columns))

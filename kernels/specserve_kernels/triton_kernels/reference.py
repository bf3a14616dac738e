"""What each Triton kernel computes, in readable torch: the oracle of its tests.

Half-precision inputs are computed in fp32 and rounded where the kernels round.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x [T, C], weight [C] -> [T, C] in x's dtype; rounded before the weight, as models do."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (normed.to(x.dtype).float() * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """residual [T, C] becomes residual + x, in place; returns its rms_norm, [T, C]."""
    residual.copy_((residual.float() + x.float()).to(residual.dtype))
    return rms_norm(residual, weight, epsilon)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, K] @ weight [N, K].T -> [M, N] in x's dtype, summed in fp64."""
    return (x.double() @ weight.double().T).to(x.dtype)

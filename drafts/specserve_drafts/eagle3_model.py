"""The one layer of an EAGLE-3 drafter, in plain tensor operations on rows.

A row is (h, token): h is either three of the target's states through `fuse`, or the layer's own
output for the position before (`feedback`). The layer's key and value need the row alone, so
catching up costs two products per token, and only rows that guess go through attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specserve.kv_cache import kv_bytes_per_token
from specserve.models.linear import Weight
from specserve.models.rope import cos_sin, inverse_frequencies, rotate
from specserve_drafts.eagle3_files import Eagle3Config, Eagle3Weights, load_eagle3
from specserve_drafts.head_files import TargetParts


class Eagle3Layer:
    """n rows, A hidden layers of the target, D its width, H' the draft's, N, G, H as everywhere."""

    def __init__(self, config: Eagle3Config, weights: Eagle3Weights) -> None:
        self.config = config
        self.weights = weights
        self.dtype = weights.norm.dtype
        self._inv_freq, self._rope_factor = inverse_frequencies(
            config.layer.rope, config.layer.head_dim
        )

    @classmethod
    def load(cls, path: str, target: TargetParts, vocab_size: int) -> Eagle3Layer:
        return cls(*load_eagle3(path, target, vocab_size=vocab_size))

    def weight_bytes(self) -> int:
        return self.weights.nbytes()

    def kv_bytes_per_token(self, block_size: int) -> int:
        """Keys and values, and the share of one state per block (rounded up)."""
        layer = self.config.layer
        state = -(-layer.hidden_size * self.dtype.itemsize // block_size)
        return state + kv_bytes_per_token(
            layers=1, kv_heads=layer.num_kv_heads, head_dim=layer.head_dim, dtype=self.dtype
        )

    def fuse(self, hidden: Tensor) -> Tensor:
        """[n, A, D] of the target -> [n, H']"""
        num_rows = hidden.shape[0]
        x = hidden.to(self.dtype)
        if self.weights.input_norm is not None:
            x = self._norm(x.reshape(num_rows, -1), self.weights.input_norm).view_as(hidden)
        if self.weights.fc_norms:
            parts = [self._norm(x[:, idx], own) for idx, own in enumerate(self.weights.fc_norms)]
            x = torch.stack(parts, dim=1)
        return self.weights.fc.apply(x.reshape(num_rows, -1))

    def mixed(self, hidden: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """h [n, H'] and tokens [n] -> ([n, 2H'] what attention reads, [n, H'] residual)"""
        embedded = F.embedding(token_ids, self.weights.embedding).to(self.dtype)
        normed = self._norm(hidden, self.weights.hidden_norm)
        residual = normed if self.config.norm_before_residual else hidden
        embedded = self._norm(embedded, self.weights.embed_norm)
        return torch.cat([embedded, normed], dim=-1), residual

    def keys_values(self, mixed: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[n, 2H'] at positions [n] -> keys and values [n, G, H]"""
        layer = self.config.layer
        both = _apply(self.weights.key_value, mixed, self.weights.key_value_bias)
        both = both.view(-1, 2, layer.num_kv_heads, layer.head_dim)
        keys = both[:, 0]
        if self.weights.qk_norm is not None:
            keys = self._norm(keys, self.weights.qk_norm[1])
        return rotate(keys, *self._turn(positions)), both[:, 1]

    def queries(self, mixed: Tensor, positions: Tensor) -> Tensor:
        """[n, 2H'] at positions [n] -> [n, N, H]"""
        layer = self.config.layer
        queries = _apply(self.weights.query, mixed, self.weights.query_bias)
        queries = queries.view(-1, layer.num_heads, layer.head_dim)
        if self.weights.qk_norm is not None:
            queries = self._norm(queries, self.weights.qk_norm[0])
        return rotate(queries, *self._turn(positions))

    def after_attention(self, seen: Tensor, residual: Tensor) -> Tensor:
        """What attention saw [n, N*H] and the residual [n, H'] -> the layer's output [n, H']"""
        x = residual + _apply(self.weights.out, seen, self.weights.out_bias)
        gate_up = _apply(
            self.weights.gate_up, self._norm(x, self.weights.mlp_norm), self.weights.gate_up_bias
        )
        gate, up = gate_up.chunk(2, dim=-1)
        return x + _apply(self.weights.down, F.silu(gate) * up, self.weights.down_bias)

    def logits_and_feedback(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """[n, H'] -> ([n, W] logits, [n, H'] h of the row that follows)"""
        normed = self._norm(output, self.weights.norm)
        logits = self.weights.head.apply(normed)
        return logits, normed if self.config.norm_output else output

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.layer.rms_norm_eps)

    def _turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return cos_sin(positions, self._inv_freq, self._rope_factor, self.dtype)


def _apply(weight: Weight, x: Tensor, bias: Tensor | None) -> Tensor:
    out = weight.apply(x)
    return out if bias is None else out + bias

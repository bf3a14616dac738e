"""KV tensors of one model over the shared pool. One block id names the same slots in every model.

Owned by the worker thread. Memory is kv_bytes_per_token * S * P; tests hold the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor


def kv_bytes_per_token(*, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token takes in one model."""
    return 2 * layers * kv_heads * head_dim * dtype.itemsize


class KVCache:
    """keys, values: [layers, P, S, G, H]; `keys[i]` is layer i's [P, S, G, H]."""

    def __init__(
        self,
        *,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (layers, num_blocks, block_size, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.block_size = block_size

    def move(self, source_slots: Seq[int], target_slots: Seq[int]) -> None:
        """Copy whole slots (all layers), as after a tree whose accepted path has gaps.

        Slots are flat (block id * S + offset); all sources are read before any target is written.
        """
        layers, num_blocks, block_size, kv_heads, head_dim = self.keys.shape
        source = torch.tensor(list(source_slots), dtype=torch.int64, device=self.keys.device)
        target = torch.tensor(list(target_slots), dtype=torch.int64, device=self.keys.device)
        for tensor in (self.keys, self.values):
            if tensor.dtype.itemsize == 1:  # torch indexes no fp8
                tensor = tensor.view(torch.uint8)
            flat: Tensor = tensor.view(layers, num_blocks * block_size, kv_heads, head_dim)
            flat[:, target] = flat[:, source]

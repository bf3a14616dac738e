"""What the runner and the draft_model drafter need of a causal language model."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

import torch
from torch import Tensor

from specserve.kv_cache import KVCache
from specserve_kernels.interface import PagedBatch


class CausalLM(Protocol):
    """A decoder over packed tokens and paged KV.

    A row's logits are bit for bit the same whatever its batch mates, chunking and place.
    """

    vocab_size: int
    dtype: torch.dtype

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache: ...

    def kv_bytes_per_token(self) -> int: ...

    def forward(
        self,
        input_ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64
        batch: PagedBatch,
        kv_cache: KVCache,
        logits_indices: Seq[int],  # L packed rows whose logits are wanted
    ) -> Tensor:  # [L, V] fp32 (fp64 for an fp64 model)
        """Writes KV of all T tokens, returns logits of L of them."""
        ...

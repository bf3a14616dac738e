"""What the runner and the draft_model drafter need of a causal language model."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specserve.drafting import Draft, DraftRow
from specserve.kv_cache import KVCache
from specserve_kernels.interface import PagedBatch


@dataclass(frozen=True)
class Capture:
    """Which inner states of a forward are wanted, and the buffer they are written to.

    layers: ascending; layer i is the residual stream that enters layer i, num_layers what the last
            layer puts out, before the final norm
    states: [T, len(layers), D] fp32, contiguous (fp64 for an fp64 model)
    """

    layers: tuple[int, ...]
    states: Tensor


@dataclass(frozen=True)
class ChainAsk:
    """A chain of num_guesses >= 1 guesses after a row's history.

    start: position of the first token without KV; the last known one is computed again if need be
    """

    row: DraftRow
    start: int
    num_guesses: int


class ChainGrower(Protocol):
    """Grows chains where the model runs, without a forward's logits ever coming back."""

    def takes(self, ask: ChainAsk) -> bool:
        """Whether it can do as this row wants."""
        ...

    def grow(self, asks: Seq[ChainAsk]) -> list[Draft]:
        """A chain for each, kv_len included; KV of known tokens and of all guesses but the last.
        Shorter where the draft's logits are useless."""
        ...


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
        *,
        capture: Capture | None = None,
    ) -> Tensor:  # [L, V] fp32 (fp64 for an fp64 model)
        """Writes KV of all T tokens and the states that are wanted, returns logits of L of them."""
        ...

"""The readable backend: the oracle of every other one.

One packed row at a time it gathers exactly the keys that the row sees, in slot order, and takes a
plain softmax over them. So a row's result cannot depend on its batch mates, and there is nothing to
get wrong; it is slow. Half-precision inputs are computed in fp32, everything else as it comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from specserve_kernels.interface import AttentionPlan, PagedBatch


@dataclass(frozen=True)
class ReferencePlan:
    """Per segment b of n tokens after c tokens of context (all on the host's CPU).

    slots:     [c+n] int64   flat slot of each slot index of the segment's sequence
    sees:      [n, c+n] bool the ancestor mask: which slot indices each token sees
    positions: [c+n] int64   logical position of each slot index (context length + depth)
    """

    slots: tuple[Tensor, ...]
    sees: tuple[Tensor, ...]
    positions: tuple[Tensor, ...]


class ReferenceBackend:
    """See `specserve_kernels.interface.Backend` for shapes."""

    name = "reference"

    def prepare(self, batch: PagedBatch) -> ReferencePlan:
        slots, sees, positions = [], [], []
        for segment_idx, context_len in enumerate(batch.context_lens):
            start, end = batch.query_start_loc[segment_idx : segment_idx + 2]
            mask, depths = _ancestor_mask(context_len, end - start, batch.parents[segment_idx])
            slots.append(_flat_slots(batch, segment_idx, context_len + end - start))
            sees.append(mask)
            positions.append(torch.cat([torch.arange(context_len), context_len + depths]))
        return ReferencePlan(tuple(slots), tuple(sees), tuple(positions))

    def slot_mapping(self, batch: PagedBatch) -> Tensor:
        """[T] int64, as the interface says."""
        parts = [torch.empty(0, dtype=torch.int64)]
        for segment_idx, context_len in enumerate(batch.context_lens):
            start, end = batch.query_start_loc[segment_idx : segment_idx + 2]
            parts.append(_flat_slots(batch, segment_idx, context_len + end - start)[context_len:])
        return torch.cat(parts)

    def write_kv(
        self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> None:
        k_cache.view(-1, *k_cache.shape[2:])[slots] = key
        v_cache.view(-1, *v_cache.shape[2:])[slots] = value

    def paged_attention(
        self,
        query: Tensor,  # [T, N, H]
        k_cache: Tensor,  # [P, S, G, H]
        v_cache: Tensor,  # [P, S, G, H]
        plan: AttentionPlan,
        *,
        scale: float,
        sliding_window: int | None = None,
    ) -> Tensor:  # [T, N, H]
        plan = cast(ReferencePlan, plan)
        flat_keys = k_cache.reshape(-1, *k_cache.shape[2:])  # [P*S, G, H]
        flat_values = v_cache.reshape(-1, *v_cache.shape[2:])
        rows: list[Tensor] = []
        for slots, mask, positions in zip(plan.slots, plan.sees, plan.positions, strict=True):
            num_context = mask.shape[1] - mask.shape[0]
            for token_idx, sees in enumerate(mask):
                if sliding_window is not None:
                    oldest = positions[num_context + token_idx] - sliding_window
                    sees = sees & (positions > oldest)
                seen = slots[sees]  # [keys] in slot order, which is depth order on one path
                rows.append(_attend(query[len(rows)], flat_keys[seen], flat_values[seen], scale))
        return torch.stack(rows) if rows else torch.empty_like(query)


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """query [N, H], keys and values [keys, G, H] -> [N, H]; head n reads KV head n // (N / G)."""
    num_heads, num_kv_heads = query.shape[0], keys.shape[1]
    compute = torch.promote_types(query.dtype, torch.float32)
    heads = []
    for head_idx in range(num_heads):
        kv_head = head_idx * num_kv_heads // num_heads
        scores = keys[:, kv_head].to(compute) @ query[head_idx].to(compute) * scale  # [keys]
        heads.append(torch.softmax(scores, dim=0) @ values[:, kv_head].to(compute))  # [H]
    return torch.stack(heads).to(query.dtype)


def _ancestor_mask(
    context_len: int, num_tokens: int, parents: tuple[int, ...] | None
) -> tuple[Tensor, Tensor]:
    """[n, c+n] bool which slot indices each token sees, and [n] int64 its depth in the segment."""
    mask = torch.zeros(num_tokens, context_len + num_tokens, dtype=torch.bool)
    depths = torch.zeros(num_tokens, dtype=torch.int64)
    for token_idx in range(num_tokens):
        parent = token_idx - 1 if parents is None else parents[token_idx]
        if parent < 0:
            mask[token_idx, :context_len] = True
        else:
            mask[token_idx] = mask[parent]
            depths[token_idx] = depths[parent] + 1
        mask[token_idx, context_len + token_idx] = True
    return mask, depths


def _flat_slots(batch: PagedBatch, segment_idx: int, num_slots: int) -> Tensor:
    """[num_slots] int64: flat slot of slot indices 0 .. num_slots-1 of a segment's sequence."""
    table = torch.tensor(batch.block_tables[segment_idx], dtype=torch.int64)  # [M]
    index = torch.arange(num_slots)
    return table[index // batch.block_size] * batch.block_size + index % batch.block_size

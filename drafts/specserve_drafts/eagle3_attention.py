"""Attention of one draft layer over a batch of rows: paged context once, then guesses as they come.

The context's keys and values are gathered once per step into a dense tensor; guesses never touch
the pool, for their KV comes from the draft's own states and would have to be made again from the
target's anyway. A guess sees the context, its ancestors and itself.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
import torch.nn.functional as F
from torch import Tensor

from specserve.kv_cache import KVCache


class DenseContext:
    """keys, values [R, G, C, H] fp32 (fp64 stays) of R rows, hidden [R, C] where a row has none."""

    def __init__(self, kv_cache: KVCache, slots: Seq[Seq[int]]) -> None:
        """slots: per row, flat slots of what it sees, at least one."""
        longest = max(len(row) for row in slots)
        table = torch.tensor([[*row, *[row[-1]] * (longest - len(row))] for row in slots])  # [R, C]
        lengths = torch.tensor([len(row) for row in slots])
        self._hidden = torch.arange(longest) >= lengths[:, None]
        self._keys = self._gathered(kv_cache.keys[0], table)
        self._values = self._gathered(kv_cache.values[0], table)
        self._own_keys = self._keys.new_empty(0, *kv_cache.keys.shape[-2:])  # [guesses, G, H]
        self._own_values = self._own_keys

    @staticmethod
    def _gathered(cache: Tensor, table: Tensor) -> Tensor:
        flat = cache.view(-1, *cache.shape[2:])  # [P*S, G, H]
        rows = flat.index_select(0, table.view(-1)).view(*table.shape, *flat.shape[1:])
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        return wide.transpose(1, 2).contiguous()

    def add(self, keys: Tensor, values: Tensor) -> None:
        """KV [n, G, H] of guesses, which count on from those added before."""
        self._own_keys = torch.cat([self._own_keys, keys.to(self._own_keys.dtype)])
        self._own_values = torch.cat([self._own_values, values.to(self._own_values.dtype)])

    def attend(self, queries: Tensor, rows: Seq[int], paths: Seq[Seq[int]]) -> Tensor:
        """[n, N, H] -> [n, N*H], in the queries' dtype.

        rows:  [n] whose context each query sees; of one row they stand together
        paths: [n] indices of guesses it sees, itself among them; all of one length
        """
        num_queries, num_heads, head_dim = queries.shape
        num_kv_heads = self._keys.shape[1]
        fold = num_heads // num_kv_heads
        wide = queries.to(self._keys.dtype).view(num_queries, num_kv_heads, fold, head_dim)
        wide = wide * head_dim**-0.5
        row_of = torch.tensor(list(rows))
        place_of = torch.tensor(_places(rows))
        most = int(place_of.max()) + 1
        # Queries of one row share its keys: [R, G, most * fold, H]
        padded = wide.new_zeros(len(self._keys), most, num_kv_heads, fold, head_dim)
        padded[row_of, place_of] = wide
        packed = padded.transpose(1, 2).reshape(len(self._keys), num_kv_heads, -1, head_dim)
        scores = packed @ self._keys.transpose(2, 3)  # [R, G, most * fold, C]
        scores.masked_fill_(self._hidden[:, None, None], -torch.inf)
        shape = (len(self._keys), num_kv_heads, most, fold, -1)
        context_scores = scores.view(shape).transpose(1, 2)[row_of, place_of]  # [n, G, fold, C]
        own = torch.tensor([list(path) for path in paths], dtype=torch.int64)  # [n, d]
        own_scores = torch.einsum("ngfh,ndgh->ngfd", wide, self._own_keys[own])
        weights = F.softmax(torch.cat([context_scores, own_scores], dim=-1), dim=-1)
        num_context = context_scores.shape[-1]
        padded = wide.new_zeros(len(self._keys), most, num_kv_heads, fold, num_context)
        padded[row_of, place_of] = weights[..., :num_context]
        packed = padded.transpose(1, 2).reshape(len(self._keys), num_kv_heads, -1, num_context)
        seen = (packed @ self._values).view(shape).transpose(1, 2)[row_of, place_of]
        seen = seen + torch.einsum(
            "ngfd,ndgh->ngfh", weights[..., num_context:], self._own_values[own]
        )
        flat: Tensor = seen.reshape(num_queries, -1).to(queries.dtype)
        return flat


def _places(rows: Seq[int]) -> list[int]:
    """Each query's place among those of its row."""
    seen: dict[int, int] = {}
    places = []
    for row in rows:
        places.append(seen.get(row, 0))
        seen[row] = places[-1] + 1
    return places

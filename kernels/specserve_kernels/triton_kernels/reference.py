"""What each Triton kernel computes, in readable torch: the oracle of its tests.

Computed in fp32 or wider, and rounded where the kernels round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specserve_kernels.interface import PagedBatch
from specserve_kernels.triton_kernels.attention_rows import token_paths


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


def paged_attention(
    query: Tensor,  # [T, N, H]
    k_cache: Tensor,  # [P, S, G, H]
    v_cache: Tensor,  # [P, S, G, H]
    batch: PagedBatch,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:  # [T, N, H]
    """Row by row, over exactly the keys that it sees: its context, its ancestors and itself."""
    group = query.shape[1] // k_cache.shape[2]
    outputs: list[Tensor] = []
    for segment_idx, context_len in enumerate(batch.context_lens):
        start, end = batch.query_start_loc[segment_idx : segment_idx + 2]
        table = torch.tensor(batch.block_tables[segment_idx], device=query.device)
        for path in token_paths(end - start, batch.parents[segment_idx]):
            index = torch.tensor([*range(context_len), *(context_len + idx for idx in path)])
            index = index[-window:] if window is not None else index
            index = index.to(query.device)
            place = table[index // batch.block_size], index % batch.block_size
            keys = k_cache[place].double().repeat_interleave(group, dim=1) * k_scale  # [n, N, H]
            values = v_cache[place].double().repeat_interleave(group, dim=1) * v_scale
            scores = torch.einsum("nh,knh->nk", query[len(outputs)].double(), keys) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            outputs.append(torch.einsum("nk,knh->nh", scores.softmax(-1), values))
    return torch.stack(outputs).to(query.dtype) if outputs else torch.empty_like(query)


def swiglu(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2I] = [gate | up] -> silu(gate) * up, [T, I]; silu is rounded, as models do."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    silu = (gate / (1 + torch.exp(-gate))).to(gate_up.dtype).float()
    return (silu * up).to(gate_up.dtype)


def rope_and_write_kv(
    qkv: Tensor,  # [T, (N + 2G) * H]
    positions: Tensor,  # [T]
    slots: Tensor,  # [T]; -1: a padding row
    cos: Tensor,  # [positions, H / 2] fp32
    sin: Tensor,  # [positions, H / 2] fp32
    k_cache: Tensor,  # [P, S, G, H], written
    v_cache: Tensor,  # [P, S, G, H], written
    norm: tuple[Tensor, Tensor, float] | None = None,  # weights of query and key heads, epsilon
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:  # [T, N, H]; rows of padding are zeros
    num_kv_heads, head_dim = k_cache.shape[2:]
    real = slots >= 0
    heads = qkv[real].view(int(real.sum()), qkv.shape[1] // head_dim, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    query, key = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    value = heads[:, num_heads + num_kv_heads :]
    if norm is not None:
        query, key = rms_norm(query, norm[0], norm[2]), rms_norm(key, norm[1], norm[2])
    angles = cos[positions[real]][:, None], sin[positions[real]][:, None]  # [T, 1, H / 2]
    _write(k_cache, slots[real], _rotated(key, *angles), k_scale)
    _write(v_cache, slots[real], value, v_scale)
    out = qkv.new_zeros(len(slots), num_heads, head_dim)
    out[real] = _rotated(query, *angles)
    return out


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads [T, n, H], whose halves are the two coordinates; cos and sin [T, 1, H / 2]."""
    first, second = heads.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(heads.dtype)


def _write(cache: Tensor, slots: Tensor, rows: Tensor, scale: float) -> None:
    if cache.dtype == torch.float8_e4m3fn:
        rows = (rows.float() * (1 / scale)).clamp(-448, 448)
    cache.view(-1, *cache.shape[2:])[slots] = rows.to(cache.dtype)


def compact_kv(
    caches: Sequence[Tensor],  # each [P, S, G, H]
    accepted: Tensor,  # [B, W]; -1 behind each path
    context_lens: Tensor,  # [B]
    block_tables: Tensor,  # [B, M]
) -> None:
    """Copies first, then writes: what a path held before is what a chain holds after."""
    block_size = caches[0].shape[1]
    for path, context_len, table in zip(accepted, context_lens, block_tables, strict=True):
        tokens = path[path >= 0].long()
        sources = context_len + tokens
        targets = context_len + torch.arange(len(tokens), device=path.device)
        for cache in caches:
            rows = cache[table[sources // block_size].long(), sources % block_size].clone()
            cache[table[targets // block_size].long(), targets % block_size] = rows

"""The native decoder of the Llama family over packed tokens and paged KV.

The rule it keeps: a row's logits are a function of the row's own tokens, bit for bit. GEMMs go
through `RowInvariantLinear`, attention through a backend that keeps the same promise, and
elementwise steps use only operations whose bits do not depend on the place in a tensor: torch's
silu and sigmoid do not qualify (the tail of a vector takes the scalar path), exp and division do.

A step's rows are padded once, at the embedding, to a number of rows that GEMM calls cover exactly;
only attention and the KV cache see the real rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specserve.kv_cache import KVCache, kv_bytes_per_token
from specserve.models.config import ModelConfig
from specserve.models.interface import Capture
from specserve.models.linear import CANDIDATE_ROWS, GemmWeight, RowInvariantLinear, Weight
from specserve.models.quantize import Int8Weight
from specserve.models.rope import cos_sin, inverse_frequencies, rotate
from specserve.models.take import WeightTaker
from specserve_kernels.interface import AttentionPlan, Backend, PagedBatch

_HEAD_ROWS = tuple(rows for rows in CANDIDATE_ROWS if rows <= 64)  # the head is wide, rows few


@dataclass(frozen=True)
class _Layer:
    """Weights of one layer, matrices [out, in]. N, G, H as everywhere; D hidden, I intermediate."""

    input_norm: Tensor  # [D]
    qkv: Weight  # [(N+2G)*H, D]
    qkv_bias: Tensor | None
    qk_norm: tuple[Tensor, Tensor] | None  # [H] for queries, [H] for keys
    out: Weight  # [D, N*H]
    out_bias: Tensor | None
    mlp_norm: Tensor  # [D]
    gate_up: Weight  # [2I, D]
    gate_up_bias: Tensor | None
    down: Weight  # [D, I]
    down_bias: Tensor | None

    def nbytes(self) -> int:
        weights = [self.input_norm, self.mlp_norm, *(self.qk_norm or ())]
        biases = [self.qkv_bias, self.out_bias, self.gate_up_bias, self.down_bias]
        matrices = [self.qkv, self.out, self.gate_up, self.down]
        return sum(t.nbytes for t in [*weights, *biases, *matrices] if t is not None)


@dataclass(frozen=True)
class _Step:
    """What all layers of one forward share."""

    num_tokens: int  # T; rows beyond are padding
    cos: Tensor  # [T', 1, H], T' padded rows
    sin: Tensor
    slots: Tensor  # [T]
    plan: AttentionPlan


class Decoder:
    """Implements `specserve.models.interface.CausalLM`.

    weights: Hugging Face names; ModelError where one is missing, unknown or of another shape
    dtype:   of weights, KV and activations: torch.float32, bfloat16 or float64; or torch.int8,
             where matrices are int8, activations fp32, KV and embedding bfloat16
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        backend: Backend,
    ) -> None:
        self.config = config
        self.dtype = torch.float32 if dtype == torch.int8 else dtype  # of activations
        self._kv_dtype = torch.bfloat16 if dtype == torch.int8 else dtype
        self.vocab_size = config.vocab_size
        self.max_position_embeddings = config.max_position_embeddings
        self._backend = backend
        taker = WeightTaker(weights, self.dtype)
        pack = Int8Weight if dtype == torch.int8 else GemmWeight
        width = config.hidden_size
        embedding = taker.take("model.embed_tokens.weight", config.vocab_size, width)
        self._embedding = embedding.to(self._kv_dtype)
        self._layers = [_take_layer(taker, pack, config, idx) for idx in range(config.num_layers)]
        self._final_norm = taker.take("model.norm.weight", width)
        # Packed, the head is another copy even where it is tied to the embedding.
        self._head = pack(
            embedding
            if config.tie_word_embeddings
            else taker.take("lm_head.weight", config.vocab_size, width)
        )
        taker.refuse_leftovers()
        self._inv_freq, self._rope_factor = inverse_frequencies(config.rope, config.head_dim)
        first = self._layers[0]
        self._linear = RowInvariantLinear([first.qkv, first.out, first.gate_up, first.down])
        self._head_linear = RowInvariantLinear([self._head], _HEAD_ROWS)

    @property
    def call_sizes(self) -> tuple[int, ...]:
        """Rows per GEMM call of the layers: measured to agree bit for bit with one another."""
        return self._linear.call_sizes

    @property
    def embedding(self) -> Tensor:
        """[V, D] in the KV's dtype: what a drafter without one of its own shares."""
        return self._embedding

    def final_norm(self, x: Tensor) -> Tensor:
        """[n, D] out of the last layer -> [n, D] as the head reads it."""
        return self._norm(x, self._final_norm)

    def weight_bytes(self) -> int:
        """Bytes of all weights. A tied head counts once, or twice where GEMMs need it packed."""
        shares_embedding = self.config.tie_word_embeddings and not self._head.is_packed
        head = 0 if shares_embedding else self._head.nbytes
        layers = sum(layer.nbytes() for layer in self._layers)
        return self._embedding.nbytes + self._final_norm.nbytes + head + layers

    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(
            layers=self.config.num_layers,
            kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=self._kv_dtype,
        )

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        return KVCache(
            layers=self.config.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=self._kv_dtype,
        )

    def forward(
        self,
        input_ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64
        batch: PagedBatch,
        kv_cache: KVCache,
        logits_indices: Seq[int],  # L packed rows whose logits are wanted
        *,
        capture: Capture | None = None,
    ) -> Tensor:  # [L, V] fp32, fp64 for an fp64 model
        """Writes KV of all T tokens and the states that are wanted, returns logits of L of them."""
        num_tokens = input_ids.shape[0]
        padding = (0, self._linear.padded(num_tokens) - num_tokens)
        cos, sin = cos_sin(F.pad(positions, padding), self._inv_freq, self._rope_factor, self.dtype)
        step = _Step(
            num_tokens=num_tokens,
            cos=cos,
            sin=sin,
            slots=self._backend.slot_mapping(batch),
            plan=self._backend.prepare(batch),
        )
        x = F.embedding(F.pad(input_ids, padding), self._embedding).to(self.dtype)  # [T', D]
        for layer_idx, layer in enumerate(self._layers):
            _write_states(capture, layer_idx, x[:num_tokens])
            x = x + self._attention(layer, layer_idx, x, step, kv_cache)
            x = x + self._mlp(layer, x)
        _write_states(capture, len(self._layers), x[:num_tokens])
        wanted = x[torch.tensor(list(logits_indices), dtype=torch.int64)]  # [L, D]
        logits = self._head_linear(self._norm(wanted, self._final_norm), self._head)
        return logits.to(torch.promote_types(self.dtype, torch.float32))

    def _attention(
        self, layer: _Layer, layer_idx: int, x: Tensor, step: _Step, kv_cache: KVCache
    ) -> Tensor:
        """x [T', D] -> [T', D]"""
        config = self.config
        num_rows, num_heads, num_kv_heads = x.shape[0], config.num_heads, config.num_kv_heads
        qkv = self._linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
        qkv = qkv.view(num_rows, num_heads + 2 * num_kv_heads, config.head_dim)
        query_key = qkv[:, : num_heads + num_kv_heads]  # [T', N+G, H]
        if layer.qk_norm is not None:
            query, key = torch.split(query_key, [num_heads, num_kv_heads], dim=1)
            query_key = torch.cat(
                [self._norm(query, layer.qk_norm[0]), self._norm(key, layer.qk_norm[1])], dim=1
            )
        query_key = rotate(query_key, step.cos, step.sin)[: step.num_tokens]
        k_cache, v_cache = kv_cache.keys[layer_idx], kv_cache.values[layer_idx]
        key = query_key[:, num_heads:].to(k_cache.dtype)
        value = qkv[: step.num_tokens, num_heads + num_kv_heads :].to(v_cache.dtype)
        self._backend.write_kv(key, value, k_cache, v_cache, step.slots)
        seen = self._backend.paged_attention(
            query_key[:, :num_heads],
            k_cache,
            v_cache,
            step.plan,
            scale=config.head_dim**-0.5,
            sliding_window=config.sliding_windows[layer_idx],
        ).view(step.num_tokens, -1)
        if step.num_tokens < num_rows:
            seen = F.pad(seen, (0, 0, 0, num_rows - step.num_tokens))
        return self._linear(seen, layer.out, layer.out_bias)

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        """x [T', D] -> [T', D]"""
        gate_up = self._linear(self._norm(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias)
        gate, up = gate_up.chunk(2, dim=-1)  # [T', I] each
        return self._linear(silu(gate) * up, layer.down, layer.down_bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def _write_states(capture: Capture | None, layer_idx: int, x: Tensor) -> None:
    """x [T, D], the residual stream entering that layer."""
    if capture is not None and layer_idx in capture.layers:
        capture.states[:, capture.layers.index(layer_idx)] = x


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), any shape, each number's bits the same wherever it stands."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / torch.exp(-wide).add_(1)).to(x.dtype)


def _take_layer(
    taker: WeightTaker, pack: type[GemmWeight | Int8Weight], config: ModelConfig, idx: int
) -> _Layer:
    prefix, width, inner = f"model.layers.{idx}", config.hidden_size, config.intermediate_size
    query_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"

    def norm(name: str, size: int = width) -> Tensor:
        return taker.take(f"{prefix}.{name}.weight", size)

    def fused(parts: Mapping[str, int], num_inputs: int) -> Weight:
        weights = [taker.take(f"{name}.weight", rows, num_inputs) for name, rows in parts.items()]
        return pack(torch.cat(weights) if len(weights) > 1 else weights[0])

    def bias(parts: Mapping[str, int], wanted: bool) -> Tensor | None:
        if not wanted:
            return None
        return torch.cat([taker.take(f"{name}.bias", rows) for name, rows in parts.items()])

    qkv = {
        f"{attention}.q_proj": query_size,
        f"{attention}.k_proj": kv_size,
        f"{attention}.v_proj": kv_size,
    }
    out, down = {f"{attention}.o_proj": width}, {f"{mlp}.down_proj": width}
    gate_up = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}
    qk_norm = None
    if config.qk_norm:
        sizes = config.head_dim
        qk_norm = (norm("self_attn.q_norm", sizes), norm("self_attn.k_norm", sizes))
    return _Layer(
        input_norm=norm("input_layernorm"),
        qkv=fused(qkv, width),
        qkv_bias=bias(qkv, config.qkv_bias),
        qk_norm=qk_norm,
        out=fused(out, query_size),
        out_bias=bias(out, config.output_bias),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=fused(gate_up, width),
        gate_up_bias=bias(gate_up, config.mlp_bias),
        down=fused(down, inner),
        down_bias=bias(down, config.mlp_bias),
    )

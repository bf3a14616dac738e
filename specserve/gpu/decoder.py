"""The Llama family's decoder in Triton kernels.

The rule it keeps is that of `models/decoder.py`: a row's logits are a function of the row's own
tokens, bit for bit. Each kernel keeps it by itself (`triton_kernels`), whatever padding and splits.
The residual stream is updated in place by the norms that read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from specserve.errors import ConfigError
from specserve.gpu.inputs import ForwardInputs, fill_forward, forward_fields, forward_inputs
from specserve.gpu.sizes import Geometry, StepSizes
from specserve.gpu.staging import Staged
from specserve.kv_cache import KVCache, kv_bytes_per_token
from specserve.models.config import ModelConfig
from specserve.models.interface import Capture
from specserve.models.rope import cos_sin, inverse_frequencies
from specserve.models.take import WeightTaker
from specserve_kernels.interface import PagedBatch
from specserve_kernels.triton_kernels.attention import paged_attention
from specserve_kernels.triton_kernels.attention_rows import TileSizes
from specserve_kernels.triton_kernels.gemm import linear
from specserve_kernels.triton_kernels.norms import add_rms_norm, rms_norm
from specserve_kernels.triton_kernels.rope_kv import QkNorm, rope_and_write_kv
from specserve_kernels.triton_kernels.swiglu import swiglu

DTYPES = (torch.bfloat16, torch.float32)
_LEAST_POSITIONS = 2048  # of the rope tables: costs are measured with contexts that long


@dataclass(frozen=True)
class _Layer:
    """Weights of one layer on the device, matrices [out, in]; letters as in models/decoder.py."""

    input_norm: Tensor  # [D]
    qkv: Tensor  # [(N+2G)*H, D]
    qkv_bias: Tensor | None
    query_norm: Tensor | None  # [H]
    key_norm: Tensor | None  # [H]
    out: Tensor  # [D, N*H]
    out_bias: Tensor | None
    mlp_norm: Tensor  # [D]
    gate_up: Tensor  # [2I, D]
    gate_up_bias: Tensor | None
    down: Tensor  # [D, I]
    down_bias: Tensor | None

    def nbytes(self) -> int:
        tensors = (getattr(self, field.name) for field in fields(self))  # all fields are tensors
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class TritonDecoder:
    """Implements `specserve.models.interface.CausalLM`; its logits come back to the CPU.

    weights: Hugging Face names; ModelError where one is missing, unknown or of another shape
    dtype:   of weights and activations: bfloat16 or float32
    kv_dtype: of the KV: None: dtype; float8_e4m3fn: unscaled, values beyond 448 become 448
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"--dtype {dtype} has no Triton kernels: choose bf16 or fp32")
        self.config = config
        self.dtype = dtype
        self._kv_dtype = kv_dtype or dtype
        self.device = device
        self.vocab_size = config.vocab_size
        self.max_position_embeddings = config.max_position_embeddings
        self.tile_sizes = TileSizes.of_heads(config.num_heads, config.num_kv_heads)
        taker, width = WeightTaker(weights, dtype), config.hidden_size
        self.embedding = taker.take("model.embed_tokens.weight", config.vocab_size, width)
        self._embedding = self.embedding.to(device)
        self._layers = [_take_layer(taker, config, idx, device) for idx in range(config.num_layers)]
        norm = taker.take("model.norm.weight", width)
        self._host_final_norm, self._final_norm = norm, norm.to(device)
        self._head = self._embedding
        if not config.tie_word_embeddings:
            self._head = taker.take("lm_head.weight", config.vocab_size, width).to(device)
        taker.refuse_leftovers()
        inv_freq, factor = inverse_frequencies(config.rope, config.head_dim)
        num_positions = max(config.max_position_embeddings, _LEAST_POSITIONS)
        positions, half = torch.arange(num_positions), config.head_dim // 2
        cos, sin = cos_sin(positions, inv_freq, factor, torch.float32)
        self._cos = cos[:, 0, half:].contiguous().to(device)  # [positions, H/2]
        self._sin = sin[:, 0, half:].contiguous().to(device)

    def geometry(self, block_size: int) -> Geometry:
        return Geometry(self.tile_sizes.tokens, self.tile_sizes.split, block_size)

    def final_norm(self, x: Tensor) -> Tensor:
        """[n, D] out of the last layer -> [n, D] as the head reads it; on the CPU."""
        weight = self._host_final_norm
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), self.config.rms_norm_eps)

    def weight_bytes(self) -> int:
        """Bytes on the device; a tied head counts once."""
        head = 0 if self._head is self._embedding else self._head.nbytes
        rest = [self._embedding, self._final_norm, self._cos, self._sin]
        layers = sum(layer.nbytes() for layer in self._layers)
        return head + layers + sum(tensor.nbytes for tensor in rest)

    def kv_bytes_per_token(self) -> int:
        config = self.config
        return kv_bytes_per_token(
            layers=config.num_layers,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._kv_dtype,
        )

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        config = self.config
        return KVCache(
            layers=config.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._kv_dtype,
            device=self.device,
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
    ) -> Tensor:  # [L, V] fp32 on the CPU
        """Writes KV of all T tokens and the states that are wanted; waits for the device."""
        sizes = self.geometry(batch.block_size).of_batch(batch, num_logits=len(logits_indices))
        staged = Staged(forward_fields(sizes), self.device)
        fill_forward(
            staged.host,
            input_ids.tolist(),
            positions.tolist(),
            batch,
            logits_indices,
            self.tile_sizes.tokens,
        )
        staged.send()
        inputs = self.inputs(staged.tensors, sizes, kv_cache, capture)
        return self.run(inputs).cpu().float()

    def inputs(
        self,
        tensors: dict[str, Tensor],
        sizes: StepSizes,
        kv_cache: KVCache,
        capture: Capture | None = None,
    ) -> ForwardInputs:
        """tensors: on the device, by the names of `forward_fields`"""
        num_heads = self.config.num_heads
        return forward_inputs(tensors, sizes, self.tile_sizes, num_heads, kv_cache, capture)

    def run(self, inputs: ForwardInputs) -> Tensor:
        """[L, V] logits in the model's dtype, on the device. Never waits for it."""
        capture, epsilon = inputs.capture, self.config.rms_norm_eps
        residual = F.embedding(inputs.input_ids, self._embedding)  # [T, D]
        _write_states(capture, 0, residual)
        hidden = rms_norm(residual, self._layers[0].input_norm, epsilon)
        norms = [*(layer.input_norm for layer in self._layers[1:]), self._final_norm]
        for idx, (layer, next_norm) in enumerate(zip(self._layers, norms, strict=True)):
            attended = self._attention(layer, idx, hidden, inputs)
            hidden = add_rms_norm(attended, residual, layer.mlp_norm, epsilon)
            gate_up = _linear(hidden, layer.gate_up, layer.gate_up_bias)
            fed = _linear(swiglu(gate_up), layer.down, layer.down_bias)
            hidden = add_rms_norm(fed, residual, next_norm, epsilon)
            _write_states(capture, idx + 1, residual)
        return linear(hidden.index_select(0, inputs.logits_indices), self._head)

    def _attention(
        self, layer: _Layer, layer_idx: int, hidden: Tensor, inputs: ForwardInputs
    ) -> Tensor:
        """[T, D] -> [T, D]"""
        config, cache = self.config, inputs.kv_cache
        keys, values = cache.keys[layer_idx], cache.values[layer_idx]
        norm = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norm = QkNorm(layer.query_norm, layer.key_norm, config.rms_norm_eps)
        query = rope_and_write_kv(
            _linear(hidden, layer.qkv, layer.qkv_bias),
            *(inputs.rows.positions, inputs.slots, self._cos, self._sin, keys, values, norm),
        )
        seen = paged_attention(
            *(query, keys, values, inputs.rows),
            scale=config.head_dim**-0.5,
            window=config.sliding_windows[layer_idx],
        )
        return _linear(seen.flatten(1), layer.out, layer.out_bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = linear(x, weight)
    return out if bias is None else out + bias


def _write_states(capture: Capture | None, layer_idx: int, x: Tensor) -> None:
    """x [T, D], the residual stream entering that layer."""
    if capture is not None and layer_idx in capture.layers:
        capture.states[:, capture.layers.index(layer_idx)] = x


def _take_layer(taker: WeightTaker, config: ModelConfig, idx: int, device: torch.device) -> _Layer:
    prefix, width, inner = f"model.layers.{idx}", config.hidden_size, config.intermediate_size
    query_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"

    def norm(name: str, size: int = width) -> Tensor:
        return taker.take(f"{prefix}.{name}.weight", size).to(device)

    def fused(parts: Mapping[str, int], num_inputs: int) -> Tensor:
        weights = [taker.take(f"{name}.weight", rows, num_inputs) for name, rows in parts.items()]
        return torch.cat(weights).to(device)

    def bias(parts: Mapping[str, int], wanted: bool) -> Tensor | None:
        if not wanted:
            return None
        return torch.cat([taker.take(f"{n}.bias", rows) for n, rows in parts.items()]).to(device)

    qkv = {
        f"{attention}.q_proj": query_size,
        f"{attention}.k_proj": kv_size,
        f"{attention}.v_proj": kv_size,
    }
    out, down = {f"{attention}.o_proj": width}, {f"{mlp}.down_proj": width}
    gate_up = {f"{mlp}.gate_proj": inner, f"{mlp}.up_proj": inner}
    return _Layer(
        input_norm=norm("input_layernorm"),
        qkv=fused(qkv, width),
        qkv_bias=bias(qkv, config.qkv_bias),
        query_norm=norm("self_attn.q_norm", config.head_dim) if config.qk_norm else None,
        key_norm=norm("self_attn.k_norm", config.head_dim) if config.qk_norm else None,
        out=fused(out, query_size),
        out_bias=bias(out, config.output_bias),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=fused(gate_up, width),
        gate_up_bias=bias(gate_up, config.mlp_bias),
        down=fused(down, inner),
        down_bias=bias(down, config.mlp_bias),
    )

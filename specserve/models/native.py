"""The Llama family's decoder in native code: one call per forward, weights packed once.

`pack_model` turns a checkpoint into named flat tensors that can be written to a file and mapped
back; `NativeDecoder` runs them. Residual stream, norms, attention sums and logits are fp32; matrix
products take int8, bf16 or fp32 rows; KV is bf16, or fp32 for an fp32 model.

The embedding stays bf16 beside an int8 head that is tied to it (fp32 for an fp32 model): rows are
read one by one, so mapped from a file it costs only the pages of tokens that occur, and the model's
input is not quantised on top of its weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from specserve.kv_cache import KVCache, kv_bytes_per_token
from specserve.models.config import ModelConfig
from specserve.models.interface import Capture
from specserve.models.rope import cos_sin, inverse_frequencies
from specserve.models.take import WeightTaker
from specserve_kernels import huge_pages
from specserve_kernels.interface import PagedBatch
from specserve_kernels.native_step import (
    GATE_UP_GROUP,
    KV_DTYPES,
    Dtype,
    NativeStep,
    Phases,
    StepShape,
    kv_shapes,
    pack_matrix,
)

_LEAST_POSITIONS = 1024  # of the rope tables, which double when a later position comes


def step_shape(config: ModelConfig) -> StepShape:
    """The sizes that the native step needs, the intermediate size padded."""
    windows = config.sliding_windows or (None,) * config.num_layers
    return StepShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        inner_size=-(-config.intermediate_size // GATE_UP_GROUP) * GATE_UP_GROUP,
        vocab_size=config.vocab_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_epsilon=config.rms_norm_eps,
        windows=windows,
    )


def pack_model(
    config: ModelConfig, weights: Mapping[str, Tensor], dtype: Dtype
) -> dict[str, Tensor]:
    """Everything `NativeDecoder.from_packed` needs, by the names of `NativeStep`.

    weights: Hugging Face names; ModelError where one is missing, unknown or of another shape
    Tensors are uint8, fp32, or bf16 (the embedding), contiguous, each with memory of its own.
    """
    taker = WeightTaker(weights, None)
    width = config.hidden_size
    embedding = taker.take("model.embed_tokens.weight", config.vocab_size, width)
    packed = {
        "embedding": embedding.to(KV_DTYPES[dtype]).clone(memory_format=torch.contiguous_format),
        "final_norm": _fp32(taker.take("model.norm.weight", width)),
    }
    head = (
        embedding
        if config.tie_word_embeddings
        else taker.take("lm_head.weight", config.vocab_size, width)
    )
    packed |= _named("head", pack_matrix(head, dtype))
    for idx in range(config.num_layers):
        packed |= _named(f"layers.{idx}", _pack_layer(taker, config, idx, dtype))
    taker.refuse_leftovers()
    return packed


class NativeDecoder:
    """Implements `specserve.models.interface.CausalLM`.

    weights: Hugging Face names; ModelError where one is missing, unknown or of another shape
    dtype:   of weights and of the rows they are multiplied with
    threads: of a step, the calling thread included
    """

    dtype = torch.float32  # of activations

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], *, dtype: Dtype, threads: int
    ) -> None:
        self._start(config, pack_model(config, weights, dtype), dtype, threads)

    @classmethod
    def from_packed(
        cls, config: ModelConfig, packed: Mapping[str, Tensor], dtype: Dtype, threads: int
    ) -> NativeDecoder:
        """packed: what `pack_model` gave, for instance mapped from a file; it is copied."""
        decoder = cls.__new__(cls)
        decoder._start(config, packed, dtype, threads)
        return decoder

    def _start(
        self, config: ModelConfig, packed: Mapping[str, Tensor], dtype: Dtype, threads: int
    ) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.max_position_embeddings = config.max_position_embeddings
        self.weight_dtype = dtype
        self._packed = huge_pages.copied(packed)
        self._step = NativeStep(step_shape(config), self._packed, dtype, threads)
        self._inv_freq, self._rope_factor = inverse_frequencies(config.rope, config.head_dim)
        self._rope = self._rope_tables(min(_LEAST_POSITIONS, config.max_position_embeddings))

    def packed_tensors(self) -> dict[str, Tensor]:
        """What `from_packed` takes."""
        return dict(self._packed)

    @property
    def embedding(self) -> Tensor:
        """[V, D] in the KV's dtype: what a drafter without one of its own shares."""
        return self._packed["embedding"]

    def final_norm(self, x: Tensor) -> Tensor:
        """[n, D] out of the last layer -> [n, D] as the head reads it."""
        weight = self._packed["final_norm"]
        return torch.nn.functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def weight_bytes(self) -> int:
        """Bytes of all weights, the embedding included."""
        return sum(tensor.nbytes for tensor in self._packed.values())

    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(
            layers=self.config.num_layers,
            kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=self._step.kv_dtype,
        )

    def new_kv_cache(self, num_blocks: int, block_size: int) -> NativeKVCache:
        return NativeKVCache(self._step, num_blocks, block_size)

    def forward(
        self,
        input_ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64
        batch: PagedBatch,
        kv_cache: KVCache,
        logits_indices: Seq[int],  # L packed rows whose logits are wanted
        *,
        capture: Capture | None = None,
    ) -> Tensor:  # [L, V] fp32
        """Writes KV of all T tokens and the states that are wanted, returns logits of L of them."""
        last = int(positions.numpy().max())
        if last >= len(self._rope[0]):
            self._rope = self._rope_tables(1 << last.bit_length())
        return self._step.run(
            input_ids,
            positions,
            batch,
            self._rope,
            (kv_cache.keys, kv_cache.values),
            logits_indices,
            capture.layers if capture else (),
            capture.states if capture else None,
        )

    def last_step_phases(self) -> Phases:
        """Where the time of the last forward went, in nanoseconds."""
        return self._step.last_step_phases()

    def _rope_tables(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine [num_positions, H/2] fp32: the halves that `rotate` mirrors."""
        half = self.config.head_dim // 2
        cos, sin = cos_sin(
            torch.arange(num_positions), self._inv_freq, self._rope_factor, torch.float32
        )
        return cos[:, 0, half:].contiguous(), sin[:, 0, half:].contiguous()


class NativeKVCache(KVCache):
    """KV in the layout of `kv_shapes`: all that others may do with it is `move`."""

    def __init__(self, step: NativeStep, num_blocks: int, block_size: int) -> None:
        keys, values = kv_shapes(step.shape, step.kv_dtype, num_blocks, block_size)
        self.keys = huge_pages.zeros(keys, step.kv_dtype)
        self.values = huge_pages.zeros(values, step.kv_dtype)
        self.block_size = block_size

    def move(self, source_slots: Seq[int], target_slots: Seq[int]) -> None:
        """Copy whole slots (all layers); all sources are read before any target is written."""
        source = torch.tensor(list(source_slots), dtype=torch.int64)
        target = torch.tensor(list(target_slots), dtype=torch.int64)
        from_block, from_offset = source // self.block_size, source % self.block_size
        to_block, to_offset = target // self.block_size, target % self.block_size
        self.keys[:, to_block, :, :, to_offset] = self.keys[:, from_block, :, :, from_offset]
        self.values[:, to_block, :, to_offset] = self.values[:, from_block, :, from_offset]


# ---- packing -----------------------------------------------------------------------------


def _pack_layer(
    taker: WeightTaker, config: ModelConfig, idx: int, dtype: Dtype
) -> dict[str, Tensor]:
    prefix, width, inner = f"model.layers.{idx}", config.hidden_size, config.intermediate_size
    query_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = {
        f"{attention}.q_proj": query_size,
        f"{attention}.k_proj": kv_size,
        f"{attention}.v_proj": kv_size,
    }

    def matrix(parts: Mapping[str, int], num_inputs: int) -> Tensor:
        return torch.cat([taker.take(f"{n}.weight", rows, num_inputs) for n, rows in parts.items()])

    def bias(parts: Mapping[str, int]) -> Tensor:
        return _fp32(torch.cat([taker.take(f"{name}.bias", rows) for name, rows in parts.items()]))

    def gate_up(kind: str, *columns: int) -> Tensor:
        gate, up = (
            taker.take(f"{mlp}.{name}_proj.{kind}", inner, *columns) for name in ("gate", "up")
        )
        return alternate(gate, up)

    down = matrix({f"{mlp}.down_proj": width}, inner)
    missing = -inner % GATE_UP_GROUP
    matrices = {
        "qkv": matrix(qkv, width),
        "out": matrix({f"{attention}.o_proj": width}, query_size),
        "gate_up": gate_up("weight", width),
        "down": torch.nn.functional.pad(down, (0, missing)) if missing else down,
    }
    biases = {}
    if config.qkv_bias:
        biases["qkv.bias"] = bias(qkv)
    if config.output_bias:
        biases["out.bias"] = bias({f"{attention}.o_proj": width})
    if config.mlp_bias:
        biases["gate_up.bias"] = _fp32(gate_up("bias"))
        biases["down.bias"] = bias({f"{mlp}.down_proj": width})
    norms = {
        "input_norm": (f"{prefix}.input_layernorm", width),
        "mlp_norm": (f"{prefix}.post_attention_layernorm", width),
    }
    if config.qk_norm:
        norms["query_norm"] = (f"{attention}.q_norm", config.head_dim)
        norms["key_norm"] = (f"{attention}.k_norm", config.head_dim)
    packed = {key: _fp32(taker.take(f"{name}.weight", n)) for key, (name, n) in norms.items()}
    for name, values in matrices.items():
        packed |= _named(name, pack_matrix(values, dtype))
    return packed | biases


def alternate(gate: Tensor, up: Tensor) -> Tensor:
    """gate and up [I, ...] -> [2 * padded I, ...]: 16 rows of gate, 16 of up, and so on."""
    rest = gate.shape[1:]
    both = torch.stack([gate, up])  # [2, I, ...]
    missing = -gate.shape[0] % GATE_UP_GROUP
    if missing:
        both = torch.cat([both, both.new_zeros(2, missing, *rest)], dim=1)
    groups = both.view(2, -1, GATE_UP_GROUP, *rest).transpose(0, 1)
    return groups.reshape(-1, *rest)


def _fp32(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.float32, copy=True).contiguous()


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}

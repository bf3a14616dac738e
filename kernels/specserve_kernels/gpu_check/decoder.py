"""A decoder of random weights in the project's kernels: what a step of a real model costs.

Only the shapes matter for time; nothing here is trained or loaded, and acceptance is synthetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specserve_kernels.gpu_check.correctness import Sizes
from specserve_kernels.gpu_check.paged import BLOCK_SIZE, a_batch
from specserve_kernels.gpu_check.report import Correct
from specserve_kernels.triton_kernels.attention import paged_attention
from specserve_kernels.triton_kernels.attention_rows import (
    AttentionRows,
    TileSizes,
    attention_rows,
)
from specserve_kernels.triton_kernels.gemm import linear
from specserve_kernels.triton_kernels.model_shapes import ModelShape
from specserve_kernels.triton_kernels.norms import add_rms_norm, rms_norm
from specserve_kernels.triton_kernels.rope_kv import QkNorm, rope_and_write_kv
from specserve_kernels.triton_kernels.swiglu import swiglu

Linear = Callable[[Tensor, Tensor], Tensor]
_EPSILON = 1e-5


@dataclass(frozen=True)
class Place:
    """Where T = batch * tokens rows stand: the same context for every sequence."""

    rows: AttentionRows
    positions: Tensor  # [T]
    slots: Tensor  # [T]
    num_blocks: int


def a_place(
    shape: ModelShape,
    batch_size: int,
    num_tokens: int,
    context_len: int,
    device: torch.device,
    only: int | None = None,
) -> Place:
    """only: of the num_tokens of each sequence just this one, the earlier ones as context."""
    batch, num_blocks = a_batch(
        [context_len] * batch_size, [num_tokens] * batch_size, [None] * batch_size, seed=0
    )
    if only is not None:
        context_len, num_tokens = context_len + only, 1
        starts, contexts = tuple(range(batch_size + 1)), (context_len,) * batch_size
        batch = replace(batch, query_start_loc=starts, context_lens=contexts)
    sizes = TileSizes.of_heads(shape.num_heads, shape.num_kv_heads)
    slots = [
        table[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE
        for table in batch.block_tables
        for index in range(context_len, context_len + num_tokens)
    ]
    rows = attention_rows(batch, shape.num_kv_heads, sizes, device)
    slot_mapping = torch.tensor(slots, dtype=torch.int32, device=device)
    return Place(rows, rows.positions, slot_mapping, num_blocks)


@dataclass(frozen=True)
class _Layer:
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


class Decoder:
    """All matrices of a model's shape in bf16, its layers' KV caches, and the final logits."""

    def __init__(
        self, shape: ModelShape, num_layers: int, num_blocks: int, device: torch.device
    ) -> None:
        self.shape = shape
        heads = shape.num_heads * shape.head_dim
        kv_width = shape.num_kv_heads * shape.head_dim

        def matrix(rows: int, columns: int) -> Tensor:
            weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
            return weight.normal_(std=columns**-0.5)

        self._layers = [
            _Layer(
                qkv=matrix(heads + 2 * kv_width, shape.hidden_size),
                out=matrix(shape.hidden_size, heads),
                gate_up=matrix(2 * shape.intermediate_size, shape.hidden_size),
                down=matrix(shape.hidden_size, shape.intermediate_size),
            )
            for _ in range(num_layers)
        ]
        self._embedding = matrix(shape.vocab_size, shape.hidden_size)
        cache = num_layers, 2, num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim
        self._caches = torch.empty(cache, dtype=torch.bfloat16, device=device).normal_()
        self._ones = torch.ones(shape.hidden_size, dtype=torch.bfloat16, device=device)
        head_ones = self._ones[: shape.head_dim]
        self._qk_norm = QkNorm(head_ones, head_ones, _EPSILON) if shape.qk_norm else None
        angles = torch.rand(8192, shape.head_dim // 2, device=device)
        self._cos, self._sin = angles.cos(), angles.sin()

    @property
    def weight_bytes(self) -> int:
        """Read by every forward: all matrices, the embedding as the output head."""
        matrices = [self._embedding]
        for layer in self._layers:
            matrices += [layer.qkv, layer.out, layer.gate_up, layer.down]
        return sum(matrix.numel() * matrix.element_size() for matrix in matrices)

    def kv_bytes(self, batch_size: int, context_len: int) -> int:
        """Read by a forward over batch_size sequences of that context."""
        per_token = self._caches[0, :, 0, 0].numel() * self._caches.element_size()
        return per_token * len(self._layers) * batch_size * context_len

    def forward(self, input_ids: Tensor, place: Place, multiply: Linear) -> Tensor:
        """[T] tokens -> [T, V] bf16 logits."""
        scale = self.shape.head_dim**-0.5
        residual = self._embedding[input_ids]
        hidden = rms_norm(residual, self._ones, _EPSILON)
        for layer, (keys, values) in zip(self._layers, self._caches, strict=True):
            qkv = multiply(hidden, layer.qkv)
            index = place.positions, place.slots, self._cos, self._sin
            query = rope_and_write_kv(qkv, *index, keys, values, self._qk_norm)
            seen = paged_attention(query, keys, values, place.rows, scale=scale)
            attended = multiply(seen.flatten(1), layer.out)
            hidden = add_rms_norm(attended, residual, self._ones, _EPSILON)
            fed = multiply(swiglu(multiply(hidden, layer.gate_up)), layer.down)
            hidden = add_rms_norm(fed, residual, self._ones, _EPSILON)
        return multiply(hidden, self._embedding)


def check_replay(sizes: Sizes, device: torch.device) -> Iterator[Correct]:
    """A verify row's logits, to the bit, against the same row in a step of its own."""
    shape = ModelShape(
        "random", sizes.hidden_size, 2 * sizes.hidden_size, *sizes.heads, sizes.vocab_size
    )
    batch_size, num_tokens = 2, 5
    together = a_place(shape, batch_size, num_tokens, sizes.context, device)
    decoder = Decoder(shape, 2, together.num_blocks, device)
    generator = torch.Generator().manual_seed(5)
    input_ids = torch.randint(sizes.vocab_size, (batch_size, num_tokens), generator=generator)
    input_ids = input_ids.to(device)
    expected = decoder.forward(input_ids.flatten(), together, linear)
    num_different = 0
    for idx in range(num_tokens):
        alone = a_place(shape, batch_size, num_tokens, sizes.context, device, only=idx)
        actual = decoder.forward(input_ids[:, idx], alone, linear)
        num_different += int((actual != expected[idx::num_tokens]).any(1).sum())
    yield Correct("step", "rows of K = 4 against K = 0", num_tokens, num_different, 0)

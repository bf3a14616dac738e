"""How fast each kernel is on a CUDA device, against a copy and against its peers in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from specserve_kernels.gpu_check.decoder import a_place
from specserve_kernels.gpu_check.paged import BLOCK_SIZE
from specserve_kernels.gpu_check.report import Speed
from specserve_kernels.gpu_check.timing import median_microseconds
from specserve_kernels.triton_kernels import gemm, norms, rope_kv, swiglu
from specserve_kernels.triton_kernels.attention import paged_attention
from specserve_kernels.triton_kernels.choosing import Chooser
from specserve_kernels.triton_kernels.model_shapes import MODEL_SHAPES, ModelShape
from specserve_kernels.triton_kernels.reading import read_once
from specserve_kernels.triton_kernels.rows import Row, pack_edits, pack_rows
from specserve_kernels.triton_kernels.verification import Guesses, verify_replay

_COLD_BYTES = 400 << 20  # several times any cache
_MAX_SETS = 64


@dataclass(frozen=True)
class Scale:
    """shape: whose matrices, heads and vocabulary; guesses: K of the verify rows

    batch_sizes:  of sampling and verification; the largest one has the goals
    contexts:     (sequences, context) of attention; the last one has the goals
    matmul_rows, elementwise_rows: row counts
    """

    shape: ModelShape
    batch_sizes: tuple[int, ...]
    contexts: tuple[tuple[int, int], ...]
    matmul_rows: tuple[int, ...]
    elementwise_rows: tuple[int, ...]
    guesses: int = 4


FULL = Scale(
    MODEL_SHAPES[0], (1, 8, 32), ((1, 8192), (8, 2048), (32, 4096)), (1, 8, 40, 160), (80, 8192)
)


def num_sets(num_bytes: int) -> int:
    """How many sets of data of that size to go through in turn."""
    return max(2, min(_MAX_SETS, -(-_COLD_BYTES // num_bytes)))


def sampling_speeds(scale: Scale, device: torch.device) -> Iterator[Speed]:
    """Sampling and verification of B sequences with K guesses each, against one read of [L, V]."""
    most, plain = max(scale.batch_sizes), Row()
    kinds = {"greedy": Row(temperature=0.0), "top-p": Row(top_p=0.95)}
    cases = [(size, torch.bfloat16, "temperature", plain) for size in scale.batch_sizes]
    cases += [(most, torch.float32, "temperature", plain)]
    cases += [(most, torch.bfloat16, kind, row) for kind, row in kinds.items()]
    for batch_size, dtype, kind, row in cases:
        num_rows = batch_size * (scale.guesses + 1)
        shape = num_rows, scale.shape.vocab_size
        size = shape[0] * shape[1] * dtype.itemsize
        sets = torch.empty(num_sets(size), *shape, dtype=dtype, device=device).normal_(std=3.0)
        whole = choose_and_verify(row, scale, batch_size, dtype, device)
        yield Speed(
            "sampling + verification",
            f"{batch_size} x {scale.guesses + 1} rows, {str(dtype)[6:]}, {kind}",
            median_microseconds([partial(whole, logits) for logits in sets]),
            size,
            peer="one read",
            peer_microseconds=median_microseconds([partial(read_once, logits) for logits in sets]),
            most_of_peer=1.2 if batch_size == most and row is plain else 0.0,
        )


def choose_and_verify(
    row: Row, scale: Scale, batch_size: int, dtype: torch.dtype, device: torch.device
) -> Callable[[Tensor], None]:
    """What a step does with its logits; every row wants the same, with a seed of its own."""
    per_sequence = scale.guesses + 1
    num_rows = batch_size * per_sequence
    rows = [row._replace(seed=seed) for seed in range(num_rows)]
    packed, edits = pack_rows(rows, device), pack_edits(rows, device)
    chooser = Chooser(num_rows, scale.shape.vocab_size, dtype, device)
    index = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    guesses = Guesses(index[::per_sequence].contiguous(), index, index % per_sequence - 1)
    verdicts = torch.empty(batch_size, 2 * per_sequence, dtype=torch.int32, device=device)

    def whole(logits: Tensor) -> None:
        choices = chooser.choose(logits, packed, edits)
        verify_replay(guesses, choices.token_ids, verdicts)

    return whole


def gemm_speeds(scale: Scale, device: torch.device) -> Iterator[Speed]:
    """The matrices of a model, at row counts from decode to verify, against torch's."""
    shape = scale.shape
    hidden, inner = shape.hidden_size, shape.intermediate_size
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    for rows, columns in ((qkv, hidden), (2 * inner, hidden), (hidden, inner)):
        size = 2 * rows * columns
        sets = num_sets(size), rows, columns
        weights = torch.empty(sets, dtype=torch.bfloat16, device=device).normal_()
        for num_rows in scale.matmul_rows:
            x = torch.empty(num_rows, columns, dtype=torch.bfloat16, device=device).normal_()
            yield Speed(
                "gemm",
                f"{num_rows} x [{rows}, {columns}]",
                median_microseconds([partial(gemm.linear, x, weight) for weight in weights]),
                size + 2 * num_rows * (rows + columns),
                peer="torch",
                peer_microseconds=median_microseconds([partial(F.linear, x, w) for w in weights]),
            )


def attention_speeds(scale: Scale, device: torch.device) -> Iterator[Speed]:
    """Verify rows after long contexts, against the same step without guesses."""
    for batch_size, context_len in scale.contexts:
        has_goals = (batch_size, context_len) == scale.contexts[-1]
        alone = attention_speed(scale.shape, batch_size, 1, context_len, device)
        verify = attention_speed(scale.shape, batch_size, scale.guesses + 1, context_len, device)
        yield alone
        yield replace(
            verify,
            peer="K = 0",
            peer_microseconds=alone.microseconds,
            share_wanted=0.8 if has_goals else 0.0,
            most_of_peer=1.1 if has_goals else 0.0,
        )
        yield sdpa_speed(scale, batch_size, context_len, device)


def attention_speed(
    shape: ModelShape, batch_size: int, num_tokens: int, context_len: int, device: torch.device
) -> Speed:
    place = a_place(shape, batch_size, num_tokens, context_len, device)
    cache = 2, place.num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim
    size = 4 * batch_size * context_len * shape.num_kv_heads * shape.head_dim
    caches = torch.empty(num_sets(size), *cache, dtype=torch.bfloat16, device=device).normal_()
    num_rows = batch_size * num_tokens
    query = torch.randn(num_rows, shape.num_heads, shape.head_dim, device=device).bfloat16()
    attend = partial(paged_attention, query, rows=place.rows, scale=shape.head_dim**-0.5)
    calls = [partial(attend, k_cache=keys, v_cache=values) for keys, values in caches]
    return Speed(
        "attention",
        f"{batch_size} x {num_tokens} rows, context {context_len}",
        median_microseconds(calls),
        size + 4 * query.numel(),
    )


def sdpa_speed(scale: Scale, batch_size: int, context_len: int, device: torch.device) -> Speed:
    """torch's own attention over KV that already lies in one piece; all rows see all of it."""
    shape, num_tokens = scale.shape, scale.guesses + 1
    cache = 2, batch_size, shape.num_kv_heads, context_len, shape.head_dim
    size = 4 * batch_size * shape.num_kv_heads * context_len * shape.head_dim
    pairs = torch.empty(num_sets(size), *cache, dtype=torch.bfloat16, device=device).normal_()
    heads = batch_size, shape.num_heads, num_tokens, shape.head_dim
    attend = partial(
        F.scaled_dot_product_attention, torch.randn(heads, device=device).bfloat16(),
        enable_gqa=True,
    )  # fmt: skip
    calls = [partial(attend, key=keys, value=values) for keys, values in pairs]
    case = f"{batch_size} x {num_tokens} rows, context {context_len}"
    return Speed("torch SDPA", case, median_microseconds(calls), size)


def elementwise_speeds(scale: Scale, device: torch.device) -> Iterator[Speed]:
    """Norms, SwiGLU and RoPE with the KV write, for a step and for a long prompt."""
    for num_rows in scale.elementwise_rows:
        for kernel, (calls, num_bytes) in elementwise_calls(scale.shape, num_rows, device).items():
            yield Speed(kernel, f"{num_rows} rows", median_microseconds(calls), num_bytes)


def elementwise_calls(
    shape: ModelShape, num_rows: int, device: torch.device
) -> dict[str, tuple[list[Callable[[], object]], int]]:
    """By kernel: calls over different data, and the bytes that each must move."""
    hidden, inner, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    width = (shape.num_heads + 2 * shape.num_kv_heads) * head_dim
    weight = torch.ones(hidden, dtype=torch.bfloat16, device=device)
    angles = torch.rand(8192, head_dim // 2, device=device)
    index = torch.arange(num_rows, dtype=torch.int32, device=device)
    blocks = -(-num_rows // BLOCK_SIZE), BLOCK_SIZE, shape.num_kv_heads, head_dim
    keys, values = torch.empty(2, *blocks, dtype=torch.bfloat16, device=device)

    def data(columns: int) -> Tensor:
        sets = num_sets(2 * num_rows * columns), num_rows, columns
        return torch.empty(sets, dtype=torch.bfloat16, device=device).normal_()

    def add_norm(pair: Tensor) -> object:
        return norms.add_rms_norm(pair[:num_rows], pair[num_rows:], weight, 1e-5)

    def rotate(qkv: Tensor) -> object:
        where = index, index, angles, angles
        return rope_kv.rope_and_write_kv(qkv, *where, keys, values)

    pairs = data(2 * hidden).view(-1, 2 * num_rows, hidden)
    row_bytes = 2 * num_rows
    return {
        "norms": ([partial(add_norm, pair) for pair in pairs], 4 * hidden * row_bytes),
        "swiglu": (
            [partial(swiglu.swiglu, part) for part in data(2 * inner)],
            3 * inner * row_bytes,
        ),
        "rope_kv": ([partial(rotate, qkv) for qkv in data(width)], 2 * width * row_bytes),
    }


SPEEDS = (sampling_speeds, attention_speeds, gemm_speeds, elementwise_speeds)

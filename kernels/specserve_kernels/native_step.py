"""A whole decoder step in native code: the ctypes side of native/step.h and native/attention.h.

Structures mirror the C++ ones field by field. Everything that could reach memory wrongly is checked
here by asserts (only a bug can break it): shapes, dtypes, contiguity, ids, slots and rows in range.
A call releases the GIL for the whole step. Imports torch, numpy and the library only.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from ctypes import byref
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from specserve_kernels import huge_pages, native_library
from specserve_kernels.interface import PagedBatch
from specserve_kernels.native_abi import (
    PHASES,
    CHeads,
    CLayer,
    CModel,
    CPhases,
    CStep,
    CWeight,
    in_range,
    library,
    pointer,
    segments_of,
)

Dtype = Literal["fp32", "bf16", "int8"]
DTYPE_CODES: dict[Dtype, int] = {"fp32": 0, "bf16": 1, "int8": 2}
KV_DTYPES: dict[Dtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.bfloat16,
}
GATE_UP_GROUP = 16  # rows of gate, then as many of up, and so on


@dataclass(frozen=True)
class StepShape:
    """Sizes of one decoder. inner_size is padded up to a multiple of GATE_UP_GROUP."""

    num_layers: int
    hidden_size: int  # D
    inner_size: int  # I
    vocab_size: int  # V
    num_heads: int  # N
    num_kv_heads: int  # G
    head_dim: int  # H
    norm_epsilon: float
    windows: tuple[int | None, ...]  # per layer; None: sees everything

    @property
    def matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """[out, in] of each matrix of a layer."""
        query_size = self.num_heads * self.head_dim
        return {
            "qkv": (query_size + 2 * self.num_kv_heads * self.head_dim, self.hidden_size),
            "out": (self.hidden_size, query_size),
            "gate_up": (2 * self.inner_size, self.hidden_size),
            "down": (self.hidden_size, self.inner_size),
        }


@dataclass(frozen=True)
class Phases:
    """Nanoseconds of the calling thread in one step, barriers included."""

    gemm: int  # the layers' matrix products
    head: int  # the product with the lm_head
    attention: int
    rest: int  # embedding, norms, quantisation, rotation, KV writes
    total: int


def available() -> bool:
    """Whether this process can run native steps; `native_library.why_not` says why it cannot."""
    return native_library.load() is not None


def row_kernels() -> str:
    """The instruction set of attention, norms and rotation: amx, avx512, avx2 or portable."""
    return str(library().specserve_row_kernels().decode())


def choose_row_kernels(name: str) -> bool:
    """Force an instruction set (tests); False where this CPU cannot run it."""
    return bool(library().specserve_choose_row_kernels(name.encode()))


def pack_matrix(matrix: Tensor, dtype: Dtype) -> dict[str, Tensor]:
    """matrix [n, k] -> {"packed": uint8, and for int8 "scales": [n] fp32}."""
    source = matrix.detach().to(torch.float32).contiguous()
    n, k = source.shape
    code = DTYPE_CODES[dtype]
    packed = torch.empty(library().specserve_gemm_packed_bytes(code, n, k), dtype=torch.uint8)
    scales = torch.empty(n if dtype == "int8" else 0)
    error = library().specserve_gemm_pack(
        code, n, k, source.data_ptr(), packed.data_ptr(), scales.data_ptr() or None
    )
    if error:
        raise ValueError(error.decode())
    return {"packed": packed, "scales": scales} if dtype == "int8" else {"packed": packed}


@cache
def _pool(threads: int, process: int) -> int:
    """Threads live as long as the process and are shared by all models that ask for as many."""
    assert threads >= 1, threads
    return int(library().specserve_new_pool(threads))


def pool_of(threads: int) -> int:
    """The address of this process's native pool of so many threads."""
    return _pool(threads, os.getpid())  # a fork has none of its parent's threads


class NativeStep:
    """One decoder's weights as the native step reads them, and its workspace.

    packed: "embedding" [V, D] fp32 or bf16; "final_norm", "layers.I.input_norm" and
            "layers.I.mlp_norm" [D], "layers.I.query_norm" and "layers.I.key_norm" [H] (or absent)
            fp32; per matrix M of "head" and "layers.I." + MATRICES: M + ".packed" uint8, with
            ".scales" and ".bias" [out] fp32 where there are any
    threads: of a step, the calling thread included
    """

    def __init__(
        self, shape: StepShape, packed: Mapping[str, Tensor], dtype: Dtype, threads: int
    ) -> None:
        self.shape = shape
        self.kv_dtype = KV_DTYPES[dtype]
        self._dtype = dtype
        self._pool = pool_of(threads)
        self._phases = CPhases()
        self._keep: list[object] = []
        embedding = packed["embedding"]
        assert embedding.dtype in (torch.float32, torch.bfloat16), embedding.dtype
        layers = (CLayer * shape.num_layers)(
            *(self._layer(packed, idx) for idx in range(shape.num_layers))
        )
        self._model = CModel(
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            inner_size=shape.inner_size,
            vocab_size=shape.vocab_size,
            heads=CHeads(shape.num_heads, shape.num_kv_heads, shape.head_dim),
            norm_epsilon=shape.norm_epsilon,
            kv_is_bf16=self.kv_dtype == torch.bfloat16,
            embedding_is_bf16=embedding.dtype == torch.bfloat16,
            embedding=self._kept(embedding, shape.vocab_size, shape.hidden_size),
            final_norm=self._vector(packed, "final_norm", shape.hidden_size),
            head=self._weight(packed, "head", shape.vocab_size, shape.hidden_size),
            layers=ctypes.addressof(layers),
        )
        self._keep.append(layers)
        self._workspace = _Workspace()
        self._results = huge_pages.Recycled()

    def run(
        self,
        input_ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64, rows of cos and sin
        batch: PagedBatch,
        rope: tuple[Tensor, Tensor],  # cos and sin [positions, H/2] fp32
        kv: tuple[Tensor, Tensor],  # keys and values of `kv_shapes`
        logits_rows: Seq[int],  # L packed rows
        captured: tuple[int, ...] = (),  # layers, ascending
        states: Tensor | None = None,  # [T, len(captured), D] fp32, written
    ) -> Tensor:  # [L, V] fp32
        """Writes KV of all rows, returns the logits of L of them."""
        shape = self.shape
        assert _is_array(input_ids, torch.int64, len(input_ids)), input_ids.shape
        assert len(input_ids) > 0, "a step of no rows"
        assert _is_array(positions, torch.int64, len(input_ids)), positions.shape
        assert in_range(input_ids.numpy(), shape.vocab_size), "an id outside the vocabulary"
        assert in_range(positions.numpy(), rope[0].shape[0]), "a position outside the rope tables"
        assert all(_is_array(t, torch.float32, len(rope[0]), shape.head_dim // 2) for t in rope)
        num_blocks = kv[0].shape[1]
        for tensor, wanted in zip(
            kv, kv_shapes(shape, self.kv_dtype, num_blocks, batch.block_size), strict=True
        ):
            assert _is_array(tensor, self.kv_dtype, *wanted), (tensor.shape, wanted)
        segments, keep = segments_of(batch, len(input_ids), num_blocks)
        rows = array("q", logits_rows)
        assert in_range(rows, len(input_ids)), "logits of a row that is not in the step"
        layers = array("q", captured)
        assert in_range(layers, shape.num_layers + 1), captured
        if states is not None:
            wanted = (len(input_ids), len(captured), shape.hidden_size)
            assert _is_array(states, torch.float32, *wanted), (states.shape, wanted)
        assert states is not None or not captured, "states of layers, but no buffer for them"
        logits = self._results.empty(len(rows), shape.vocab_size)
        step = CStep(
            segments=segments,
            input_ids=input_ids.data_ptr(),
            positions=positions.data_ptr(),
            cos=rope[0].data_ptr(),
            sin=rope[1].data_ptr(),
            keys=kv[0].data_ptr(),
            values=kv[1].data_ptr(),
            num_blocks=num_blocks,
            logits_rows=pointer(rows),
            num_logits=len(rows),
            logits=logits.data_ptr(),
            captured=pointer(layers),
            num_captured=len(layers),
            states=None if states is None else states.data_ptr(),
        )
        library().specserve_step(
            byref(self._model), byref(step), self._pool, self._workspace.handle, byref(self._phases)
        )
        del keep
        return logits

    def last_step_phases(self) -> Phases:
        """Where the time of the last step went."""
        return Phases(*(int(getattr(self._phases, n)) for n in PHASES))

    # ---- building the structures -------------------------------------------------------------

    def _kept(self, tensor: Tensor, *shape: int) -> int:
        assert tensor.is_contiguous(), "not contiguous"
        assert tuple(tensor.shape) == shape, (tensor.shape, shape)
        self._keep.append(tensor)
        return tensor.data_ptr()

    def _vector(self, packed: Mapping[str, Tensor], name: str, size: int) -> int | None:
        tensor = packed.get(name)
        if tensor is None:
            return None
        assert tensor.dtype == torch.float32, (name, tensor.dtype)
        return self._kept(tensor, size)

    def _weight(self, packed: Mapping[str, Tensor], name: str, n: int, k: int) -> CWeight:
        code = DTYPE_CODES[self._dtype]
        tensor = packed[f"{name}.packed"]
        assert tensor.dtype == torch.uint8, (name, tensor.dtype)
        if tensor.data_ptr() % 64:
            tensor = tensor.clone()  # torch's own memory is aligned
        assert tensor.data_ptr() % 64 == 0, name
        size = library().specserve_gemm_packed_bytes(code, n, k)
        weight = CWeight(code, n, k, self._kept(tensor, size))
        weight.scales = self._vector(packed, f"{name}.scales", n)
        assert (weight.scales is not None) == (self._dtype == "int8"), name
        weight.bias = self._vector(packed, f"{name}.bias", n)
        return weight

    def _layer(self, packed: Mapping[str, Tensor], idx: int) -> CLayer:
        prefix, shape = f"layers.{idx}", self.shape
        layer = CLayer(window=shape.windows[idx] or 0)
        for name, size in (("input_norm", shape.hidden_size), ("mlp_norm", shape.hidden_size)):
            assert f"{prefix}.{name}" in packed, f"{prefix}.{name}"
            setattr(layer, name, self._vector(packed, f"{prefix}.{name}", size))
        for name in ("query_norm", "key_norm"):
            setattr(layer, name, self._vector(packed, f"{prefix}.{name}", shape.head_dim))
        for name, (n, k) in shape.matrix_shapes.items():
            setattr(layer, name, self._weight(packed, f"{prefix}.{name}", n, k))
        return layer


class _Workspace:
    """Native buffers that grow to the largest step; freed with this object."""

    def __init__(self) -> None:
        self.handle: int = library().specserve_new_workspace()
        self._delete = library().specserve_delete_workspace

    def __del__(self) -> None:
        self._delete(self.handle)


def kv_shapes(
    shape: StepShape, dtype: torch.dtype, num_blocks: int, block_size: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of keys and values of all layers. Keys stand so that one load brings many slots.

    keys:   bf16 [layers, P, G, H/2, S, 2], fp32 [layers, P, G, H, S]
    values: [layers, P, G, S, H]
    """
    head = (shape.num_layers, num_blocks, shape.num_kv_heads)
    pairs = (shape.head_dim // 2, block_size, 2)
    keys = pairs if dtype == torch.bfloat16 else (shape.head_dim, block_size)
    return (*head, *keys), (*head, block_size, shape.head_dim)


def paged_attention(
    query: Tensor,  # [T, N, H] fp32
    new_keys: Tensor,  # [T, G, H] fp32, of the rows themselves; written first
    new_values: Tensor,
    kv: tuple[Tensor, Tensor],  # of one layer: `kv_shapes` without its first dimension
    batch: PagedBatch,
    *,
    threads: int,
    window: int | None = None,
) -> Tensor:  # [T, N, H] fp32
    """The step's attention of one layer by itself, for tests and benchmarks."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = new_keys.shape[1]
    shape = StepShape(1, 0, 0, 0, num_heads, num_kv_heads, head_dim, 0.0, (window,))
    num_blocks = kv[0].shape[0]
    assert kv[0].dtype in KV_DTYPES.values(), kv[0].dtype
    for tensor, wanted in zip(
        kv, kv_shapes(shape, kv[0].dtype, num_blocks, batch.block_size), strict=True
    ):
        assert _is_array(tensor, kv[0].dtype, *wanted[1:]), (tensor.shape, wanted)
    assert num_heads % num_kv_heads == 0, (query.shape, new_keys.shape)
    assert head_dim % 2 == 0, query.shape
    assert _is_array(query, torch.float32, *query.shape), query.dtype
    for tensor in (new_keys, new_values):
        assert _is_array(tensor, torch.float32, num_rows, num_kv_heads, head_dim), tensor.shape
    segments, keep = segments_of(batch, num_rows, num_blocks)
    out = torch.empty_like(query)
    library().specserve_attention(
        *(byref(segments), byref(CHeads(num_heads, num_kv_heads, head_dim))),
        *(kv[0].data_ptr(), kv[1].data_ptr(), kv[0].dtype == torch.bfloat16),
        *(new_keys.data_ptr(), new_values.data_ptr(), query.data_ptr(), out.data_ptr()),
        *(head_dim**-0.5, window or 0, pool_of(threads)),
    )
    del keep
    return out


def _is_array(tensor: Tensor, dtype: torch.dtype, *shape: int) -> bool:
    return tensor.dtype == dtype and tuple(tensor.shape) == shape and tensor.is_contiguous()

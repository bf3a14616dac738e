"""How long the matrix products of a step take when they are all that runs: the floor of a step.

The same products with the same number of rows in the same process. For the native decoder also the
same packed weights, each thread doing its share of the columns of every product without waiting
for the others: no barrier, no norm, no attention, and what a call costs with no column to compute
is taken off. So the floor errs on the low side. For the torch decoder the linears of the same
shapes over weights of its own, called as the decoder calls them.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Mapping
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from specserve.models.config import ModelConfig
from specserve.models.interface import CausalLM
from specserve.models.linear import GemmWeight, Weight
from specserve.models.native import NativeDecoder, step_shape
from specserve.models.quantize import Int8Weight
from specserve_kernels import native_library
from specserve_kernels.native_step import DTYPE_CODES

COLUMN_TILE = 16  # a share of columns begins at a multiple of it
LEAST_SECONDS = 1e-7  # where a model is so small that the calls are all there is


class Floor(Protocol):
    def seconds(self, num_rows: int, num_logits: int) -> float:
        """Of one pass over all products: layers with num_rows rows, the head with num_logits."""
        ...


class Product(msgspec.Struct, frozen=True):
    """One matrix product of a step: x [M, k] @ w [n, k].T"""

    n: int
    k: int
    is_head: bool  # M is the number of logit rows


def products_of(config: ModelConfig) -> list[Product]:
    """All of one step, in the order in which they run."""
    shape = step_shape(config)
    layer = [Product(n, k, False) for n, k in shape.matrix_shapes.values()]
    return [*layer * config.num_layers, Product(config.vocab_size, config.hidden_size, True)]


def floor_of(model: CausalLM, config: ModelConfig, dtype: torch.dtype, threads: int) -> Floor:
    """dtype: of the weights; int8 included"""
    if isinstance(model, NativeDecoder):
        return NativeFloor(model, threads)
    return TorchFloor(products_of(config), dtype)


class TorchFloor:
    """Linears of the decoder's shapes over random weights, one after the other."""

    def __init__(self, products: list[Product], dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self._products = products
        self._weights: list[Weight] = []
        for product in products:
            matrix = torch.randn(product.n, product.k, generator=generator)
            self._weights.append(
                Int8Weight(matrix) if dtype == torch.int8 else GemmWeight(matrix.to(dtype))
            )
        self._inputs: dict[tuple[int, int], Tensor] = {}

    def seconds(self, num_rows: int, num_logits: int) -> float:
        pairs = [
            (weight, self._input(num_logits if product.is_head else num_rows, product.k))
            for weight, product in zip(self._weights, self._products, strict=True)
        ]
        started = time.perf_counter()
        for weight, x in pairs:
            weight.apply(x)
        return time.perf_counter() - started

    def _input(self, num_rows: int, k: int) -> Tensor:
        """[num_rows, k], made once"""
        if (num_rows, k) not in self._inputs:
            dtype = self._weights[0].dtype
            self._inputs[num_rows, k] = torch.randn(num_rows, k).to(dtype)
        return self._inputs[num_rows, k]


class NativeFloor:
    """The decoder's own packed weights, columns split evenly over threads that never wait."""

    def __init__(self, model: NativeDecoder, threads: int) -> None:
        self._packed = model.packed_tensors()  # kept: calls hold addresses of it
        self._products = products_of(model.config)
        self._names = _matrix_names(model.config.num_layers)
        self._code = DTYPE_CODES[model.weight_dtype]
        self._threads = threads
        self._calls: dict[tuple[int, int], list[_Share]] = {}

    def seconds(self, num_rows: int, num_logits: int) -> float:
        key = (num_rows, num_logits)
        if key not in self._calls:
            self._calls[key] = [self._share(columns, *key) for columns in self.column_shares()]
        shares = self._calls[key]
        full = _run_at_once([share.full for share in shares])
        empty = _run_at_once([share.empty for share in shares])
        return max(full - empty, LEAST_SECONDS)

    def column_shares(self) -> list[list[tuple[int, int]]]:
        """For each thread the columns (from, to) that it computes of each product."""
        return [
            [_columns(product.n, idx, self._threads) for product in self._products]
            for idx in range(self._threads)
        ]

    def _share(self, columns: list[tuple[int, int]], num_rows: int, num_logits: int) -> _Share:
        share = _Share()
        for product, name, part in zip(self._products, self._names, columns, strict=True):
            rows = num_logits if product.is_head else num_rows
            share.add(self._code, product, self._packed, name, rows, part)
        return share


def _columns(n: int, idx: int, parts: int) -> tuple[int, int]:
    """Where part `idx` of n columns begins and ends: whole tiles, evenly."""
    tiles = -(-n // COLUMN_TILE)
    begin, end = (min(n, tiles * at // parts * COLUMN_TILE) for at in (idx, idx + 1))
    return begin, end


def _matrix_names(num_layers: int) -> list[str]:
    layers = [
        f"layers.{idx}.{name}"
        for idx in range(num_layers)
        for name in ("qkv", "out", "gate_up", "down")
    ]
    return [*layers, "head"]


_Call = tuple[int | None, ...]


class _Share:
    """The calls of one thread, all with their columns and all with none."""

    def __init__(self) -> None:
        self.full: list[_Call] = []
        self.empty: list[_Call] = []
        self._keep: list[Tensor] = []
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def add(
        self,
        code: int,
        product: Product,
        packed: Mapping[str, Tensor],
        name: str,
        num_rows: int,
        columns: tuple[int, int],
    ) -> None:
        x = self._buffer(num_rows, product.k)
        out = self._buffer(num_rows, product.n)
        scales = packed.get(f"{name}.scales")
        weight = packed[f"{name}.packed"]
        if weight.data_ptr() % 64:
            weight = weight.clone()
        self._keep.append(weight)
        head = (code, product.n, product.k, weight.data_ptr())
        scale_address = None if scales is None else scales.data_ptr()
        rest = (scale_address, None, num_rows, x.data_ptr(), product.k)
        tail = (0, out.data_ptr(), product.n)
        self.full.append((*head, *rest, *columns, *tail))
        self.empty.append((*head, *rest, 0, 0, *tail))

    def _buffer(self, num_rows: int, width: int) -> Tensor:
        if (num_rows, width) not in self._buffers:
            self._buffers[num_rows, width] = torch.randn(num_rows, width)
        return self._buffers[num_rows, width]


def _run_at_once(calls_by_thread: list[list[_Call]]) -> float:
    """Seconds from a common start to the end of the last thread."""
    run = _gemm_run()
    start = threading.Barrier(len(calls_by_thread))
    ended = [0.0] * len(calls_by_thread)
    started = [0.0] * len(calls_by_thread)

    def work(idx: int) -> None:
        calls = calls_by_thread[idx]
        start.wait()
        started[idx] = time.perf_counter()
        for call in calls:
            complaint = run(*call)
            assert complaint is None, complaint
        ended[idx] = time.perf_counter()

    helpers = [threading.Thread(target=work, args=(idx,)) for idx in range(1, len(calls_by_thread))]
    for helper in helpers:
        helper.start()
    work(0)
    for helper in helpers:
        helper.join()
    return max(ended) - min(started)


def _gemm_run() -> ctypes._NamedFuncPointer:
    library = native_library.load()
    assert library is not None, native_library.why_not()  # a NativeDecoder could not exist
    run = library.specserve_gemm_run
    run.restype = ctypes.c_char_p
    run.argtypes = [
        *(ctypes.c_int32, ctypes.c_int64, ctypes.c_int64),  # dtype, n, k
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p),  # packed, scales, bias
        *(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64),  # rows, x, ldx
        *(ctypes.c_int64, ctypes.c_int64, ctypes.c_int32),  # columns from, to, epilogue
        *(ctypes.c_void_p, ctypes.c_int64),  # out, ldo
    ]
    return run

"""The ctypes mirror of native/step.h and native/attention.h, field by field.

Callers keep alive what the pointers point to. Imports torch, numpy and the library only.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_size_t, c_void_p
from functools import cache
from itertools import chain

import numpy as np
import numpy.typing as npt

from specserve_kernels import native_library
from specserve_kernels.interface import PagedBatch

MATRICES = ("qkv", "out", "gate_up", "down")
PHASES = ("gemm", "head", "attention", "rest", "total")


class CWeight(Structure):
    _fields_ = (
        ("dtype", c_int32),
        ("n", c_int64),
        ("k", c_int64),
        ("packed", c_void_p),
        ("scales", c_void_p),
        ("bias", c_void_p),
    )


class CHeads(Structure):
    _fields_ = (("num_heads", c_int64), ("num_kv_heads", c_int64), ("head_dim", c_int64))


class CLayer(Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        *((name, CWeight) for name in MATRICES),
        ("window", c_int64),
    )


class CModel(Structure):
    _fields_ = (
        ("num_layers", c_int64),
        ("hidden_size", c_int64),
        ("inner_size", c_int64),
        ("vocab_size", c_int64),
        ("heads", CHeads),
        ("norm_epsilon", c_float),
        ("kv_is_bf16", c_int32),
        ("embedding_is_bf16", c_int32),
        ("reserved", c_int32),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("head", CWeight),
        ("layers", c_void_p),
    )


class CSegments(Structure):
    _fields_ = (
        ("num_segments", c_int64),
        ("num_rows", c_int64),
        ("block_size", c_int64),
        ("query_start", c_void_p),
        ("context_lens", c_void_p),
        ("block_offsets", c_void_p),
        ("blocks", c_void_p),
        ("parents", c_void_p),
        ("is_tree", c_void_p),
    )


class CStep(Structure):
    _fields_ = (
        ("segments", CSegments),
        ("input_ids", c_void_p),
        ("positions", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("num_blocks", c_int64),
        ("logits_rows", c_void_p),
        ("num_logits", c_int64),
        ("logits", c_void_p),
        ("captured", c_void_p),
        ("num_captured", c_int64),
        ("states", c_void_p),
    )


class CPhases(Structure):
    _fields_ = tuple((name, c_int64) for name in PHASES)


@cache
def library() -> ctypes.CDLL:
    found = native_library.load()
    if found is None:
        raise RuntimeError(f"native kernels are not there: {native_library.why_not()}")
    found.specserve_new_pool.argtypes = [c_int32]
    found.specserve_new_pool.restype = c_void_p
    found.specserve_new_workspace.argtypes = []
    found.specserve_new_workspace.restype = c_void_p
    found.specserve_delete_workspace.argtypes = [c_void_p]
    found.specserve_delete_workspace.restype = None
    found.specserve_step.argtypes = [
        *(POINTER(CModel), POINTER(CStep)),
        *(c_void_p, c_void_p, POINTER(CPhases)),
    ]
    found.specserve_step.restype = None
    found.specserve_attention.argtypes = [
        *(POINTER(CSegments), POINTER(CHeads), c_void_p, c_void_p, c_int32),
        *(c_void_p, c_void_p, c_void_p, c_void_p, c_float, c_int64, c_void_p),
    ]
    found.specserve_attention.restype = None
    found.specserve_row_kernels.restype = c_char_p
    found.specserve_choose_row_kernels.argtypes = [c_char_p]
    found.specserve_choose_row_kernels.restype = c_int32
    found.specserve_gemm_packed_bytes.argtypes = [c_int32, c_int64, c_int64]
    found.specserve_gemm_packed_bytes.restype = c_size_t
    found.specserve_gemm_pack.argtypes = [c_int32, c_int64, c_int64, *[c_void_p] * 3]
    found.specserve_gemm_pack.restype = c_char_p
    return found


def segments_of(
    batch: PagedBatch, num_rows: int, num_blocks: int
) -> tuple[CSegments, tuple[npt.NDArray[np.generic], ...]]:
    """The C form of a batch of num_rows rows over num_blocks blocks, and what must outlive it."""
    starts = np.array(batch.query_start_loc, dtype=np.int64)  # [B+1]
    contexts = np.array(batch.context_lens, dtype=np.int64)  # [B]
    lengths = np.array([len(table) for table in batch.block_tables], dtype=np.int64)  # [B]
    offsets = np.cumsum(lengths) - lengths
    blocks = np.fromiter(chain.from_iterable(batch.block_tables), np.int32, int(lengths.sum()))
    is_tree = np.array([parents is not None for parents in batch.parents], dtype=np.uint8)
    counts = np.diff(starts)
    assert len(contexts) == len(lengths) == len(is_tree) == len(counts), "segments disagree"
    assert starts[0] == 0, starts
    assert starts[-1] == num_rows, (starts, num_rows)
    assert (counts >= 0).all(), starts
    assert (contexts >= 0).all(), contexts
    assert batch.block_size >= 1, batch.block_size
    assert ((contexts + counts) <= lengths * batch.block_size).all(), "a block table is too short"
    assert in_range(blocks, num_blocks), "a block that the cache does not have"
    parents = np.full(num_rows, -1, dtype=np.int32)  # [T]
    for start, count, own in zip(starts[:-1], counts, batch.parents, strict=True):
        if own is not None:
            parents[start : start + count] = own
    assert (parents < np.arange(num_rows) - np.repeat(starts[:-1], counts)).all(), "a late parent"
    assert (parents >= -1).all(), parents
    segments = CSegments(
        num_segments=len(contexts),
        num_rows=num_rows,
        block_size=batch.block_size,
        query_start=starts.ctypes.data,
        context_lens=contexts.ctypes.data,
        block_offsets=offsets.ctypes.data,
        blocks=blocks.ctypes.data,
        parents=parents.ctypes.data,
        is_tree=is_tree.ctypes.data,
    )
    return segments, (starts, contexts, offsets, blocks, parents, is_tree)


def in_range(numbers: npt.NDArray[np.generic], end: int) -> bool:
    """Whether all are in 0 .. end-1."""
    return numbers.size == 0 or bool(numbers.min() >= 0 and numbers.max() < end)

"""The ctypes mirror of native/step.h and native/attention.h, field by field.

Callers keep alive what the pointers point to. Imports torch, numpy and the library only.
"""

from __future__ import annotations

import ctypes
from array import array
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_size_t, c_void_p
from functools import cache

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
) -> tuple[CSegments, tuple[array[int] | bytes, ...]]:
    """The C form of a batch of num_rows rows over num_blocks blocks, and what must outlive it.

    Plain arrays: at these sizes numpy's pointers alone take longer than the conversion.
    """
    starts, contexts = array("q", batch.query_start_loc), array("q", batch.context_lens)
    assert len(batch.block_tables) == len(batch.parents) == len(contexts) == len(starts) - 1
    assert starts[0] == 0, starts
    assert starts[-1] == num_rows, (starts, num_rows)
    assert batch.block_size >= 1, batch.block_size
    offsets, blocks = array("q"), array("i")
    for idx, table in enumerate(batch.block_tables):
        count = starts[idx + 1] - starts[idx]
        assert count >= 0, starts
        assert contexts[idx] >= 0, contexts
        assert contexts[idx] + count <= len(table) * batch.block_size, "a block table is too short"
        offsets.append(len(blocks))
        blocks.extend(table)
    assert in_range(blocks, num_blocks), "a block that the cache does not have"
    is_tree = bytes(parents is not None for parents in batch.parents)
    parents = array("i", bytes(4 * num_rows)) if any(is_tree) else array("i")
    for start, own in zip(starts, batch.parents, strict=False):
        if own is not None:
            assert all(-1 <= parent < at for at, parent in enumerate(own)), "a parent after a child"
            parents[start : start + len(own)] = array("i", own)
    assert len(parents) in (0, num_rows), "parents of more rows than there are"
    segments = CSegments(
        num_segments=len(contexts),
        num_rows=num_rows,
        block_size=batch.block_size,
        query_start=pointer(starts),
        context_lens=pointer(contexts),
        block_offsets=pointer(offsets),
        blocks=pointer(blocks),
        parents=pointer(parents),
        is_tree=ctypes.cast(c_char_p(is_tree), c_void_p),
    )
    return segments, (starts, contexts, offsets, blocks, parents, is_tree)


def pointer(numbers: array[int]) -> int:
    """The address of the first one."""
    return numbers.buffer_info()[0]


def in_range(numbers: array[int] | npt.NDArray[np.int64], end: int) -> bool:
    """Whether all are in 0 .. end-1."""
    if len(numbers) == 0:
        return True
    values = np.frombuffer(numbers, numbers.typecode) if isinstance(numbers, array) else numbers
    return bool(values.min() >= 0 and values.max() < end)

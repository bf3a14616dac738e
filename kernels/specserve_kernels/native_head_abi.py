"""The shapes and structures of native/head.h, field by field, and its functions' signatures."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache

from specserve_kernels import native_abi
from specserve_kernels.native_abi import CHeads, CWeight

MATRICES = ("fc", "qkv", "out", "gate_up", "down", "head")
_NORMS = ("input_norm", "fc_norms", "embed_norm", "hidden_norm", "query_norm", "key_norm")
_LAST_NORMS = ("mlp_norm", "final_norm")


@dataclass(frozen=True)
class HeadShape:
    """inner_size: I, padded up to a multiple of GATE_UP_GROUP."""

    num_states: int  # A
    state_size: int  # D
    hidden_size: int  # H'
    inner_size: int
    num_entries: int  # W
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    norm_before_residual: bool
    norm_output: bool

    @property
    def matrix_shapes(self) -> dict[str, tuple[int, int]]:
        """[out, in] of each of MATRICES."""
        width, query_size = self.hidden_size, self.num_heads * self.head_dim
        return {
            "fc": (width, self.num_states * self.state_size),
            "qkv": (query_size + 2 * self.num_kv_heads * self.head_dim, 2 * width),
            "out": (width, query_size),
            "gate_up": (2 * self.inner_size, width),
            "down": (width, self.inner_size),
            "head": (self.num_entries, width),
        }

    @property
    def norm_sizes(self) -> dict[str, int]:
        fused, width = self.num_states * self.state_size, self.hidden_size
        sizes = (fused, fused, width, width, self.head_dim, self.head_dim)
        return dict(zip(_NORMS, sizes, strict=True)) | dict.fromkeys(_LAST_NORMS, width)


class CHeadModel(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_states", "state_size", "hidden_size")),
        *((name, c_int64) for name in ("inner_size", "num_entries")),
        ("heads", CHeads),
        ("norm_epsilon", c_float),
        *((name, c_int32) for name in ("kv_is_bf16", "embedding_is_bf16")),
        *((name, c_int32) for name in ("norm_before_residual", "norm_output", "reserved")),
        ("embedding", c_void_p),
        *((name, c_void_p) for name in (*_NORMS, *_LAST_NORMS)),
        *((name, CWeight) for name in MATRICES),
        ("target_ids", c_void_p),
    )


class CHeadMemory(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("keys", "values", "tails")),
        ("block_size", c_int64),
        *((name, c_void_p) for name in ("cos", "sin")),
    )


class CHeadStep(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_sequences", "num_guessing", "num_fused")),
        *((name, c_void_p) for name in ("block_offsets", "blocks", "first_seen", "begin", "count")),
        *((name, c_void_p) for name in ("given", "raw", "tokens", "num_guesses", "samplers")),
        ("fused", c_void_p),
        ("stride", c_int64),
        *((name, c_void_p) for name in ("ids", "scores", "num_found", "logits", "feedback")),
    )


class CHeadNodes(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_sequences", "num_nodes", "depth")),
        *((name, c_void_p) for name in ("block_offsets", "blocks", "first_seen", "num_known")),
        *((name, c_void_p) for name in ("node_start", "states", "tokens", "paths")),
        *((name, c_void_p) for name in ("logits", "feedback")),
    )


@cache
def library() -> ctypes.CDLL:
    found = native_abi.library()
    found.specserve_new_head_workspace.argtypes = []
    found.specserve_new_head_workspace.restype = c_void_p
    found.specserve_delete_head_workspace.argtypes = [c_void_p]
    found.specserve_delete_head_workspace.restype = None
    for name, kind in (("step", CHeadStep), ("nodes", CHeadNodes)):
        function = getattr(found, f"specserve_head_{name}")  # a name of the library
        function.argtypes = [
            *(POINTER(CHeadModel), POINTER(CHeadMemory), POINTER(kind)),
            *(c_void_p, c_void_p),
        ]
        function.restype = None
    return found

"""The models whose shapes every kernel is compiled for ahead of time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes as in the model's config.json; dimension letters as in interface.py."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_heads: int  # N
    num_kv_heads: int  # G
    head_dim: int  # H
    vocab_size: int  # V
    qk_norm: bool = False


@dataclass(frozen=True)
class Case:
    """One way to call a launcher: `call` gets tensors of the real shapes, their values unread."""

    name: str
    call: Callable[[], object]
    has_fp8: bool = False  # only for targets that can convert float8_e4m3fn


MODEL_SHAPES = (
    ModelShape("Llama-3-8B", 4096, 14336, 32, 8, 128, 128256),
    ModelShape("Qwen3-0.6B", 1024, 3072, 16, 8, 128, 151936, qk_norm=True),
    ModelShape("Qwen3-8B", 4096, 12288, 32, 8, 128, 151936, qk_norm=True),
    ModelShape("SmolLM2-135M", 576, 1536, 9, 3, 64, 49152),
    ModelShape("SmolLM2-1.7B", 2048, 8192, 32, 32, 64, 49152),
    ModelShape("TinyLlama-1.1B", 2048, 5632, 32, 4, 64, 32000),
)

"""Small real decoders with random weights: no files, milliseconds to build."""

from __future__ import annotations

import torch
from torch import Tensor

from specserve.models.config import ModelConfig, RopeConfig
from specserve.models.decoder import Decoder
from specserve_kernels import make_backend


def tiny_config(
    *,
    vocab: int = 64,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 64,
    window: int | None = None,
    tied: bool = False,
    max_positions: int = 4096,
) -> ModelConfig:
    return ModelConfig(
        family="mistral" if window else "llama",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        rms_norm_eps=1e-5,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        sliding_windows=(window,) * layers,
        rope=RopeConfig(),
    )


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """fp64 weights by Hugging Face's names, scaled so that logits spread over a few nats."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        noise = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        return noise * (scale / columns**0.5)

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator, dtype=torch.float64)

    width, inner = config.hidden_size, config.intermediate_size
    query_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    weights = {
        "model.embed_tokens.weight": matrix(config.vocab_size, width, 3.0),
        "model.norm.weight": norm(width),
    }
    if not config.tie_word_embeddings:
        weights["lm_head.weight"] = matrix(config.vocab_size, width, 2.5)
    for idx in range(config.num_layers):
        prefix = f"model.layers.{idx}"
        weights |= {
            f"{prefix}.input_layernorm.weight": norm(width),
            f"{prefix}.post_attention_layernorm.weight": norm(width),
            f"{prefix}.self_attn.q_proj.weight": matrix(query_size, width, 2.0),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv_size, width, 2.0),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv_size, width),
            f"{prefix}.self_attn.o_proj.weight": matrix(width, query_size, 1.5),
            f"{prefix}.mlp.gate_proj.weight": matrix(inner, width, 1.5),
            f"{prefix}.mlp.up_proj.weight": matrix(inner, width, 1.5),
            f"{prefix}.mlp.down_proj.weight": matrix(width, inner, 1.5),
        }
    return weights


def tiny_decoder(
    vocab: int = 64,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    *,
    intermediate: int = 64,
    window: int | None = None,
    tied: bool = False,
    backend: str = "cpu",
) -> Decoder:
    config = tiny_config(
        vocab=vocab,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        window=window,
        tied=tied,
    )
    return Decoder(config, random_weights(config, seed), dtype=dtype, backend=make_backend(backend))

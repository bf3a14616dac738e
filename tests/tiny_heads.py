"""Heads with random weights for any tiny target, loaded from files like real ones."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from specserve.models.decoder import Decoder
from specserve_drafts.head_files import Head, TargetParts
from specserve_drafts.heads import HEADS
from tests.head_checkpoints import random_tensor, write_checkpoint

INNER, NUM_HEADS, HEAD_SIZE = 24, 3, 8


def parts_of(model: Decoder) -> TargetParts:
    return TargetParts(
        num_layers=model.config.num_layers,
        hidden_size=model.config.hidden_size,
        max_positions=model.max_position_embeddings,
        embedding=model.embedding,
        final_norm=model.final_norm,
        dtype=model.dtype,
    )


@functools.cache
def tiny_head(name: str, model: Decoder) -> Head:
    """Reads the states entering layers 0 and 1 and leaving the last (eagle3), or the last alone."""
    width, vocab = model.config.hidden_size, model.vocab_size
    with tempfile.TemporaryDirectory() as directory:
        path = BUILD[name](Path(directory), width, vocab, model.config.num_layers)
        return HEADS[name](path, parts_of(model), vocab)


def _eagle3(directory: Path, width: int, vocab: int, num_layers: int) -> str:
    generator = torch.Generator().manual_seed(1)
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": INNER,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_SIZE,
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "eagle_aux_hidden_state_layer_ids": [0, 1, num_layers],
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (width, 3 * width),
        "norm": (width,),
        "lm_head": (vocab, width),
        "midlayer.hidden_norm": (width,),
        "midlayer.input_layernorm": (width,),
        "midlayer.post_attention_layernorm": (width,),
        "midlayer.self_attn.q_proj": (4 * HEAD_SIZE, 2 * width),
        "midlayer.self_attn.k_proj": (2 * HEAD_SIZE, 2 * width),
        "midlayer.self_attn.v_proj": (2 * HEAD_SIZE, 2 * width),
        "midlayer.self_attn.o_proj": (width, 4 * HEAD_SIZE),
        "midlayer.mlp.gate_proj": (INNER, width),
        "midlayer.mlp.up_proj": (INNER, width),
        "midlayer.mlp.down_proj": (width, INNER),
    }
    tensors = {f"{name}.weight": random_tensor(generator, *s) for name, s in shapes.items()}
    return write_checkpoint(directory, config, tensors)


def _medusa(directory: Path, width: int, vocab: int, num_layers: int) -> str:
    generator = torch.Generator().manual_seed(2)
    tensors: dict[str, Tensor] = {}
    for head in range(NUM_HEADS):
        tensors[f"{head}.0.linear.weight"] = random_tensor(generator, width, width)
        tensors[f"{head}.0.linear.bias"] = random_tensor(generator, width)
        tensors[f"{head}.1.weight"] = random_tensor(generator, vocab, width)
    return write_checkpoint(
        directory, {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": 1}, tensors
    )


def _mlp_speculator(directory: Path, width: int, vocab: int, num_layers: int) -> str:
    generator = torch.Generator().manual_seed(3)
    config = {
        "model_type": "mlp_speculator",
        "vocab_size": vocab,
        "emb_dim": width,
        "inner_dim": INNER,
        "n_predict": NUM_HEADS,
    }
    tensors: dict[str, Tensor] = {}
    for step in range(NUM_HEADS):
        tensors[f"emb.{step}.weight"] = random_tensor(generator, vocab, INNER)
        tensors[f"proj.{step}.weight"] = random_tensor(generator, INNER, INNER if step else width)
        tensors[f"head.{step}.weight"] = random_tensor(generator, vocab, INNER)
        tensors[f"ln.{step}.weight"] = random_tensor(generator, INNER)
        tensors[f"ln.{step}.bias"] = random_tensor(generator, INNER)
    return write_checkpoint(directory, config, tensors)


BUILD = {"eagle3": _eagle3, "medusa": _medusa, "mlp_speculator": _mlp_speculator}

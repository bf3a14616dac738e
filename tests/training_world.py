"""A tiny target on disk, and drafts in training that fit it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specserve.models.config import RopeConfig
from specserve.training.eagle3 import Eagle3Shape, Eagle3Student, new_eagle3_params
from specserve.training.lessons import Document, Lesson, Studied, make_lesson
from specserve.training.losses import law_of
from tests.head_checkpoints import D, V, random_tensor, states, target_parts
from tests.small_tokenizers import saved, words
from tests.tiny_models import random_weights, tiny_config

VOCAB = 64


def a_target(directory: Path, seed: int = 0, **changes: Any) -> Path:
    """A Llama of two layers, its config, weights and a tokenizer of whole words, w0 to w63."""
    config = tiny_config(vocab=VOCAB, tied=True, **changes)
    saved(words(*(f"w{idx}" for idx in range(VOCAB))), directory, eos_token="w1")
    weights = {n: t.float().contiguous() for n, t in random_weights(config, seed).items()}
    save_file(weights, directory / "model.safetensors")
    document = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope.theta,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(document))
    return directory


def prompts_file(path: Path, count: int) -> Path:
    lines = [f"w{2 + idx % 60} w{2 + idx * 7 % 60} w{2 + idx // 60}" for idx in range(count)]
    path.write_text("\n".join(lines))
    return path


# --- a head whose target is made up (tests/head_checkpoints.py) ------------------------------


def a_shape(num_depths: int = 4, **changes: Any) -> Eagle3Shape:
    layer = tiny_config(vocab=V, layers=1, hidden=D, heads=4, kv_heads=2, head_dim=8)
    given: dict[str, Any] = {
        "layer": layer,
        "hidden_layers": (2, 4, 5),
        "draft_vocab_size": 40,
        "num_depths": num_depths,
    }
    assert layer.rope == RopeConfig()
    return Eagle3Shape(**(given | changes))


def some_ids(num_entries: int) -> Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randperm(V, generator=generator)[:num_entries].sort().values


def a_student(shape: Eagle3Shape, dtype: torch.dtype = torch.float32) -> Eagle3Student:
    """Far from where training begins, so that every part of it matters."""
    generator = torch.Generator().manual_seed(5)
    head = random_tensor(generator, shape.draft_vocab_size, D) * 2
    params = new_eagle3_params(shape, head, torch.ones(D), generator)
    params = {
        name: random_tensor(generator, *own.shape) if name != "lm_head.weight" else own
        for name, own in params.items()
    }
    params = {name: own.to(dtype) for name, own in params.items()}
    target_ids = some_ids(shape.draft_vocab_size)
    return Eagle3Student(shape, params, target_ids, target_parts().embedding)


def a_lesson(texts: list[tuple[list[int], int]], target_ids: Tensor, num_top: int = 8) -> Lesson:
    """(token ids, prompt length) each; states are the made-up target's, laws are random."""
    generator = torch.Generator().manual_seed(3)
    studied = []
    for idx, (token_ids, prompt_len) in enumerate(texts):
        document = Document(
            doc_id=idx,
            prompt_idx=idx,
            temperature=0.0,
            prompt_len=prompt_len,
            token_ids=tuple(token_ids),
        )
        logits = torch.randn(document.num_places, V, generator=generator) * 2
        law = law_of(logits, target_ids, num_top, 1.0)
        studied.append(Studied(document, states(token_ids, 3), law))
    return make_lesson(studied, torch.float64)

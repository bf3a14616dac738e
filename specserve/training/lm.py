"""A tiny Llama of the target's tokenizer in training, in Hugging Face's own format.

The only language model that a small file can hold is a narrow one: the target's embedding alone
may be larger than the file. So it has an embedding of its own, which begins as the target's on its
principal axes (the best narrow picture of it) and is tied to the head, and every token of the
target: any engine loads it as a draft model. A head of fewer tokens has no public format for plain
language models; `eagle3` has one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from specserve.models.config import ModelConfig
from specserve.training.layers import Params, Turn, heads, mlp, norm, random_matrix
from specserve.training.lessons import Lesson
from specserve.training.students import ALL, Deep, Guesses


class LmStudent:
    kind = "lm"
    reads_itself = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, config: ModelConfig, params: Params, num_depths: int) -> None:
        self.shape = config
        self.params = params
        self.target_ids = torch.arange(config.vocab_size)
        self.num_depths = num_depths
        self._dtype = params["model.norm.weight"].dtype
        self._turn = Turn(config, self._dtype)

    def guesses(self, lesson: Lesson, deep: Deep = ALL) -> Iterator[Guesses]:
        """One forward: what follows a token does not depend on which step guesses it."""
        config, params = self.shape, self.params
        token_ids = lesson.token_ids[:, :-1]  # nothing follows the last
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        positions = positions.expand(len(token_ids), -1)
        x = F.embedding(token_ids, params["model.embed_tokens.weight"])
        for idx in range(config.num_layers):
            prefix = f"model.layers.{idx}"
            x = x + self._attention(self._norm(x, f"{prefix}.input_layernorm"), prefix, positions)
            normed = self._norm(x, f"{prefix}.post_attention_layernorm")
            x = x + mlp(normed, params, f"{prefix}.mlp")
        documents, places = lesson.places(0)
        wanted = x[documents, lesson.starts[documents] + places]
        logits = F.linear(self._norm(wanted, "model.norm"), params["model.embed_tokens.weight"])
        yield Guesses(0, documents, places, logits)

    def _attention(self, x: Tensor, prefix: str, positions: Tensor) -> Tensor:
        """Padding is on the right, so the causal mask hides it from all that counts."""
        size, params = self.shape.head_dim, self.params
        queries, keys, values = (
            heads(x, params, f"{prefix}.self_attn.{name}_proj", size) for name in "qkv"
        )
        seen = F.scaled_dot_product_attention(
            self._turn(queries, positions).transpose(1, 2),
            self._turn(keys, positions).transpose(1, 2),
            values.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.shape.num_heads != self.shape.num_kv_heads,
        )
        flat = seen.transpose(1, 2).reshape(*x.shape[:-1], -1)
        return F.linear(flat, params[f"{prefix}.self_attn.o_proj.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return norm(x, self.params[f"{name}.weight"], self.shape.rms_norm_eps)

    # ---- the public format ---------------------------------------------------------------

    def config(self) -> dict[str, object]:
        config = self.shape
        eos: object = list(config.eos_token_ids)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "num_hidden_layers": config.num_layers,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope.theta,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            **({"eos_token_id": eos} if eos else {}),
        }

    def constants(self) -> dict[str, Tensor]:
        return {}


def new_lm_params(config: ModelConfig, embedding: Tensor, generator: torch.Generator) -> Params:
    """fp32. embedding [V, D]: the target's."""
    width, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    params = {
        "model.embed_tokens.weight": principal(embedding, width),
        "model.norm.weight": torch.ones(width),
    }
    for idx in range(config.num_layers):
        prefix = f"model.layers.{idx}"
        shapes = {
            "self_attn.q_proj": (query, width, 1.0),
            "self_attn.k_proj": (kv, width, 1.0),
            "self_attn.v_proj": (kv, width, 1.0),
            "self_attn.o_proj": (width, query, 0.5),
            "mlp.gate_proj": (inner, width, 1.0),
            "mlp.up_proj": (inner, width, 1.0),
            "mlp.down_proj": (width, inner, 0.5),
        }
        for name, (rows, columns, scale) in shapes.items():
            matrix = random_matrix(generator, rows, columns, scale)
            params[f"{prefix}.{name}.weight"] = matrix
        params[f"{prefix}.input_layernorm.weight"] = torch.ones(width)
        params[f"{prefix}.post_attention_layernorm.weight"] = torch.ones(width)
    return params


def principal(embedding: Tensor, width: int) -> Tensor:
    """[V, D] -> [V, width] fp32 on its principal axes, scaled so that logits begin below a nat."""
    wide = embedding.detach().double()
    centred = wide - wide.mean(dim=0)
    if width < wide.shape[1]:
        _, axes = torch.linalg.eigh(centred.T @ centred)  # ascending
        centred = centred @ axes[:, -width:]
    elif width > wide.shape[1]:
        centred = F.pad(centred, (0, width - wide.shape[1]))
    return (centred / (centred.pow(2).sum(dim=1).mean().sqrt() + 1e-12)).float()

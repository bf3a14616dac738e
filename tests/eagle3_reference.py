"""EAGLE-3 checkpoints in both public formats, and a reference: plain, no KV, all recomputed."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.head_checkpoints import D, V, random_tensor, states, target_parts, write_checkpoint

W, N, G, H, INNER = 40, 4, 2, 8, 24  # draft vocabulary, heads, KV heads, head size, MLP
EPS, THETA = 1e-5, 10000.0
PLAIN: dict[str, Any] = {}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "fc norm and norm output": {"fc_norm": True, "norm_output": True},
    "own embedding": {"own_embedding": True},
    "biases": {"attention_bias": True},
}


# --- checkpoints ---------------------------------------------------------------------------------


def the_tensors(variant: Mapping[str, Any]) -> dict[str, Tensor]:
    """By SpecForge's names. fp32, as stored."""
    generator = torch.Generator().manual_seed(5)

    def new(*shape: int) -> Tensor:
        return random_tensor(generator, *shape)

    tensors = {
        "fc.weight": new(D, 3 * D),
        "norm.weight": new(D),
        "lm_head.weight": new(W, D) * 2,
        "midlayer.hidden_norm.weight": new(D),
        "midlayer.input_layernorm.weight": new(D),
        "midlayer.post_attention_layernorm.weight": new(D),
        "midlayer.self_attn.q_proj.weight": new(N * H, 2 * D),
        "midlayer.self_attn.k_proj.weight": new(G * H, 2 * D),
        "midlayer.self_attn.v_proj.weight": new(G * H, 2 * D),
        "midlayer.self_attn.o_proj.weight": new(D, N * H),
        "midlayer.mlp.gate_proj.weight": new(INNER, D),
        "midlayer.mlp.up_proj.weight": new(INNER, D),
        "midlayer.mlp.down_proj.weight": new(D, INNER),
    }
    if variant.get("norm_before_fc"):
        tensors["input_norm.weight"] = new(3 * D)
    if variant.get("fc_norm"):
        tensors |= {f"fc_norm.{idx}.weight": new(D) for idx in range(3)}
    if variant.get("own_embedding"):
        tensors["embed_tokens.weight"] = new(V, D)
    if variant.get("attention_bias"):
        sizes = {"q": N * H, "k": G * H, "v": G * H, "o": D}
        tensors |= {f"midlayer.self_attn.{n}_proj.bias": new(size) for n, size in sizes.items()}
    used = torch.randperm(V, generator=generator)[:W].sort().values
    tensors["d2t"] = used - torch.arange(W)
    tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, used, True)
    return tensors


def the_layer_fields(variant: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": D,
        "intermediate_size": INNER,
        "num_attention_heads": N,
        "num_key_value_heads": G,
        "head_dim": H,
        "num_hidden_layers": 1,
        "vocab_size": V,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": variant.get("max_position_embeddings", 512),
        "attention_bias": variant.get("attention_bias", False),
    }


def the_other_fields(variant: Mapping[str, Any]) -> dict[str, Any]:
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {"draft_vocab_size": W} | {name: variant[name] for name in flags if name in variant}


def specforge(directory: Path, variant: Mapping[str, Any] = PLAIN, **fields: Any) -> str:
    config = {"architectures": ["LlamaForCausalLMEagle3"]}
    config |= the_layer_fields(variant) | the_other_fields(variant) | fields
    return write_checkpoint(directory, config, the_tensors(variant))


def speculators(directory: Path, variant: Mapping[str, Any] = PLAIN, **fields: Any) -> str:
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": the_layer_fields(variant),
        "speculators_config": {"algorithm": "eagle3"},
    }
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in the_tensors(variant).items()
    }
    tensors["verifier_norm.weight"] = torch.ones(D)  # left over from training
    return write_checkpoint(directory, config | the_other_fields(variant) | fields, tensors)


FORMATS = {"specforge": specforge, "speculators": speculators}


# --- the reference -------------------------------------------------------------------------------


class Reference:
    """Logits over the target's vocabulary after known tokens and some guesses, from nothing."""

    def __init__(self, variant: Mapping[str, Any]) -> None:
        self.variant = variant
        self.tensors = {
            name.replace("midlayer.", ""): tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in the_tensors(variant).items()
        }

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * self.tensors[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        out = self.tensors[f"{name}.weight"] @ x
        return out + self.tensors.get(f"{name}.bias", torch.zeros(len(out), dtype=out.dtype))

    def fused(self, hidden: Tensor) -> Tensor:
        x = hidden.reshape(-1)  # [3D]
        if self.variant.get("norm_before_fc"):
            x = self.norm(x, "input_norm")
        if self.variant.get("fc_norm"):
            x = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(x.chunk(3))])
        return self.tensors["fc.weight"] @ x

    def rotated(self, x: Tensor, position: int) -> Tensor:
        """One head [H], by complex numbers."""
        first, second = x.chunk(2)
        angles = position / THETA ** (torch.arange(0, H, 2, dtype=torch.float64) / H)
        turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag])

    def heads(self, x: Tensor, name: str, position: int | None) -> list[Tensor]:
        heads = list(self.linear(x, f"self_attn.{name}_proj").split(H))
        return heads if position is None else [self.rotated(head, position) for head in heads]

    def logits(self, history: Seq[int], guesses: Seq[int], first_state: int = 0) -> Tensor:
        """[V], -inf where the draft knows no token. Training's pairs: (state at t, token at t + 1).

        first_state: states before it are unknown
        """
        embedding = self.tensors.get("embed_tokens.weight", target_parts().embedding)
        rows = []
        for t, hidden in enumerate(states(history[:-1], 3)):
            if t >= first_state:
                rows.append((t, self.fused(hidden), history[t + 1]))
        output = torch.zeros(D)
        for step in range(len(guesses) + 1):
            if step:
                feedback = self.norm(output, "norm") if self.variant.get("norm_output") else output
                rows.append((rows[-1][0] + 1, feedback, guesses[step - 1]))
            output = self.layer([(t, h, embedding[token]) for t, h, token in rows])
        logits = torch.full((V,), -torch.inf, dtype=torch.float64)
        logits[torch.arange(W) + self.tensors["d2t"]] = self.tensors["lm_head.weight"] @ self.norm(
            output, "norm"
        )
        return logits

    def layer(self, rows: Seq[tuple[int, Tensor, Tensor]]) -> Tensor:
        """The last row's output."""
        keys, values = [], []
        mixed = residual = torch.zeros(D)
        for t, h, embedded in rows:
            normed = self.norm(h, "hidden_norm")
            residual = normed if self.variant.get("norm_before_residual") else h
            mixed = torch.cat([self.norm(embedded, "input_layernorm"), normed])
            keys.append(self.heads(mixed, "k", t))
            values.append(self.heads(mixed, "v", None))
        seen = []
        for head, query in enumerate(self.heads(mixed, "q", rows[-1][0])):
            own = head // (N // G)
            scores = torch.stack([query @ key[own] for key in keys]) / H**0.5
            seen.append(torch.softmax(scores, 0) @ torch.stack([value[own] for value in values]))
        x = residual + self.linear(torch.cat(seen), "self_attn.o_proj")
        normed = self.norm(x, "post_attention_layernorm")
        gate = self.linear(normed, "mlp.gate_proj")
        gated = gate * torch.sigmoid(gate) * self.linear(normed, "mlp.up_proj")
        return x + self.linear(gated, "mlp.down_proj")

"""EAGLE-3 checkpoints in both public formats, read into one frozen value.

original and SpecForge: `midlayer.*`, all fields at the top of config.json.
speculators:            `layers.0.*`, the layer's fields under `transformer_layer_config`.

Two traps. `d2t` holds offsets: entry i of the draft's vocabulary is target token i + d2t[i]. And
the same name means two things: at the top of config.json `eagle_aux_hidden_state_layer_ids` are
layers whose input is read (vLLM's and speculators' sense), inside `eagle_config` layers whose
output is read (SGLang's and SpecForge's sense). Without either it is the input of 2, n/2 and n - 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any  # JSON documents

import msgspec
import numpy as np
import torch
from torch import Tensor

from specserve.errors import ModelError
from specserve.models.config import ModelConfig, parse_model_config
from specserve.models.linear import Weight
from specserve.noise import Ids
from specserve_drafts.head_files import (
    TargetParts,
    Tensors,
    flag,
    read_checkpoint,
    refuse_other_width,
    whole_number,
)


class Eagle3Config(msgspec.Struct, frozen=True, kw_only=True):
    """layer: shape of the one decoder layer; the rest as in the module's description.

    hidden_layers: target layers whose incoming residual stream is read, in order
    """

    layer: ModelConfig
    target_hidden_size: int
    draft_vocab_size: int
    hidden_layers: tuple[int, ...]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool


class Eagle3Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Matrices [out, in]. A hidden layers read, D the target's width, H' the draft's.

    target_ids: [W] the target's id of each row of the head
    """

    embedding: Tensor  # [V, H']
    input_norm: Tensor | None  # [A*D]
    fc_norms: tuple[Tensor, ...]  # A of [D], or none
    fc: Weight  # [H', A*D]
    embed_norm: Tensor  # [H'], "input_layernorm"
    hidden_norm: Tensor  # [H']
    query: Weight  # [N*H, 2H']
    key_value: Weight  # [2*G*H, 2H']
    query_bias: Tensor | None
    key_value_bias: Tensor | None
    qk_norm: tuple[Tensor, Tensor] | None  # [H] each
    out: Weight  # [H', N*H]
    out_bias: Tensor | None
    mlp_norm: Tensor  # [H']
    gate_up: Weight  # [2I, H']
    gate_up_bias: Tensor | None
    down: Weight  # [H', I]
    down_bias: Tensor | None
    norm: Tensor  # [H']
    head: Weight  # [W, H']
    target_ids: Ids
    shares_embedding: bool

    def nbytes(self) -> int:
        matrices = [self.fc, self.query, self.key_value, self.out, self.gate_up, self.down]
        own = 0 if self.shares_embedding else self.embedding.nbytes
        return own + self.head.nbytes + sum(matrix.nbytes for matrix in matrices)


def load_eagle3(
    path: str, target: TargetParts, *, vocab_size: int
) -> tuple[Eagle3Config, Eagle3Weights]:
    """vocab_size: ids of the target's tokenizer. ModelError says what does not fit."""
    document, tensors = read_checkpoint(path)
    config = parse_eagle3_config(document, path, target, vocab_size)
    return config, _take(config, path, tensors, target, vocab_size)


def parse_eagle3_config(
    document: Mapping[str, Any], source: str, target: TargetParts, vocab_size: int
) -> Eagle3Config:
    kind = document.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise ModelError(f"{source}: speculators_model_type is {kind!r}, not 'eagle3'")
    fields = document.get("transformer_layer_config") or document
    layers = whole_number(fields, source, "num_hidden_layers", 1)
    if layers != 1:
        raise ModelError(f"{source}: num_hidden_layers is {layers}, only 1 is supported")
    # Some name the architecture of the drafter where a model's own is expected.
    layer = parse_model_config(
        {"num_hidden_layers": 1, **fields, "architectures": None, "model_type": _family(fields)}
    )
    if layer.sliding_windows[0] is not None:
        raise ModelError(f"{source}: sliding_window is not supported for a drafter")
    if layer.vocab_size < vocab_size:
        raise ModelError(
            f"{source}: vocab_size is {layer.vocab_size}, but the target has {vocab_size} tokens: "
            "this drafter was trained for another target"
        )
    width = whole_number(document, source, "target_hidden_size", layer.hidden_size)
    refuse_other_width(source, "target_hidden_size (or hidden_size)", width, target.hidden_size)
    return Eagle3Config(
        layer=layer,
        target_hidden_size=width,
        draft_vocab_size=whole_number(document, source, "draft_vocab_size", layer.vocab_size),
        hidden_layers=_hidden_layers(document, source, target.num_layers),
        norm_before_residual=flag(document, source, "norm_before_residual"),
        norm_before_fc=flag(document, source, "norm_before_fc"),
        fc_norm=flag(document, source, "fc_norm"),
        norm_output=flag(document, source, "norm_output"),
    )


def _family(fields: Mapping[str, Any]) -> str:
    return "qwen3" if fields.get("model_type") == "qwen3" else "llama"


def _hidden_layers(document: Mapping[str, Any], source: str, num_layers: int) -> tuple[int, ...]:
    nested = document.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise ModelError(
            f"{source}: eagle_config.use_aux_hidden_state is false, only EAGLE-3 with auxiliary "
            "states is supported"
        )
    field = "eagle_aux_hidden_state_layer_ids"
    ids = document.get(field) or document.get("aux_hidden_state_layer_ids")
    if ids is None and nested.get(field) is not None:
        ids = [layer + 1 for layer in nested[field]]  # an output is what enters the next layer
    if ids is None:
        ids = [2, num_layers // 2, num_layers - 3]
    if not all(isinstance(layer, int) and 0 <= layer <= num_layers for layer in ids):
        raise ModelError(
            f"{source}: {field} {ids} (where the checkpoint names none: 2, n/2, n - 3) do not fit "
            f"a target of {num_layers} layers"
        )
    return tuple(ids)


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.removeprefix("model.").replace("midlayer.", "layers.0."): tensor
        for name, tensor in tensors.items()
    }


class _Taker:
    """Tensors of one checkpoint in the forms that the layer reads."""

    def __init__(self, own: Tensors, target: TargetParts, layer: ModelConfig) -> None:
        self._own = own
        self._pack = target.pack
        self._width = layer.hidden_size

    def norm(self, name: str, size: int | None = None) -> Tensor:
        return self._own.take(f"{name}.weight", size or self._width)

    def matrix(self, parts: Mapping[str, int], num_inputs: int) -> Weight:
        """Parts (name -> rows) stacked into one."""
        taken = [self._own.take(f"{name}.weight", rows, num_inputs) for name, rows in parts.items()]
        return self._pack(torch.cat(taken))

    def bias(self, parts: Mapping[str, int], wanted: bool) -> Tensor | None:
        if not wanted:
            return None
        return torch.cat([self._own.take(f"{name}.bias", rows) for name, rows in parts.items()])

    def qk_norm(self, layer: ModelConfig) -> tuple[Tensor, Tensor] | None:
        if not layer.qk_norm:
            return None
        query, key = (self.norm(f"layers.0.self_attn.{name}_norm", layer.head_dim) for name in "qk")
        return query, key


def _take(
    config: Eagle3Config,
    source: str,
    tensors: Mapping[str, Tensor],
    target: TargetParts,
    vocab_size: int,
) -> Eagle3Weights:
    own = Tensors(source, _renamed(tensors), target.dtype)
    layer, width = config.layer, config.layer.hidden_size
    taker = _Taker(own, target, layer)
    num_hidden, fused = len(config.hidden_layers), len(config.hidden_layers) * target.hidden_size
    attention, mlp = "layers.0.self_attn", "layers.0.mlp"
    query_size, kv_size = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    query = {f"{attention}.q_proj": query_size}
    key_value = {f"{attention}.k_proj": kv_size, f"{attention}.v_proj": kv_size}
    out, down = {f"{attention}.o_proj": width}, {f"{mlp}.down_proj": width}
    gate_up = {f"{mlp}.{name}_proj": layer.intermediate_size for name in ("gate", "up")}
    fc_norms = range(num_hidden if config.fc_norm else 0)
    embedding, shares = _embedding(own, source, layer, target)
    head, target_ids = _head(own, source, config, vocab_size)
    weights = Eagle3Weights(
        embedding=embedding,
        input_norm=taker.norm("input_norm", fused) if config.norm_before_fc else None,
        fc_norms=tuple(taker.norm(f"fc_norm.{idx}", target.hidden_size) for idx in fc_norms),
        fc=taker.matrix({"fc": width}, fused),
        embed_norm=taker.norm("layers.0.input_layernorm"),
        hidden_norm=taker.norm("layers.0.hidden_norm"),
        query=taker.matrix(query, 2 * width),
        key_value=taker.matrix(key_value, 2 * width),
        query_bias=taker.bias(query, layer.qkv_bias),
        key_value_bias=taker.bias(key_value, layer.qkv_bias),
        qk_norm=taker.qk_norm(layer),
        out=taker.matrix(out, query_size),
        out_bias=taker.bias(out, layer.output_bias),
        mlp_norm=taker.norm("layers.0.post_attention_layernorm"),
        gate_up=taker.matrix(gate_up, width),
        gate_up_bias=taker.bias(gate_up, layer.mlp_bias),
        down=taker.matrix(down, layer.intermediate_size),
        down_bias=taker.bias(down, layer.mlp_bias),
        norm=taker.norm("norm"),
        head=target.pack(head),
        target_ids=target_ids,
        shares_embedding=shares,
    )
    # Speculators may carry the target's own norm and head, which served their training.
    own.refuse_leftovers("verifier_", "rotary_emb", f"{attention}.rotary_emb")
    return weights


def _embedding(
    own: Tensors, source: str, layer: ModelConfig, target: TargetParts
) -> tuple[Tensor, bool]:
    if "embed_tokens.weight" in own:
        return own.take("embed_tokens.weight", layer.vocab_size, layer.hidden_size), False
    if layer.hidden_size != target.hidden_size:
        raise ModelError(
            f"{source} has no embed_tokens.weight and cannot use the target's: its hidden_size is "
            f"{layer.hidden_size}, the target's {target.hidden_size}"
        )
    return target.embedding, True


def _head(own: Tensors, source: str, config: Eagle3Config, vocab_size: int) -> tuple[Tensor, Ids]:
    """Head rows [W, H'] and target ids [W] of what the target's tokenizer knows."""
    num_entries = config.draft_vocab_size
    head = own.take("lm_head.weight", num_entries, config.layer.hidden_size)
    target_ids = np.arange(num_entries)
    if "d2t" in own:
        target_ids = target_ids + own.take_as_stored("d2t", num_entries).numpy().astype(np.intp)
    elif num_entries != config.layer.vocab_size:
        raise ModelError(
            f"{source} has a draft_vocab_size of {num_entries} but no d2t that says which tokens "
            "they are"
        )
    in_range = bool(((target_ids >= 0) & (target_ids < config.layer.vocab_size)).all())
    if not in_range or len(np.unique(target_ids)) != num_entries:
        raise ModelError(
            f"{source}: d2t does not map its {num_entries} entries to different tokens below "
            f"{config.layer.vocab_size}: it must hold offsets (token id = entry + d2t[entry])"
        )
    if "t2d" in own:
        used = own.take_as_stored("t2d", config.layer.vocab_size).numpy().astype(bool)
        if not used[target_ids].all() or used.sum() != num_entries:
            raise ModelError(f"{source}: d2t and t2d name different tokens")
    kept = np.flatnonzero(target_ids < vocab_size)
    return head[torch.from_numpy(kept)], target_ids[kept]

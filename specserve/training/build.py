"""A new draft for a target: its shape, and where its parameters begin."""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.loading import LoadedModel
from specserve.models.config import ModelConfig, RopeConfig
from specserve.training.eagle3 import Eagle3Shape, Eagle3Student, new_eagle3_params
from specserve.training.layers import Params
from specserve.training.lm import LmStudent, new_lm_params
from specserve.training.settings import LM_HEAD_SIZE, TrainOptions
from specserve.training.students import Student
from specserve.weights import load_weights
from specserve_drafts.head_files import read_checkpoint
from specserve_drafts.shipped import checkpoint_of


def new_student(options: TrainOptions, target: LoadedModel, target_ids: Tensor) -> Student:
    """target_ids: [W] of an eagle3 head's vocabulary"""
    generator = torch.Generator().manual_seed(options.seed)
    weights = load_weights(target.path)
    embedding = weights["model.embed_tokens.weight"]
    if options.kind == "lm":
        config = lm_shape(options, target.decoder.config)
        return LmStudent(config, new_lm_params(config, embedding, generator), options.depths)
    config = target.decoder.config
    shape = Eagle3Shape(
        layer=_plain(config, options.intermediate or config.intermediate_size, 1),
        hidden_layers=levels(config.num_layers),
        draft_vocab_size=len(target_ids),
        num_depths=options.depths,
    )
    head = embedding if config.tie_word_embeddings else weights["lm_head.weight"]
    params = new_eagle3_params(shape, head[target_ids], weights["model.norm.weight"], generator)
    if options.start_from:
        params = _taken_from(options.start_from, params, target_ids)
    return Eagle3Student(shape, params, target_ids, target.decoder.embedding)


def _taken_from(name: str, params: Params, target_ids: Tensor) -> Params:
    """Parameters of the eagle3 draft `name`; of its head the rows of tokens that both know.

    ConfigError where that draft has another shape.
    """
    _, tensors = read_checkpoint(checkpoint_of("eagle3", name))
    taken = {key: tensors[key].float() for key in params if key in tensors}
    old_head = taken.pop("lm_head.weight", None)
    for key, own in params.items():
        if key != "lm_head.weight" and (key not in taken or taken[key].shape != own.shape):
            found = list(taken[key].shape) if key in taken else "missing"
            raise ConfigError(
                f"--start-from {name}: tensor {key!r} is {found}, this run's draft has "
                f"{list(own.shape)}: give the flags that draft was trained with"
            )
    if old_head is None or "d2t" not in tensors:
        raise ConfigError(f"--start-from {name}: no lm_head.weight or no d2t, so no eagle3 draft")
    old_ids = tensors["d2t"] + torch.arange(len(old_head))
    row_of = {int(token_id): row for row, token_id in enumerate(old_ids)}
    head = params["lm_head.weight"].clone()
    for row, token_id in enumerate(target_ids.tolist()):
        if token_id in row_of:
            head[row] = old_head[row_of[token_id]]
    return taken | {"lm_head.weight": head}


def levels(num_layers: int) -> tuple[int, ...]:
    """Target layers whose incoming state is read: the format's own choice where they differ."""
    usual = (2, num_layers // 2, num_layers - 3)
    if usual[0] < usual[1] < usual[2]:
        return usual
    return tuple(sorted({0, num_layers // 2, num_layers}))


def lm_shape(options: TrainOptions, target: ModelConfig) -> ModelConfig:
    num_heads = options.hidden // LM_HEAD_SIZE
    plain = _plain(target, options.intermediate or 3 * options.hidden, options.layers)
    return msgspec.structs.replace(
        plain,
        hidden_size=options.hidden,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=LM_HEAD_SIZE,
        tie_word_embeddings=True,
    )


def _plain(config: ModelConfig, intermediate: int, num_layers: int) -> ModelConfig:
    """The target's sizes without what its family adds to a Llama layer."""
    return msgspec.structs.replace(
        config,
        family="llama",
        intermediate_size=intermediate,
        num_layers=num_layers,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=False,
        sliding_windows=(None,) * num_layers,
        rope=RopeConfig(theta=config.rope.theta),
    )

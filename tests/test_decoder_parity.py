"""The native decoder against transformers' own models, built tiny and random, eager attention."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from specserve.errors import ModelError
from specserve.models.config import ModelConfig, parse_model_config
from specserve.models.decoder import Decoder
from specserve_kernels import BACKENDS, make_backend
from specserve_kernels.interface import PagedBatch
from tests.tiny_models import random_weights, tiny_config

ROOT = Path(__file__).parent.parent
BLOCK = 4
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama_gqa": (LlamaConfig, LlamaForCausalLM, {}),
    "llama_mha_tied": (
        LlamaConfig,
        LlamaForCausalLM,
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "llama_mqa_wide_heads": (
        LlamaConfig,
        LlamaForCausalLM,
        {"num_key_value_heads": 1, "head_dim": 24},
    ),
    "llama_all_biases": (
        LlamaConfig,
        LlamaForCausalLM,
        {"attention_bias": True, "mlp_bias": True},
    ),
    "llama3_rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3}),
    "linear_rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "yarn_rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": YARN}),
    "yarn_rope_with_mscale": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.7, "beta_fast": 8}},
    ),
    "mistral_window": (MistralConfig, MistralForCausalLM, {"sliding_window": 13}),
    "mistral_full": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2_bias_tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2_window_in_upper_layers": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3_qk_norm": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "qwen3_bias_window": (
        Qwen3Config,
        Qwen3ForCausalLM,
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}


def a_transformers_model(case: str) -> PreTrainedModel:
    config_class, model_class, options = CASES[case]
    torch.manual_seed(0)
    config = config_class(**{**SHAPE, **options}, attn_implementation="eager")
    model: PreTrainedModel = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # transformers starts biases at 0 and norms at 1, which would hide a mix-up
            if parameter.ndim == 1:
                torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
            else:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return model


def decoder_of(model: PreTrainedModel, backend: str = "cpu") -> Decoder:
    document = json.loads(model.config.to_json_string(use_diff=False))
    weights = dict(model.state_dict())
    return Decoder(
        parse_model_config(document),
        weights,
        dtype=torch.float32,
        backend=make_backend(backend),
    )


def chunks_of(num_tokens: int, sizes: list[int]) -> Iterator[tuple[int, int]]:
    start, idx = 0, 0
    while start < num_tokens:
        end = min(num_tokens, start + sizes[idx % len(sizes)])
        yield start, end
        start, idx = end, idx + 1


def logits_of(decoder: Decoder, ids: list[int], sizes: list[int]) -> Tensor:
    """[len(ids), V]: every position's logits, fed in chunks over blocks in shuffled order."""
    num_blocks = len(ids) // BLOCK + 9
    table = random.Random(1).sample(range(num_blocks), num_blocks)
    cache = decoder.new_kv_cache(num_blocks, BLOCK)
    parts = []
    for start, end in chunks_of(len(ids), sizes):
        batch = PagedBatch((0, end - start), (start,), (tuple(table),), (None,), BLOCK)
        with torch.inference_mode():
            parts.append(
                decoder.forward(
                    torch.tensor(ids[start:end]),
                    torch.arange(start, end),
                    batch,
                    cache,
                    range(end - start),
                )
            )
    return torch.cat(parts)


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers_fed_whole_and_in_odd_chunks(case: str) -> None:
    model = a_transformers_model(case)
    ids = [random.Random(2).randrange(96) for _ in range(150)]
    with torch.inference_mode():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0]
    decoder = decoder_of(model)
    assert expected.std() > 0.3  # the model says something
    for sizes in ([150], [7, 1, 30, 13], [1, 64]):
        worst = (logits_of(decoder, ids, sizes) - expected).abs().max()
        assert worst <= 1e-5, sizes


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_gives_the_same_logits(backend: str) -> None:
    model = a_transformers_model("mistral_window")
    ids = list(range(40))
    with torch.inference_mode():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0]
    worst = (logits_of(decoder_of(model, backend), ids, [17]) - expected).abs().max()
    assert worst <= 1e-5


def test_old_and_new_spelling_of_rope_mean_the_same() -> None:
    document = {**SHAPE, "model_type": "llama"}
    parameters = {**LLAMA3}
    theta = parameters.pop("rope_theta")
    new = parse_model_config({**document, "rope_parameters": LLAMA3})
    old = parse_model_config({**document, "rope_theta": theta, "rope_scaling": parameters})
    kind = parameters.pop("rope_type")
    older = parse_model_config(
        {**document, "rope_theta": theta, "rope_scaling": {**parameters, "type": kind}}
    )
    assert new.rope == old.rope == older.rope
    assert new.rope.kind == "llama3"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, ["model_type", "gpt2"]),
        ({"model_type": None}, ["model_type", "None"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["architectures", "Sequence"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_type", "dynamic"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["rope_type", "longrope"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["rope_parameters.factor", "None"]),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, ["low_freq_factor"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3"]),
        ({"num_attention_heads": None}, ["num_attention_heads", "missing"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"vocab_size": 0}, ["vocab_size", "0"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
        ({"rms_norm_eps": "small"}, ["rms_norm_eps", "small"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings", "1"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["quantization_config", "awq"]),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4}
            | {"layer_types": ["chunked_attention"] * 3},
            ["layer_types", "chunked_attention"],
        ),
    ],
)
def test_an_unsupported_config_is_refused_with_field_and_value(
    change: dict[str, Any], words: list[str]
) -> None:
    document = {**SHAPE, "model_type": "llama", **change}
    with pytest.raises(ModelError) as refusal:
        parse_model_config(document)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_eos_may_be_absent_one_or_several() -> None:
    document = {**SHAPE, "model_type": "llama"}
    assert parse_model_config(document).eos_token_ids == ()
    assert parse_model_config({**document, "eos_token_id": 2}).eos_token_ids == (2,)
    assert parse_model_config({**document, "eos_token_id": [2, 5]}).eos_token_ids == (2, 5)


def a_decoder_with(change: dict[str, Tensor | None]) -> Decoder:
    config: ModelConfig = tiny_config()
    weights = {**random_weights(config), **change}
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    return Decoder(config, kept, dtype=torch.float32, backend=make_backend("cpu"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.layers.1.mlp.down_proj.weight": None}, ["model.layers.1.mlp.down_proj.weight"]),
        ({"model.norm.weight": torch.ones(31)}, ["model.norm.weight", "[31]", "[32]"]),
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, ["q_proj.bias", "no place"]),
        ({"model.layers.2.input_layernorm.weight": torch.ones(32)}, ["layers.2", "no place"]),
    ],
)
def test_a_checkpoint_that_does_not_fit_its_config_is_refused(
    change: dict[str, Tensor | None], words: list[str]
) -> None:
    with pytest.raises(ModelError) as refusal:
        a_decoder_with(change)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_frequencies_stored_by_old_checkpoints_are_no_obstacle() -> None:
    stored = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    assert a_decoder_with(stored).vocab_size == 64


def test_transformers_builds_a_model_from_the_repository_root() -> None:
    """transformers looks for a package `kernels`: our folder of that name must not pass for it."""
    code = (
        "import importlib.util, transformers\n"
        "c = transformers.LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1,"
        " num_attention_heads=2, num_key_value_heads=2, vocab_size=8)\n"
        "m = transformers.LlamaForCausalLM(c)\n"
        "spec = importlib.util.find_spec('kernels')\n"
        "code = spec and spec.origin\n"  # a bare folder is a namespace without code
        "assert code is None or 'site-packages' in code, code\n"
        "print(m.num_parameters())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 0

"""Checkpoints on disk: by name, sharded, damaged, and converted from GGUF."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from specserve.errors import ModelError
from specserve.gguf_file import GGUFFile
from specserve.gguf_import import convert_gguf
from specserve.tokenizer import Tokenizer
from specserve.weights import load_weights, read_config, resolve_model
from tests.gguf_files import tiny_config, write_gguf

FAMILIES: dict[str, tuple[str, Any]] = {
    "llama": ("llama", tiny_config(LlamaConfig)),
    "llama_tied": ("llama", tiny_config(LlamaConfig, tie_word_embeddings=True)),
    "mistral_window": ("llama", tiny_config(MistralConfig, sliding_window=32)),
    "qwen2": ("qwen2", tiny_config(Qwen2Config)),
    "qwen3": ("qwen3", tiny_config(Qwen3Config, head_dim=32, tie_word_embeddings=True)),
}


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = _random_model(FAMILIES["llama"][1])
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", model, "llama")


def _random_model(config: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide a mix-up
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.eval()


def _sharded(directory: Path) -> dict[str, torch.Tensor]:
    """Two shards of random tensors with an index; returns what they hold."""
    directory.mkdir(exist_ok=True)
    first = {"a": torch.randn(3, 4), "b": torch.randn(5).to(torch.bfloat16)}
    second = {"c": torch.arange(6).reshape(2, 3)}
    save_file(first, directory / "model-1.safetensors")
    save_file(second, directory / "model-2.safetensors")
    files = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return first | second


def test_a_sharded_checkpoint_loads_as_one(tmp_path: Path) -> None:
    saved = _sharded(tmp_path)
    loaded = load_weights(tmp_path)
    assert loaded.keys() == saved.keys()
    for name, tensor in saved.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def test_writing_to_a_loaded_tensor_does_not_change_the_file(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "model.safetensors")
    load_weights(tmp_path)["a"].zero_()
    assert torch.equal(load_weights(tmp_path)["a"], torch.ones(4))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    _sharded(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-2\.safetensors is missing"):
        load_weights(tmp_path)


def test_a_tensor_that_only_the_index_knows_is_named(tmp_path: Path) -> None:
    _sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    files = json.loads(index.read_text())["weight_map"] | {"d": "model-1.safetensors"}
    index.write_text(json.dumps({"weight_map": files}))
    with pytest.raises(ModelError, match=r"lacks 1 tensors.* d"):
        load_weights(tmp_path)


def test_an_index_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "outside.safetensors")
    inner = tmp_path / "model"
    inner.mkdir()
    index = {"weight_map": {"a": "../outside.safetensors"}}
    (inner / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="not a file beside it"):
        load_weights(inner)


def test_pickled_weights_are_refused_with_the_reason(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin.*pickle.*safetensors"):
        load_weights(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 20, 100])
def test_truncated_safetensors_are_a_model_error(tmp_path: Path, keep: int) -> None:
    save_file({"a": torch.ones(100)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:keep])
    with pytest.raises(ModelError, match="damaged"):
        load_weights(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", "[" * 100_000], ids=range(5))
def test_a_bad_config_is_a_model_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "no model at"),
        ("/nowhere/at/all", "no model at"),
        ("missing.gguf", "no model at"),
        ("not a hub id!", "valid hub id"),
    ],
)
def test_a_name_that_is_no_model_says_so(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(name)


def test_a_directory_needs_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_file_that_is_not_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"not a \.gguf"):
        resolve_model(str(tmp_path / "model.bin"))


def test_a_hub_id_offline_says_what_to_do(tmp_path: Path) -> None:
    script = (
        "from specserve.weights import resolve_model\nfrom specserve.errors import ModelError\n"
        "try: resolve_model('some-owner/some-model')\nexcept ModelError as e: print(e)"
    )
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | offline, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "hub cannot be reached" in done.stdout
    assert "hf download some-owner/some-model" in done.stdout


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gguf_gives_back_the_model_it_was_made_from(family: str, tmp_path: Path) -> None:
    arch, config = FAMILIES[family]
    model = _random_model(config)
    window = getattr(config, "sliding_window", None) if family == "mistral_window" else None
    metadata = {"attention.sliding_window": window} if window else None
    path = write_gguf(tmp_path / "model.gguf", model, arch, metadata=metadata)
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(path, out)

    again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert type(again) is type(model)
    assert again.config.rms_norm_eps == 1e-6
    assert again.config.rope_parameters["rope_theta"] == 50000.0
    assert getattr(again.config, "sliding_window", None) == window
    expected = model.state_dict()
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    weights = load_weights(out)
    assert ("lm_head.weight" in weights) is not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("block_type", "dtype", "worst"),
    [
        (gguf.GGMLQuantizationType.F16, torch.float16, 1e-3),
        (gguf.GGMLQuantizationType.BF16, torch.bfloat16, 1e-2),
        (gguf.GGMLQuantizationType.Q8_0, torch.bfloat16, 2e-2),
        (gguf.GGMLQuantizationType.Q4_1, torch.bfloat16, 1.5e-1),
    ],
)
def test_quantised_blocks_come_back_close(
    block_type: gguf.GGMLQuantizationType, dtype: torch.dtype, worst: float, tmp_path: Path
) -> None:
    model = _random_model(FAMILIES["qwen2"][1])
    path = write_gguf(tmp_path / "model.gguf", model, "qwen2", block_type=block_type)
    convert_gguf(path, tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    stored, original = load_weights(tmp_path)[name], model.state_dict()[name]
    assert stored.dtype == dtype
    assert read_config(tmp_path)["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert 0 < (stored.float() - original).abs().max() < worst


def test_llama3_rope_scaling_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 50000.0,
    }  # fmt: skip
    config = tiny_config(LlamaConfig, rope_parameters=scaling, max_position_embeddings=32768)
    model = _random_model(config)
    scaled = model.model.rotary_emb.inv_freq  # [H/2]
    unscaled = 50000.0 ** -(torch.arange(0, 16, 2) / 16)  # [H/2]
    divisors = (unscaled / scaled).numpy().astype(np.float32)
    assert divisors.max() == 8.0
    path = write_gguf(
        tmp_path / "m.gguf", model, "llama", extra_tensors={"rope_freqs.weight": divisors}
    )
    convert_gguf(path, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.allclose(again.model.rotary_emb.inv_freq, scaled, rtol=1e-5)

    wrong = write_gguf(
        tmp_path / "w.gguf", model, "llama", extra_tensors={"rope_freqs.weight": divisors[::-1]}
    )
    with pytest.raises(ModelError, match="rope_freqs"):
        convert_gguf(wrong, tmp_path)


def test_yarn_metadata_reaches_the_config(tmp_path: Path) -> None:
    metadata = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
    }
    model = _random_model(FAMILIES["qwen2"][1])
    convert_gguf(write_gguf(tmp_path / "m.gguf", model, "qwen2", metadata=metadata), tmp_path)
    parameters = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert (parameters["rope_type"], parameters["factor"]) == ("yarn", 4.0)
    assert parameters["original_max_position_embeddings"] == 64


@pytest.mark.parametrize(
    ("arch", "metadata", "message"),
    [
        ("gemma", {}, "architecture 'gemma'"),
        ("llama", {"expert_count": 8}, "mixture of experts"),
        ("llama", {"rope.scaling.type": "longrope"}, "longrope"),
    ],
)
def test_what_cannot_be_converted_rightly_is_refused(
    arch: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = _random_model(FAMILIES["llama"][1])
    path = write_gguf(tmp_path / "m.gguf", model, arch, metadata=metadata)
    with pytest.raises(ModelError, match=message):
        convert_gguf(path, tmp_path)


def test_the_header_is_read_as_the_gguf_package_reads_it(tiny_gguf: Path) -> None:
    ours, theirs = GGUFFile(tiny_gguf), gguf.GGUFReader(tiny_gguf)
    for key, value in ours.metadata.items():
        assert theirs.fields[key].contents() == value
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        assert np.array_equal(ours.array(tensor.name), tensor.data)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_truncated_gguf_is_a_model_error_wherever_it_ends(
    data: st.DataObject, tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = tiny_gguf.read_bytes()
    keep = data.draw(st.integers(0, len(whole) - 33))  # 32: padding after the last tensor
    path = tmp_path_factory.mktemp("cut") / "cut.gguf"
    path.write_bytes(whole[:keep])
    with pytest.raises(ModelError):
        convert_gguf(path, path.parent)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_damaged_header_never_ends_in_anything_but_a_model_error(
    data: st.DataObject, tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    damaged = bytearray(tiny_gguf.read_bytes())
    header_len = min(info.offset for info in GGUFFile(tiny_gguf).tensors.values())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header_len - 8))
        width = data.draw(st.sampled_from([1, 8]))
        value = data.draw(st.integers(0, 2 ** (8 * width) - 1))
        damaged[at : at + width] = value.to_bytes(width, "little")
    directory = tmp_path_factory.mktemp("damaged")
    (directory / "d.gguf").write_bytes(damaged)
    try:
        convert_gguf(directory / "d.gguf", directory)
    except ModelError:
        return
    assert load_weights(directory)  # the damage was in a name or a number that may be anything


def test_a_count_beyond_the_file_is_refused_at_once(tmp_path: Path) -> None:
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    key = struct.pack("<Q", 1) + b"k"
    array = struct.pack("<IIQ", 9, 4, 1 << 60)  # an array of 2^60 uint32
    (tmp_path / "h.gguf").write_bytes(header + key + array)
    with pytest.raises(ModelError, match=f"a count of {1 << 60} exceeds the file"):
        GGUFFile(tmp_path / "h.gguf")


def test_a_gguf_as_model_is_converted_once(tiny_gguf: Path, own_cache: Path) -> None:
    first = resolve_model(str(tiny_gguf))
    assert first.is_relative_to(own_cache)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(tiny_gguf)) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    assert Tokenizer.load(first).encode("ABC") == [64 - 1]


def test_a_changed_gguf_is_converted_again(
    tiny_gguf: Path, own_cache: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny_gguf.read_bytes())
    first = resolve_model(str(copy))
    copy.write_bytes(tiny_gguf.read_bytes() + b"\0")
    assert resolve_model(str(copy)) != first


def test_a_failed_conversion_leaves_nothing_behind(own_cache: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(10))
    with pytest.raises(ModelError):
        resolve_model(str(tmp_path / "bad.gguf"))
    assert list((own_cache / "models").iterdir()) == []

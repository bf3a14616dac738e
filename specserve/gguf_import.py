"""Any GGUF file of the Llama family as a Hugging Face directory: config, weights, tokenizer.

llama.cpp renames tensors and, for architecture "llama" only, reorders the rows of Q and K so that
rotary pairs are neighbours; both are undone here. Quantised weights are stored as bf16. That is
not exact (it changes 79 % of the demo model's values, by 0.4 % at most) but well below the noise
of 4 to 8 bits: over 1,024 tokens the mean KL divergence from the exact values is 5e-5 nats and the
mean loss moves by 2e-4, for half the size of fp32.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any  # GGUF metadata values and JSON documents

import gguf
import msgspec
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from specserve.errors import ModelError
from specserve.files import build_directory_once, cache_root, write_json
from specserve.gguf_file import GGUFFile
from specserve.gguf_tokenizer import build_tokenizer

CONVERTER_VERSION = 1  # part of the cache key: raise it when the output changes
SHARD_BYTES = 2 << 30  # bounds the memory that a conversion needs

ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
PER_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# llama3 RoPE scaling reaches GGUF only as a tensor of divisors; the published models share these
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class Shape(msgspec.Struct, frozen=True):
    """The dimensions that tensor shapes follow from."""

    arch: str
    num_layers: int
    hidden: int
    num_heads: int  # N
    num_kv_heads: int  # G
    head_size: int  # H
    ffn: int
    vocab: int  # rows of the embedding, padding included


def convert_gguf(path: Path, out_dir: Path) -> None:
    """Write config.json, generation_config.json, safetensors and tokenizer files into `out_dir`.

    `out_dir` must exist; files in it are overwritten. ModelError when the file is damaged, of
    another architecture, or uses something that could only be converted wrongly.
    """
    file = GGUFFile(path)
    shape = _read_shape(file)
    config = _config(file, shape)
    _check_tensors(file, shape)
    tokenizer, tokenizer_config = build_tokenizer(file.metadata)
    dtype = _write_weights(file, shape, out_dir)
    tokenizer.save(str(out_dir / "tokenizer.json"))
    tokenizer_config["model_max_length"] = config["max_position_embeddings"]
    write_json(out_dir / "tokenizer_config.json", tokenizer_config)
    write_json(out_dir / "config.json", {**config, "torch_dtype": dtype})
    write_json(out_dir / "generation_config.json", _generation_config(file.metadata))


def cached_conversion(path: Path) -> Path:
    """The directory converted from `path` (a .gguf), in the user cache; made on first use.

    The key is the file's resolved path, size and modification time: hashing gigabytes at each
    start would cost more than reading them.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    identity = f"{CONVERTER_VERSION}:{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    key = hashlib.sha256(os.fsencode(identity)).hexdigest()[:16]
    target = cache_root() / "models" / f"{path.stem}-{key}"
    return build_directory_once(target, lambda directory: convert_gguf(path, directory))


def _read_shape(file: GGUFFile) -> Shape:
    arch = file.metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(
            f"{file.path} holds a model of architecture {arch!r}; {', '.join(ARCHITECTURES)} "
            "(mistral files say 'llama') can be converted: use the Hugging Face directory instead"
        )
    if _get(file, arch, "expert_count", 0):
        raise ModelError(f"{file.path} is a mixture of experts, which is not supported")
    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path} has no tensor token_embd.weight: it holds no model weights")
    hidden = _need(file, arch, "embedding_length")
    num_heads = _need(file, arch, "attention.head_count")
    head_size = _get(file, arch, "attention.key_length", hidden // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := _get(file, arch, key, head_size)) != head_size:
            raise ModelError(
                f"{file.path}: {key} {other} differs from the head size {head_size}; "
                "such a model is not supported"
            )
    return Shape(
        arch=arch,
        num_layers=_need(file, arch, "block_count"),
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=_get(file, arch, "attention.head_count_kv", num_heads),
        head_size=head_size,
        ffn=_need(file, arch, "feed_forward_length"),
        vocab=file.tensors["token_embd.weight"].shape[0],
    )


def _get(file: GGUFFile, arch: str, key: str, default: int) -> int:
    """A non-negative integer of the architecture's metadata."""
    value = file.metadata.get(f"{arch}.{key}", default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ModelError(f"{file.path}: {arch}.{key} is {value!r} where one integer is needed")
    return value


def _need(file: GGUFFile, arch: str, key: str) -> int:
    value = _get(file, arch, key, 0)
    if value == 0:
        raise ModelError(f"{file.path}: {arch}.{key} is missing or 0: the file is damaged")
    return value


def _config(file: GGUFFile, shape: Shape) -> dict[str, Any]:
    model_type, class_name = ARCHITECTURES[shape.arch]
    window = _get(file, shape.arch, "attention.sliding_window", 0)
    if window and shape.arch == "llama":
        model_type, class_name = "mistral", "MistralForCausalLM"
    meta = file.metadata
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": _need(file, shape.arch, "context_length"),
        "rms_norm_eps": _decimal(meta.get(f"{shape.arch}.attention.layer_norm_rms_epsilon", 1e-5)),
        "rope_theta": _decimal(meta.get(f"{shape.arch}.rope.freq_base", 10000.0)),
        "rope_scaling": _rope_scaling(file, shape),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": meta.get("tokenizer.ggml.eos_token_id"),
    }
    if window:
        config |= {"sliding_window": window, "use_sliding_window": True}
    return config


def _decimal(value: float) -> float:
    """The short decimal that a 32-bit float came from: 9.999999747378752e-06 was 1e-05."""
    return float(str(np.float32(value)))


def _rope_scaling(file: GGUFFile, shape: Shape) -> dict[str, Any] | None:
    meta, arch = file.metadata, shape.arch
    for name in ("rope_factors_long.weight", "rope_factors_short.weight"):
        if name in file.tensors:
            raise ModelError(f"{file.path} uses LongRoPE ({name}), which is not supported")
    if "rope_freqs.weight" in file.tensors:
        return _llama3_rope(file, shape)
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{file.path}: RoPE scaling {kind!r} is not one of none, linear, yarn")
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": _decimal(meta.get(f"{arch}.rope.scaling.factor", 1.0)),
    }
    if original := meta.get(f"{arch}.rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_rope(file: GGUFFile, shape: Shape) -> dict[str, Any]:
    """Parameters whose divisors equal the file's `rope_freqs.weight`; refuse if they do not."""
    divisors = file.array("rope_freqs.weight").reshape(-1)  # [H/2]
    factor = round(float(divisors.max()), 3)
    theta = float(file.metadata.get(f"{shape.arch}.rope.freq_base", 10000.0))
    half = np.arange(0, shape.head_size, 2, dtype=np.float64) / shape.head_size  # [H/2]
    wavelen = 2 * np.pi * theta**half  # [H/2] positions per turn
    original = LLAMA3_ROPE["original_max_position_embeddings"]
    low, high = LLAMA3_ROPE["low_freq_factor"], LLAMA3_ROPE["high_freq_factor"]
    smooth = np.clip((original / wavelen - low) / (high - low), 0.0, 1.0)  # [H/2]
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)  # [H/2]
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise ModelError(
            f"{file.path}: rope_freqs.weight does not follow the published llama3 scaling "
            f"(factor {factor}, {LLAMA3_ROPE}): use the model's Hugging Face directory instead"
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}


def _generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ids = [metadata.get(f"tokenizer.ggml.{key}") for key in keys]
    ends = sorted({token_id for token_id in ids if isinstance(token_id, int)})
    return {"bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"), "eos_token_id": ends}


def _hf_name(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None where there is none."""
    stem, _, kind = name.rpartition(".")
    if stem in TOP_LEVEL:
        return f"{TOP_LEVEL[stem]}.{kind}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match is None or match[2] not in PER_LAYER:
        return None
    return f"model.layers.{match[1]}.{PER_LAYER[match[2]]}.{kind}"


def _expected_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """GGUF names of all tensors the model must have."""
    q, kv = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    hidden, ffn = shape.hidden, shape.ffn
    layer = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (q, hidden),
        "attn_k.weight": (kv, hidden),
        "attn_v.weight": (kv, hidden),
        "attn_output.weight": (hidden, q),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (ffn, hidden),
        "ffn_up.weight": (ffn, hidden),
        "ffn_down.weight": (hidden, ffn),
    }
    if shape.arch == "qwen2":
        layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if shape.arch == "qwen3":
        norm = (shape.head_size,)
        layer |= {"attn_q_norm.weight": norm, "attn_k_norm.weight": norm}
    expected = {"token_embd.weight": (shape.vocab, hidden), "output_norm.weight": (hidden,)}
    for layer_idx in range(shape.num_layers):
        expected |= {f"blk.{layer_idx}.{name}": dims for name, dims in layer.items()}
    return expected


def _check_tensors(file: GGUFFile, shape: Shape) -> None:
    if shape.num_layers > len(file.tensors):  # before a table of that many layers is built
        raise ModelError(f"{file.path} claims {shape.num_layers} layers: the file is damaged")
    for name, dims in _expected_shapes(shape).items():
        info = file.tensors.get(name)
        if info is None:
            raise ModelError(f"{file.path} lacks tensor {name}: the file is damaged or incomplete")
        if info.shape != dims:
            raise ModelError(f"{file.path}: tensor {name} has shape {info.shape}, not {dims}")
    for name in file.tensors:
        if name != "rope_freqs.weight" and _hf_name(name) is None:
            raise ModelError(
                f"{file.path} has tensor {name}, which this architecture has no place for: "
                "use the model's Hugging Face directory instead"
            )


def _write_weights(file: GGUFFile, shape: Shape, out_dir: Path) -> str:
    """Write all tensors in shards of at most SHARD_BYTES; returns torch's name of their dtype."""
    dtype = _storage_dtype(file)
    shards: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    names = [name for name in file.tensors if name != "rope_freqs.weight"]
    for name in names:
        hf_name = _hf_name(name)
        assert hf_name is not None
        values = _unpermuted(file.array(name), name, shape)
        pending[hf_name] = torch.from_numpy(np.array(values)).to(dtype)
        size = sum(tensor.nbytes for tensor in pending.values())
        if size >= SHARD_BYTES or name == names[-1]:
            save_file(pending, out_dir / f"shard-{len(shards)}", metadata={"format": "pt"})
            shards.append(list(pending))
            pending = {}
    _name_shards(shards, out_dir)
    return str(dtype).removeprefix("torch.")


def _storage_dtype(file: GGUFFile) -> torch.dtype:
    """The matrices' own type where they are fp16 or fp32 (bf16 would lose bits); else bf16."""
    stored = file.tensors["blk.0.attn_q.weight"].block_type
    exact = {
        gguf.GGMLQuantizationType.F16: torch.float16,
        gguf.GGMLQuantizationType.F32: torch.float32,
    }
    return exact.get(stored, torch.bfloat16)


def _unpermuted(values: np.ndarray, name: str, shape: Shape) -> np.ndarray:
    """Rows of Q and K back in the order of rotate-half: [N, H/2, 2] -> [N, 2, H/2]."""
    if shape.arch != "llama":
        return values
    match = re.search(r"\.attn_([qk])\.(weight|bias)$", name)
    if match is None:
        return values
    num_heads = shape.num_heads if match[1] == "q" else shape.num_kv_heads
    paired = values.reshape(num_heads, shape.head_size // 2, 2, *values.shape[1:])
    return paired.swapaxes(1, 2).reshape(values.shape)


def _name_shards(shards: list[list[str]], out_dir: Path) -> None:
    """Final file names, which hold the number of shards, and the index when there are several."""
    if len(shards) == 1:
        (out_dir / "shard-0").rename(out_dir / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for shard_idx, tensor_names in enumerate(shards):
        final = f"model-{shard_idx + 1:05d}-of-{len(shards):05d}.safetensors"
        (out_dir / f"shard-{shard_idx}").rename(out_dir / final)
        weight_map |= dict.fromkeys(tensor_names, final)
    write_json(out_dir / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})

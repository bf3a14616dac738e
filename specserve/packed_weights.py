"""Weights in the native kernels' layout, packed once into the user's cache and mapped from there.

The file is safetensors with two additions that keep it valid: the header is padded so that data
begin at a multiple of 64, and unread tensors `pad.I` fill up to the next one, because the kernels
load whole cache lines. Mapped, all processes that serve the model share one copy of the pages.

The file's name holds a hash of the checkpoint's files (path, size, time) and of what packing makes
of a tiny fixed model: whatever changes in layout or quantisation changes that, so that no version
number can be forgotten.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specserve.errors import ModelError
from specserve.files import build_directory_once, cache_root
from specserve.memory import give_back
from specserve.models.config import ModelConfig, RopeConfig
from specserve.models.native import pack_model
from specserve.weights import load_weights
from specserve_kernels.native_step import Dtype

ALIGNMENT = 64  # bytes
FILE_NAME = "weights.safetensors"
_PAD = "pad."
_TYPE_NAMES = {torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16"}
_STEPS = 10  # lines of progress at most

Say = Callable[[str], None]


def packed_weights(
    directory: Path, config: ModelConfig, dtype: Dtype, say: Say = lambda line: None
) -> dict[str, Tensor]:
    """What `NativeDecoder.from_packed` takes, for the checkpoint in `directory`, mapped.

    Packs on the first call and says how far it is. Where the cache cannot be written the weights
    stay in this process's memory, and a line says so. ModelError as `load_weights`, `pack_model`.
    """
    target = cached_at(directory, dtype)
    if target.is_dir():
        try:
            return read_packed(target / FILE_NAME)
        except (SafetensorError, OSError) as error:
            say(f"{target} is damaged ({error}): packing again")
            shutil.rmtree(target, ignore_errors=True)
    say(f"packing weights as {dtype}, once; kept in {target}")
    packed = pack_model(config, _Counted(load_weights(directory), say), dtype)
    try:
        build_directory_once(target, lambda work: write_packed(work / FILE_NAME, packed))
        mapped = read_packed(target / FILE_NAME)
    except (ModelError, OSError, SafetensorError) as error:
        say(f"packed weights are not kept, the next start packs again: {error}")
        return packed
    packed.clear()
    give_back()  # the copy that was just written
    _remove_older(target)
    return mapped


def cached_at(directory: Path, dtype: Dtype) -> Path:
    """The directory in the cache for that checkpoint as it now is; it may not exist."""
    where = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()
    key = hashlib.sha256(_fingerprint(dtype).encode())
    for path in sorted([*directory.glob("*.safetensors"), directory / "config.json"]):
        stat = path.stat()  # of the file itself, not of a link to it
        key.update(f"{path.name} {path.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    name = f"{directory.resolve().name}-{where[:8]}-{dtype}-{key.hexdigest()[:16]}"
    return cache_root() / "packed" / name


def write_packed(path: Path, packed: Mapping[str, Tensor]) -> None:
    """A safetensors file whose every tensor begins at a multiple of 64 bytes; flushed to disk."""
    entries: dict[str, object] = {}
    chunks: list[bytes | memoryview] = []
    offset = 0
    for idx, (name, tensor) in enumerate(packed.items()):
        data = tensor.detach().contiguous().view(torch.uint8).flatten().numpy().data
        shape = list(tensor.shape)
        entries[name] = _entry(_TYPE_NAMES[tensor.dtype], shape, offset, data.nbytes)
        chunks.append(data)
        offset += data.nbytes
        if missing := -offset % ALIGNMENT:
            entries[f"{_PAD}{idx}"] = _entry("U8", [missing], offset, missing)
            chunks.append(bytes(missing))
            offset += missing
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + 8) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())  # a name that appears after a power cut must not be an empty file


def read_packed(path: Path) -> dict[str, Tensor]:
    """The tensors of `write_packed`, mapped privately: nothing is read until it is used."""
    with safe_open(path, framework="pt", device="cpu") as file:
        names = [name for name in file.keys() if not name.startswith(_PAD)]  # noqa: SIM118
        return {name: file.get_tensor(name) for name in names}


# ---- inside ------------------------------------------------------------------------------


def _entry(kind: str, shape: list[int], offset: int, num_bytes: int) -> dict[str, object]:
    return {"dtype": kind, "shape": shape, "data_offsets": [offset, offset + num_bytes]}


class _Counted(Mapping[str, Tensor]):
    """A checkpoint that says how much of it has been taken."""

    def __init__(self, weights: Mapping[str, Tensor], say: Say) -> None:
        self._weights = weights
        self._say = say
        self._num_bytes = sum(tensor.nbytes for tensor in weights.values())
        self._taken: set[str] = set()
        self._shown = 0

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._weights[name]
        self._taken.add(name)
        done = sum(self._weights[taken].nbytes for taken in self._taken) / self._num_bytes
        if int(done * _STEPS) > self._shown:
            self._shown = int(done * _STEPS)
            self._say(f"packing weights: {done:.0%}")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


@cache
def _fingerprint(dtype: Dtype) -> str:
    """Hex digest of a tiny model, packed: another layout or another rounding, another digest."""
    config = ModelConfig(
        family="qwen3",  # with norms of queries and keys
        vocab_size=40,
        hidden_size=72,
        intermediate_size=88,
        num_layers=1,
        num_heads=6,
        num_kv_heads=2,
        head_dim=12,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm=True,
        sliding_windows=(None,),
        rope=RopeConfig(),
    )
    digest = hashlib.sha256()
    for name, tensor in sorted(pack_model(config, _probe(config), dtype).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.view(torch.uint8).flatten().numpy().data)
    return digest.hexdigest()


def _probe(config: ModelConfig) -> dict[str, Tensor]:
    """Weights of all kinds with fixed numbers, each exact in any float type of 11 bits or more."""
    width, inner, layer = config.hidden_size, config.intermediate_size, "model.layers.0"
    query_size = config.num_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (config.vocab_size, width),
    }
    for name, *shape in (
        ("self_attn.q_proj", query_size, width),
        ("self_attn.k_proj", kv_size, width),
        ("self_attn.v_proj", kv_size, width),
        ("self_attn.o_proj", width, query_size),
        ("mlp.gate_proj", inner, width),
        ("mlp.up_proj", inner, width),
        ("mlp.down_proj", width, inner),
    ):
        shapes |= {f"{layer}.{name}.weight": tuple(shape), f"{layer}.{name}.bias": (shape[0],)}
    for name in ("input_layernorm", "post_attention_layernorm"):
        shapes[f"{layer}.{name}.weight"] = (width,)
    for name in ("self_attn.q_norm", "self_attn.k_norm"):
        shapes[f"{layer}.{name}.weight"] = (config.head_dim,)
    weights = {}
    for idx, (name, size) in enumerate(shapes.items()):
        numbers = torch.arange(idx, idx + math.prod(size)) * 48_271 % 2039 - 1019
        weights[name] = (numbers / 1024).view(size)
    return weights


def _remove_older(target: Path) -> None:
    """What earlier versions made of the same checkpoint. Who has mapped one keeps its pages."""
    prefix = target.name.rpartition("-")[0]
    for other in target.parent.glob(f"{prefix}-*"):
        if other != target:
            shutil.rmtree(other, ignore_errors=True)

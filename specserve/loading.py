"""From a model's name to a decoder: which kernels run it, in which dtype, from which weights."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import torch

from specserve.errors import ConfigError
from specserve.memory import MIB
from specserve.models.config import ModelConfig, parse_model_config
from specserve.models.decoder import Decoder
from specserve.models.native import NativeDecoder
from specserve.packed_weights import packed_weights
from specserve.tokenizer import Tokenizer
from specserve.weights import load_weights, read_config, resolve_model
from specserve_drafts.head_files import TargetParts
from specserve_kernels import (
    NATIVE,
    TRITON,
    choose_backend,
    make_backend,
    native_library,
    why_not_native,
)
from specserve_kernels.native_step import DTYPE_CODES
from specserve_kernels.native_step import Dtype as NativeDtype

if TYPE_CHECKING:
    from specserve.gpu.decoder import TritonDecoder

DTYPES = {
    "int8": torch.int8,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
NATIVE_DTYPES: dict[str, NativeDtype] = {"int8": "int8", "bf16": "bf16", "fp32": "fp32"}

_FIRST_WITH_FP8 = 8, 9  # Triton converts float8_e4m3fn there

AnyDecoder: TypeAlias = "Decoder | NativeDecoder | TritonDecoder"
Say = Callable[[str], None]


class LoadedModel(msgspec.Struct, frozen=True):
    """uses_triton: the decoder is a TritonDecoder"""

    decoder: AnyDecoder
    tokenizer: Tokenizer
    path: Path
    uses_triton: bool = False

    @property
    def vocab_size(self) -> int:
        """Ids that may be chosen: logits are often padded beyond the tokenizer's."""
        return min(self.tokenizer.vocab_size, self.decoder.vocab_size)

    @property
    def parts(self) -> TargetParts:
        """What drafters that read hidden states share with it."""
        return TargetParts(
            num_layers=self.decoder.config.num_layers,
            hidden_size=self.decoder.config.hidden_size,
            max_positions=self.decoder.max_position_embeddings,
            embedding=self.decoder.embedding,
            final_norm=self.decoder.final_norm,
            dtype=self.decoder.dtype,
        )


def load_model(
    name: str,
    dtype: str,
    backend: str,
    say: Say,
    *,
    device: str = "cpu",
    kv_cache_dtype: str = "auto",
) -> LoadedModel:
    """name: as --model; dtype: a key of DTYPES; the rest as the options, checked before.

    Says what is loaded and with which kernels. ModelError or ConfigError say what to change.
    """
    path = resolve_model(name, say)
    chosen = _backend_for(dtype, backend, device)
    say(f"loading {name} from {path} as {dtype}, {_kernels(chosen, dtype)}")
    if chosen == "cpu" and backend == "auto" and dtype in NATIVE_DTYPES:
        say(f"not with native kernels, torch is often slower: {why_not_native()}")
    config = parse_model_config(read_config(path))
    decoder: AnyDecoder
    if chosen == TRITON:
        decoder = _on_device(config, path, dtype, device, kv_cache_dtype)
        say(f"weights on {device}: {decoder.weight_bytes() / MIB:.0f} MiB")
    elif chosen == NATIVE:
        packed = packed_weights(path, config, NATIVE_DTYPES[dtype], say)
        decoder = NativeDecoder.from_packed(
            config, packed, NATIVE_DTYPES[dtype], torch.get_num_threads()
        )
    else:
        weights, kernels = load_weights(path), make_backend(chosen)
        decoder = Decoder(config, weights, dtype=DTYPES[dtype], backend=kernels)
        sizes = ", ".join(map(str, decoder.call_sizes))
        say(f"GEMM call sizes that agree bit for bit here: {sizes}")
    return LoadedModel(decoder, Tokenizer.load(path), path, chosen == TRITON)


def choose_dtype(asked: str, backend: str = "auto", device: str = "cpu") -> str:
    """auto: the fastest that is safe here, a key of DTYPES.

    On a GPU bf16. int8 with native kernels, whose int8 products are vectorised; else bf16 where
    torch multiplies it natively, else fp32 (emulated bf16 costs per row).
    """
    if asked != "auto":
        return asked
    chosen = choose_backend(backend, device)
    if chosen == TRITON:
        return "bf16"
    if chosen == NATIVE and native_products("int8") != "portable":
        return "int8"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call] # torch's own
        return "fp32"
    return "bf16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32"


def native_products(dtype: str) -> str:
    """The instruction set of the native matrix products: amx, avx512vnni, avx2, portable ..."""
    return native_library.products(DTYPE_CODES[NATIVE_DTYPES[dtype]])


def check_backend(name: str, device: str = "cpu") -> None:
    """ConfigError where --backend and --device name nothing that runs here."""
    try:
        choose_backend(name, device)
    except ValueError as error:
        flag = "--backend" if device == "cpu" else "--device cuda"
        raise ConfigError(f"{flag}: {error}") from error


def use_threads(asked: int) -> None:
    """As many tensor threads as --threads says."""
    torch.set_num_threads(asked or usable_cores())


def usable_cores() -> int:
    """Cores this process may run on, which in a container are fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_kv_cache_dtype(name: str, backend: str, device: str) -> None:
    """ConfigError where nothing here can read and write a KV pool of --kv-cache-dtype."""
    if name == "auto":
        return
    if choose_backend(backend, device) != TRITON:
        raise ConfigError(
            f"--kv-cache-dtype {name} needs Triton's kernels: choose --device cuda, or auto"
        )
    if device == "cuda" and torch.cuda.get_device_capability() < _FIRST_WITH_FP8:
        major, minor = torch.cuda.get_device_capability()
        raise ConfigError(
            f"--kv-cache-dtype {name} needs a GPU of compute capability 8.9 or above, this one has "
            f"{major}.{minor}: choose auto"
        )


def _on_device(
    config: ModelConfig, path: Path, dtype: str, device: str, kv_cache_dtype: str
) -> TritonDecoder:
    from specserve.gpu.decoder import TritonDecoder  # needs triton

    try:
        return TritonDecoder(
            config,
            load_weights(path),
            dtype=DTYPES[dtype],
            device=torch.device(device),
            kv_dtype=torch.float8_e4m3fn if kv_cache_dtype == "fp8" else None,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the weights of {path} do not fit into the GPU's memory as {dtype} ({error}): choose "
            "a smaller model, or free the GPU"
        ) from error


def _backend_for(dtype: str, backend: str, device: str) -> str:
    chosen = choose_backend(backend, device)
    if chosen == NATIVE and dtype not in NATIVE_DTYPES:
        if backend == NATIVE:
            raise ConfigError(
                f"--dtype {dtype} has no native kernels: choose {', '.join(NATIVE_DTYPES)}, "
                "or --backend cpu"
            )
        return "cpu"
    return chosen


def _kernels(backend: str, dtype: str) -> str:
    if backend == TRITON:
        return "Triton kernels"
    return f"native kernels ({native_products(dtype)})" if backend == NATIVE else f"torch {backend}"

"""Reading a drafter's checkpoint: a directory with config.json and safetensors, checked by name.

A tensor of the wrong shape, a missing one and one that nobody reads are all errors: a drafter that
loads wrongly guesses badly for ever, and nothing else would ever say so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol  # Any: JSON documents

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specserve.errors import ConfigError, ModelError
from specserve.models.linear import GemmWeight, Weight
from specserve.weights import load_weights, read_config, resolve_model
from specserve_kernels.native_step import Dtype

Pack = Callable[[Tensor], Weight]


class NativeForm(msgspec.Struct, frozen=True):
    """How native code runs a head. threads: of a call, the calling thread included."""

    dtype: Dtype
    threads: int


class TargetParts(msgspec.Struct, frozen=True, kw_only=True):
    """What a drafter that reads hidden states shares with the target.

    num_layers, hidden_size, max_positions: the target's
    embedding:  [V, D] its token embedding, any float dtype
    final_norm: [n, D] -> [n, D], what stands between the last layer and the head
    dtype:      of the drafter's activations, norms and KV
    pack:       a matrix [out, in] in `dtype` -> the layout its products read
    native:     how heads that native code can run are packed; None: they run in torch
    """

    num_layers: int
    hidden_size: int
    max_positions: int
    embedding: Tensor
    final_norm: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    pack: Pack = GemmWeight
    native: NativeForm | None = None


class Head(Protocol):
    """A drafter's weights, loaded; what the memory plan asks of them."""

    def weight_bytes(self) -> int: ...

    def kv_bytes_per_token(self, block_size: int) -> int:
        """Bytes per slot of the shared pool, whatever is kept per block included."""
        ...


def need_parts(
    name: str, argument: str | None, target: TargetParts | None
) -> tuple[str, TargetParts]:
    """(path, target). ConfigError where either is missing."""
    if not argument:
        raise ConfigError(f"drafter {name!r} needs a checkpoint: write {name}:PATH")
    if target is None:
        raise ConfigError(
            f"drafter {name!r} reads the target's hidden states, and this target shows none: use "
            "a model that the native decoder runs, or another drafter"
        )
    return argument, target


def read_checkpoint(
    name: str, file_name: str | None = None, hint: str = ""
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config.json, tensors by name) of a directory or hub id. ModelError says what to do.

    file_name: where this family's tensors are if not in model.safetensors
    hint:      how to convert what is refused
    """
    directory = resolve_model(name)
    config = read_config(directory)
    try:
        if file_name and (directory / file_name).is_file():
            return config, _load(directory / file_name)
        return _widened(config, load_weights(directory))
    except ModelError as error:
        raise ModelError(f"{error}. {hint}" if hint else str(error)) from error


def _widened(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """int8 matrices of compressed-tensors (`<name>_scale` [out, 1] beside each) as fp32."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, dict) or quantization.get("format") != "int-quantized":
        return config, tensors
    scales = {name: own for name, own in tensors.items() if name.endswith(".weight_scale")}
    plain = {name: own for name, own in tensors.items() if name not in scales}
    for name, scale in scales.items():
        matrix = plain.get(name.removesuffix("_scale"))
        if matrix is None or matrix.dtype != torch.int8 or scale.shape != (len(matrix), 1):
            raise ModelError(f"tensor {name!r} is no scale per row of an int8 matrix")
        plain[name.removesuffix("_scale")] = matrix.float() * scale.float()
    return {key: own for key, own in config.items() if key != "quantization_config"}, plain


def _load(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ModelError(f"{path} is damaged ({error}): download it again") from error


class Tensors:
    """Takes tensors of a checkpoint by name, and knows which were never taken."""

    def __init__(self, source: str, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._source = source
        self._tensors = tensors
        self._dtype = dtype
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def num_rows(self, name: str) -> int:
        """Of a matrix whose height only the file tells."""
        tensor = self._tensors.get(name)
        return 0 if tensor is None else tensor.shape[0]

    def take(self, name: str, *shape: int) -> Tensor:
        """In the drafter's dtype."""
        return self.take_as_stored(name, *shape).to(self._dtype)

    def take_as_stored(self, name: str, *shape: int) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self._source} has no tensor {name!r}, its config.json needs it")
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self._source}: tensor {name!r} has shape {list(tensor.shape)}, "
                f"its config.json and the target need {list(shape)}"
            )
        self._taken.add(name)
        return tensor

    def refuse_leftovers(self, *ignored: str) -> None:
        """ignored: beginnings of names that inference has no use for."""
        unknown = [
            name
            for name in self._tensors
            if name not in self._taken and not name.startswith(ignored)
        ]
        if unknown:
            raise ModelError(
                f"{self._source} has {len(unknown)} tensors its config.json has no place for, the "
                f"first of them {min(unknown)!r}: it is of another architecture"
            )


def whole_number(config: Mapping[str, Any], source: str, field: str, default: int | None) -> int:
    value = config.get(field)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"{source}: {field} is {value!r}, it must be a whole number above 0")
    return value


def flag(config: Mapping[str, Any], source: str, field: str) -> bool:
    value = config.get(field)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{source}: {field} is {value!r}, it must be true or false")
    return bool(value)


def refuse_other_width(source: str, what: str, own: int, target: int) -> None:
    if own != target:
        raise ModelError(
            f"{source}: {what} is {own}, but the target's hidden size is {target}: this drafter "
            "was trained for another target"
        )

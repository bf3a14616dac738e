"""A GGUF file's metadata and tensors, read with every length checked against the file.

The `gguf` package's own reader trusts lengths: an array count of 2^60 past the end of a damaged
file spins for ever, and 100,000 vocabulary strings take it seconds. So the header is parsed here
(0.2 s for 50,000 tokens) and only the dequantisation of blocks is left to that package.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any  # metadata values: int, float, bool, str or a list of one of them

import gguf
import msgspec
import numpy as np
import numpy.typing as npt

from specserve.errors import ModelError

MAGIC = b"GGUF"
SUPPORTED_VERSIONS = (2, 3)
MAX_DIMS = 4
STRING, ARRAY = 8, 9
# GGUF value type -> struct code, little-endian
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


class TensorInfo(msgspec.Struct, frozen=True):
    """Where a tensor lies. `shape` is row-major, as torch spells it (GGUF stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    block_type: gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


class GGUFFile:
    """An open GGUF file: `.metadata` by key and `.tensors` by name, in file order.

    Raises ModelError when the file is not GGUF, is truncated, or claims lengths it does not have.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"{path} cannot be read as GGUF: {error}") from error
        self._at = 0
        try:
            self.metadata, self.tensors = self._read_header()
        except (struct.error, UnicodeDecodeError, ValueError, KeyError, RecursionError) as error:
            raise self._damaged(f"near byte {self._at}: {error}") from error

    def array(self, name: str) -> npt.NDArray[np.float32]:
        """The named tensor's values, dequantised to fp32, in the shape of its TensorInfo."""
        info = self.tensors[name]
        raw = np.frombuffer(self._buffer, np.uint8, info.num_bytes, info.offset)
        rows = raw.reshape(*info.shape[:-1], -1)  # quantisation blocks lie along the last axis
        try:
            values = gguf.quants.dequantize(rows, info.block_type)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {name} is stored as {info.block_type.name}, which cannot be "
                "dequantised: use a file quantised as Q4, Q5, Q6, Q8, F16, BF16 or F32"
            ) from error
        return np.asarray(values, dtype=np.float32).reshape(info.shape)

    def _read_header(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if self._bytes(4) != MAGIC:
            raise ModelError(f"{self.path} is not a GGUF file: it does not begin with {MAGIC!r}")
        version = self._scalar("I")
        if version not in SUPPORTED_VERSIONS:
            raise ModelError(
                f"{self.path} is GGUF version {version}; versions {SUPPORTED_VERSIONS} "
                "(little-endian) can be read: convert it with a current llama.cpp"
            )
        num_tensors, num_keys = self._count(), self._count()
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        raw_infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}, not a power of two")
        data_start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for info in raw_infos:
            moved = msgspec.structs.replace(info, offset=info.offset + data_start)
            if moved.offset + moved.num_bytes > len(self._buffer):
                raise ValueError(f"tensor {info.name} ends after the end of the file")
            if info.name in tensors:
                raise ValueError(f"tensor {info.name} occurs twice")
            tensors[info.name] = moved
        return metadata, tensors

    def _tensor_info(self) -> TensorInfo:
        name = self._string()
        num_dims = self._scalar("I")
        if not 1 <= num_dims <= MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(reversed([self._scalar("Q") for _ in range(num_dims)]))
        block_type = gguf.GGMLQuantizationType(self._scalar("I"))
        block_len, block_bytes = gguf.GGML_QUANT_SIZES[block_type]
        if 0 in shape or shape[-1] % block_len:
            raise ValueError(f"tensor {name}: rows of {shape[-1]} do not fill {block_type.name}")
        num_bytes = math.prod(shape) // block_len * block_bytes
        return TensorInfo(name, shape, block_type, self._scalar("Q"), num_bytes)

    def _value(self, kind: int, *, nested: bool = False) -> Any:
        if kind == STRING:
            return self._string()
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind != ARRAY or nested:  # nested arrays exist in no known file
            raise ValueError(f"metadata value of unknown type {kind}")
        item_kind = self._scalar("I")
        num_items = self._count()
        if item_kind in SCALARS:
            code = f"<{num_items}{SCALARS[item_kind]}"
            return list(struct.unpack(code, self._bytes(struct.calcsize(code))))
        return [self._value(item_kind, nested=True) for _ in range(num_items)]

    def _count(self) -> int:
        """A 64-bit count of things of at least one byte each, so never more than what is left."""
        count = self._scalar("Q")
        if count > len(self._buffer) - self._at:
            raise ValueError(f"a count of {count} exceeds the file")
        return int(count)

    def _string(self) -> str:
        return self._bytes(self._count()).decode("utf-8")

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._bytes(struct.calcsize("<" + code)))[0]

    def _bytes(self, num_bytes: int) -> bytes:
        end = self._at + num_bytes
        if end > len(self._buffer):
            raise ValueError(f"{num_bytes} bytes wanted, {len(self._buffer) - self._at} left")
        chunk = self._buffer[self._at : end]
        self._at = end
        return chunk

    def _damaged(self, what: str) -> ModelError:
        return ModelError(
            f"{self.path} is damaged or truncated ({what}): download or copy it again"
        )

"""The C surface of the native matrix products, for their tests: packed weights as values, and the
choice of instruction set. `gemm` is None where the library is not built.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specserve_kernels.native_library import load

Floats = NDArray[np.float32]

F32, BF16, I8 = 0, 1, 2
STORE, ADD, SWIGLU = 0, 1, 2
DTYPES = {"f32": F32, "bf16": BF16, "int8": I8}
INSTRUCTION_SETS = ["amx", "avx512vnni", "avx2", "portable"]


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, i64, i32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    library.specserve_gemm_packed_bytes.restype = ctypes.c_size_t
    library.specserve_gemm_packed_bytes.argtypes = [i32, i64, i64]
    library.specserve_gemm_pack.restype = ctypes.c_char_p
    library.specserve_gemm_pack.argtypes = [i32, i64, i64, pointer, pointer, pointer]
    library.specserve_gemm_run.restype = ctypes.c_char_p
    library.specserve_gemm_run.argtypes = [
        *[i32, i64, i64, pointer, pointer, pointer],  # dtype, n, k, packed, scales, bias
        *[i64, pointer, i64, i64, i64, i32, pointer, i64],  # rows, x, ldx, columns, epilogue, out
    ]
    library.specserve_gemm_instruction_set.restype = ctypes.c_char_p
    library.specserve_gemm_choose.argtypes = [ctypes.c_char_p]
    return library


LIBRARY = load()
gemm = _declared(LIBRARY) if LIBRARY is not None else None


def chosen(name: str) -> bool:
    return bool(gemm.specserve_gemm_choose(name.encode()))


def in_use(dtype: int) -> str:
    return gemm.specserve_gemm_instruction_set(dtype).decode()


def available() -> list[str]:
    return [name for name in INSTRUCTION_SETS if chosen(name)]


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    raw = np.zeros(num_bytes + 64, np.uint8)
    begin = -raw.ctypes.data % 64
    return raw[begin : begin + num_bytes]


@dataclass(frozen=True)
class Packed:
    """A packed weight [n, k]."""

    dtype: int
    n: int
    k: int
    packed: NDArray[np.uint8]
    scales: Floats

    def run(
        self,
        x: Floats,
        out: Floats,
        columns: tuple[int, int] | None = None,
        bias: Floats | None = None,
        epilogue: int = STORE,
    ) -> str | None:
        """Write into out [M, >= n] what x [M, k] gives; the complaint, if there is one."""
        begin, end = columns or (0, self.n)
        complaint = gemm.specserve_gemm_run(
            *(self.dtype, self.n, self.k, self.packed.ctypes.data, self.scales.ctypes.data),
            *(None if bias is None else bias.ctypes.data, len(x)),
            *(x.ctypes.data, x.strides[0] // 4, begin, end, epilogue),
            *(out.ctypes.data, out.strides[0] // 4),
        )
        return None if complaint is None else complaint.decode()

    def product(self, x: Floats, bias: Floats | None = None, epilogue: int = STORE) -> Floats:
        out = np.zeros((len(x), self.n // (2 if epilogue == SWIGLU else 1)), np.float32)
        assert self.run(x, out, bias=bias, epilogue=epilogue) is None
        return out


def packed(dtype: int, w: Floats) -> Packed:
    n, k = w.shape
    weight = Packed(
        dtype, n, k, aligned(gemm.specserve_gemm_packed_bytes(dtype, n, k)), np.zeros(n, np.float32)
    )
    complaint = gemm.specserve_gemm_pack(
        dtype, n, k, w.ctypes.data, weight.packed.ctypes.data, weight.scales.ctypes.data
    )
    assert complaint is None
    return weight

"""Finds and loads the compiled kernels, or says in a sentence why this process has none.

In a checkout the library must be as new as its sources: a stale one is refused, by hash and not
by date, because its results would be those of another program.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from specserve_kernels import build_native


def load(package: Path = build_native.PACKAGE) -> ctypes.CDLL | None:
    """The library, loaded once per process, or None: `why_not` then says why."""
    return _load(package)[0]


def why_not(package: Path = build_native.PACKAGE) -> str | None:
    """Why `load` gives None and what to do about it; None where it gives a library."""
    return _load(package)[1]


def products(dtype_code: int) -> str:
    """The instruction set of the matrix products in gemm.h's dtype: amx, avx2, portable ...

    Only where there is a library.
    """
    library = load()
    assert library is not None, why_not()
    function = library.specserve_gemm_instruction_set
    function.argtypes = [ctypes.c_int32]
    function.restype = ctypes.c_char_p
    return str(function(dtype_code).decode())


@cache
def _load(package: Path) -> tuple[ctypes.CDLL | None, str | None]:
    path = build_native.library_path(package)
    if not path.exists():
        try:
            build_native.find_compiler()
        except build_native.BuildError as error:
            return None, str(error)
        return None, f"the native kernels are not built: run {build_native.COMMAND}"
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{path.name} cannot be loaded ({error}): run {build_native.COMMAND}"
    built_from = library.specserve_native_source_hash
    built_from.restype = ctypes.c_char_p
    if build_native.sources(package) and built_from().decode() != build_native.source_hash(package):
        return None, (
            f"{path.name} is older than its sources: run {build_native.COMMAND} (make install does)"
        )
    return library, None

"""Kernels behind one interface; imports torch only.

`native`, compiled at install, runs whole decoder steps (`native_step`); the backends named in
BACKENDS are attention and KV writes for the torch decoder. `auto` takes the fastest that this
process can run; an explicit name never falls back.
"""

from __future__ import annotations

from collections.abc import Callable

from specserve_kernels import native_library
from specserve_kernels.cpu import CpuBackend
from specserve_kernels.interface import AttentionPlan, Backend, PagedBatch
from specserve_kernels.native_step import DTYPE_CODES
from specserve_kernels.reference import ReferenceBackend

BACKENDS: dict[str, Callable[[], Backend]] = {
    "reference": ReferenceBackend,
    "cpu": CpuBackend,
}
NATIVE = "native"

__all__ = [
    "BACKENDS",
    "NATIVE",
    "AttentionPlan",
    "Backend",
    "PagedBatch",
    "choose_backend",
    "make_backend",
    "why_not_native",
]


def choose_backend(name: str = "auto") -> str:
    """NATIVE or a key of BACKENDS: what `name` stands for in this process.

    ValueError where there is no such name, or where native kernels are asked for and not there.
    """
    if name not in ("auto", NATIVE, *BACKENDS):
        raise ValueError(
            f"backend {name!r} does not exist: choose auto, {NATIVE}, {', '.join(BACKENDS)}"
        )
    if name == NATIVE and (reason := native_library.why_not()) is not None:
        raise ValueError(f"native kernels cannot run here: {reason}")
    if name != "auto":
        return name
    return "cpu" if why_not_native() else NATIVE


def why_not_native() -> str | None:
    """Why `auto` is not NATIVE in this process; None where it is."""
    if (reason := native_library.why_not()) is not None:
        return reason
    if native_library.products(DTYPE_CODES["int8"]) == "portable":
        return "the native kernels have no vector code for this CPU"
    return None


def make_backend(name: str = "auto") -> Backend:
    """The torch decoder's backend of that name; ValueError names the choices."""
    if name == "auto":
        name = "cpu"
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} does not exist: choose auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]()

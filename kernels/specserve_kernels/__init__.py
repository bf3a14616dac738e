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
]


def choose_backend(name: str = "auto") -> str:
    """NATIVE or a key of BACKENDS: what `name` stands for in this process.

    ValueError where there is no such name, or where native kernels are asked for and not there.
    """
    if name not in ("auto", NATIVE, *BACKENDS):
        raise ValueError(
            f"backend {name!r} does not exist: choose auto, {NATIVE}, {', '.join(BACKENDS)}"
        )
    if name not in ("auto", NATIVE):
        return name
    reason = native_library.why_not()
    if reason is None:
        return NATIVE
    if name == NATIVE:
        raise ValueError(f"native kernels cannot run here: {reason}")
    return "cpu"


def make_backend(name: str = "auto") -> Backend:
    """The torch decoder's backend of that name; ValueError names the choices."""
    if name == "auto":
        name = "cpu"
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} does not exist: choose auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]()

"""Attention and KV kernels behind one interface; imports torch only.

`auto` takes the fastest backend this process can run; an explicit name never falls back.
"""

from __future__ import annotations

from collections.abc import Callable

from specserve_kernels.cpu import CpuBackend
from specserve_kernels.interface import AttentionPlan, Backend, PagedBatch
from specserve_kernels.reference import ReferenceBackend

BACKENDS: dict[str, Callable[[], Backend]] = {
    "reference": ReferenceBackend,
    "cpu": CpuBackend,
}

__all__ = ["BACKENDS", "AttentionPlan", "Backend", "PagedBatch", "make_backend"]


def make_backend(name: str = "auto") -> Backend:
    """The backend of that name; ValueError names the choices."""
    if name == "auto":
        name = "cpu"
    if name not in BACKENDS:
        raise ValueError(f"backend {name!r} does not exist: choose auto, {', '.join(BACKENDS)}")
    return BACKENDS[name]()

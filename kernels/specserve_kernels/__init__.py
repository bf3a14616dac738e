"""Kernels behind one interface; imports torch only.

`native`, compiled at install, runs whole decoder steps (`native_step`); `triton` is the kernels of
`triton_kernels`, for GPUs; the backends named in BACKENDS are attention and KV writes for the torch
decoder. `auto` takes the fastest that this process can run; an explicit name never falls back.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from specserve_kernels import native_library
from specserve_kernels.cpu import CpuBackend
from specserve_kernels.interface import AttentionPlan, Backend, PagedBatch
from specserve_kernels.native_step import DTYPE_CODES
from specserve_kernels.reference import ReferenceBackend
from specserve_kernels.triton_kernels import why_not_triton

BACKENDS: dict[str, Callable[[], Backend]] = {
    "reference": ReferenceBackend,
    "cpu": CpuBackend,
}
NATIVE = "native"
TRITON = "triton"

__all__ = [
    "BACKENDS",
    "NATIVE",
    "TRITON",
    "AttentionPlan",
    "Backend",
    "PagedBatch",
    "choose_backend",
    "make_backend",
    "why_not_native",
]


def choose_backend(name: str = "auto", device: str = "cpu") -> str:
    """NATIVE, TRITON or a key of BACKENDS: what `name` stands for in this process.

    device: cpu or cuda
    ValueError where there is no such name, or where kernels are asked for that cannot run here.
    """
    if name not in ("auto", NATIVE, TRITON, *BACKENDS):
        raise ValueError(
            f"backend {name!r} does not exist: choose auto, {NATIVE}, {TRITON}, "
            f"{', '.join(BACKENDS)}"
        )
    if device == "cuda" and name not in ("auto", TRITON):
        raise ValueError(f"backend {name!r} runs on CPUs: on a GPU choose auto or {TRITON}")
    if device == "cuda" or name == TRITON:
        if (reason := why_not_triton_on(device)) is not None:
            raise ValueError(f"Triton kernels cannot run here: {reason}")
        return TRITON
    if name == NATIVE and (reason := native_library.why_not()) is not None:
        raise ValueError(f"native kernels cannot run here: {reason}")
    if name != "auto":
        return name
    return "cpu" if why_not_native() else NATIVE


def why_not_triton_on(device: str) -> str | None:
    """Why Triton's kernels cannot run in this process on `device`; None where they can."""
    if (reason := why_not_triton()) is not None:
        return reason
    is_interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    if device == "cuda":
        if is_interpreting:
            return "TRITON_INTERPRET=1 is set: kernels would be interpreted, unset it"
        if not torch.cuda.is_available():
            return f"torch {torch.__version__} sees no GPU on this machine"
    elif not is_interpreting:
        return "they are compiled for GPUs: choose --device cuda"
    return None


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

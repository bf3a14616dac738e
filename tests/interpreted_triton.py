"""Runs Triton kernels on the CPU, in Triton's interpreter, repaired and watched.

conftest.py sets TRITON_INTERPRET=1 before anything imports triton. The interpreter of triton 3.9
computes bf16 and fp8 wrongly (it works on their bit patterns, and truncates casts), loses the type
of a comparison of scalars, and patches the whole language anew at every call of a `tl.sum`. Here:

- casts to and from bf16 and fp8 go through torch, which rounds to nearest even; products of bf16
  are taken in fp32; other arithmetic on them is refused, as kernels must convert first;
- a load or store outside the tensors of its launch, and one address written by two programs, fail.

It reaches into private classes, so it works with the versions that it was checked against only.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

CHECKED_VERSION = "3.9."

triton = pytest.importorskip("triton", reason="triton is not installed (Linux only)")
tl = pytest.importorskip("triton.language")
interpreter = pytest.importorskip("triton.runtime.interpreter")

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
WHY_NOT_CPU = (
    f"the interpreter is repaired for triton {CHECKED_VERSION}x, this is {triton.__version__}"
    if not triton.__version__.startswith(CHECKED_VERSION)
    else None
    if INTERPRETING
    else "on a device kernels are compiled: the interpreter is off (TRITON_INTERPRET=1 turns it on)"
)
_WHY_NOT_CUDA = (
    "kernels are interpreted: run pytest -m gpu, alone"
    if INTERPRETING
    else None
    if torch.cuda.is_available()
    else "there is no GPU"
)
# Parametrises every kernel's tests: the interpreter here, the same on a device with -m gpu.
ON_DEVICES = pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "cpu", marks=pytest.mark.skipif(WHY_NOT_CPU is not None, reason=str(WHY_NOT_CPU))
        ),
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(_WHY_NOT_CUDA is not None, reason=str(_WHY_NOT_CUDA)),
            ],
        ),
    ],
)

_Builder = interpreter.InterpreterBuilder
_Handle = interpreter.TensorHandle
_NARROW = {
    tl.bfloat16: (torch.bfloat16, np.uint16, np.int16, torch.int16),
    tl.float8e4nv: (torch.float8_e4m3fn, np.uint8, np.uint8, torch.uint8),
    tl.float8e5: (torch.float8_e5m2, np.uint8, np.uint8, torch.uint8),
}


def _widened(handle: Any) -> Any:
    """A handle of bf16 or fp8 as fp32, any other as it is."""
    if handle.dtype.scalar not in _NARROW:
        return handle
    dtype, _, container, _ = _NARROW[handle.dtype.scalar]
    bits = torch.from_numpy(np.ascontiguousarray(handle.data).view(container))
    return _Handle(bits.view(dtype).float().numpy(), tl.float32)


def _narrowed(data: np.ndarray, scalar: Any) -> Any:
    """fp32 numbers as bf16 or fp8 bits, rounded to nearest even."""
    dtype, bits, _, container = _NARROW[scalar]
    rounded = torch.from_numpy(np.ascontiguousarray(data, dtype=np.float32)).to(dtype)
    return _Handle(rounded.view(container).numpy().view(bits), scalar)


_cast, _fp_to_fp, _binary, _dot = (
    _Builder.cast_impl,
    _Builder.create_fp_to_fp,
    _Builder.binary_op,
    _Builder.create_dot,
)


def _exact_cast(self: Any, source: Any, target: Any) -> Any:
    if source.dtype.scalar == target.scalar:
        return source
    wide = _widened(source)
    if target.scalar in _NARROW:
        return _narrowed(wide.data, target.scalar)
    return wide if target.scalar == tl.float32 == wide.dtype.scalar else _cast(self, wide, target)


def _exact_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
    if source.dtype.scalar in _NARROW or target.scalar in _NARROW:
        return _exact_cast(self, source, target)
    return _fp_to_fp(self, source, target, rounding)


def _checked_binary(self: Any, left: Any, right: Any, op: Any) -> Any:
    if left.dtype.scalar in _NARROW:
        raise TypeError(f"{left.dtype.scalar} arithmetic: convert to fp32 first")
    return _binary(self, left, right, op)


def _wide_dot(self: Any, a: Any, b: Any, total: Any, precision: Any, imprecise: Any) -> Any:
    return _dot(self, _widened(a), _widened(b), total, precision, imprecise)


def _as_int1(compare: Callable[..., Any]) -> Callable[..., Any]:
    def compared(self: Any, left: Any, right: Any) -> Any:
        return _Handle(compare(self, left, right).data.astype(np.bool_), tl.int1)

    return compared


class _PatchesOnce:
    """Within one launch the language is patched once, not at every nested call."""

    def __init__(self) -> None:
        self._patch = interpreter._patch_lang
        self._patched: set[int] = set()

    def __call__(self, function: Any) -> Any:
        modules = {id(v) for v in function.__globals__.values() if inspect.ismodule(v)}
        modules &= {id(tl), id(tl.core)}
        if modules and modules <= self._patched:
            return interpreter._LangPatchScope()  # nothing to restore
        self._patched |= modules
        self._scope = self._patch(function)
        return self

    def restore(self) -> None:
        self._patched.clear()
        self._scope.restore()


class _Watch:
    """The address ranges of a launch's tensors, and what each of its programs wrote."""

    def __init__(self) -> None:
        self.starts = self.ends = np.empty(0, dtype=np.uint64)
        self.written: dict[tuple[int, int, int], list[np.ndarray]] = {}
        self.also: list[torch.Tensor] = []

    def begin(self, arguments: list[Any]) -> None:
        tensors = [t for t in (*arguments, *self.also) if isinstance(t, torch.Tensor)]
        ranges = sorted((t.data_ptr(), t.data_ptr() + _span(t)) for t in tensors)
        self.starts, self.ends = np.array(ranges, dtype=np.uint64).reshape(-1, 2).T
        self.ends = np.maximum.accumulate(self.ends) if len(ranges) else self.ends
        self.written = {}

    def check(self, what: str, pointers: Any, mask: Any, program: tuple[int, int, int]) -> Any:
        """The addresses touched; raises where one is in no tensor."""
        size = interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
        addresses = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
        place = np.searchsorted(self.starts, addresses, side="right")
        ends = np.concatenate([np.zeros(1, dtype=np.uint64), self.ends])[place]
        if (outside := addresses + np.uint64(size) > ends).any():
            raise IndexError(f"{what} of {outside.sum()} elements outside all tensors: {program}")
        return addresses

    def end(self) -> None:
        each = [np.unique(np.concatenate(parts)) for parts in self.written.values()]
        if each and len(np.unique(every := np.concatenate(each))) != len(every):
            raise RuntimeError("two programs of one launch write to the same address")


def _span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to its last, strides included."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


_watch = _Watch()


@contextmanager
def reachable(tensors: list[torch.Tensor]) -> Iterator[None]:
    """Inside, launches may also touch these, whose addresses they get as numbers."""
    _watch.also = tensors
    yield
    _watch.also = []


_load, _store, _launch = (
    _Builder.create_masked_load,
    _Builder.create_masked_store,
    interpreter.GridExecutor.__call__,
)


def _watched_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
    _watch.check("load", pointers, mask, self.grid_idx)
    return _load(self, pointers, mask, *rest)


def _watched_store(self: Any, pointers: Any, value: Any, mask: Any, policy: Any) -> Any:
    addresses = _watch.check("store", pointers, mask, self.grid_idx)
    _watch.written.setdefault(self.grid_idx, []).append(addresses.reshape(-1))
    return _store(self, pointers, value, mask, policy)


def _watched_launch(self: Any, *args: Any, **kwargs: Any) -> None:
    _watch.begin([*args, *kwargs.values()])
    with np.errstate(all="ignore"):  # infinities come and go, as on a device
        _launch(self, *args, **kwargs)
    _watch.end()


if INTERPRETING and WHY_NOT_CPU is None:
    interpreter._patch_lang = _PatchesOnce()
    interpreter.GridExecutor.__call__ = _watched_launch
    _Builder.create_masked_load, _Builder.create_masked_store = _watched_load, _watched_store
    _Builder.cast_impl, _Builder.create_fp_to_fp = _exact_cast, _exact_fp_to_fp
    _Builder.binary_op, _Builder.create_dot = _checked_binary, _wide_dot
    for _name in dir(_Builder):
        if _name.startswith(("create_icmp", "create_fcmp")):
            setattr(_Builder, _name, _as_int1(getattr(_Builder, _name)))

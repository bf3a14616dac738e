"""Memory in 2 MiB pages where the system gives them: for weights and KV.

A step reads every weight once, so with 4 KiB pages the processor walks page tables all the time: a
step of the demo model in int8 took 1.9 to 2.7 times as long from a mapped file (1 to 16 rows, both
in one process, interleaved, 2 threads, AMX). A mapped file cannot have such pages, so weights are
copied out of it once.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Mapping
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_HUGE = 2 << 20
_ALIGNMENT = 64  # bytes, of each tensor


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Like torch.zeros; memory that is never touched is never taken."""
    nbytes = prod(shape) * dtype.itemsize
    return _arena(nbytes)[:nbytes].view(dtype).view(shape)


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same contents, dtypes and shapes, contiguous, in one piece of memory."""
    offsets, total = {}, 0
    for name, tensor in tensors.items():
        offsets[name] = total
        total += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    arena = _arena(total)
    copies = {}
    for name, tensor in tensors.items():
        place = arena[offsets[name] : offsets[name] + tensor.nbytes]
        copies[name] = place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return copies


class Recycled:
    """Float32 memory for results that live for a step: used again once nobody holds a part of it.

    A fresh allocation of this size is cleared page by page by the system at every use: 16 rows of
    49,152 logits took 1.5 to 3 ms of a 12 ms step.
    """

    def __init__(self) -> None:
        self._arrays: list[NDArray[np.float32]] = []

    def empty(self, num_rows: int, width: int) -> Tensor:
        """[num_rows, width] fp32 of any content. Views of it keep it from being used again."""
        size = num_rows * width
        for array in self._arrays:
            # The list, the loop and the call hold one reference each; every view holds one, too.
            if array.size >= size and sys.getrefcount(array) == 3:
                break
        else:
            array = _arena(size * 4).view(torch.float32).numpy()
            smaller = [a for a in self._arrays if a.size >= size or sys.getrefcount(a) > 3]
            self._arrays = [*smaller, array]
        return torch.from_numpy(array[:size]).view(num_rows, width)


def _arena(nbytes: int) -> Tensor:
    """[nbytes] uint8 zeros, at the beginning of a huge page."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(nbytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive
    skip = -whole.data_ptr() % _HUGE
    return whole[skip : skip + nbytes]

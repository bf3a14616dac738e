"""Named arrays that go to the device together: one buffer here, one there, one copy per step.

    host  [ input_ids | positions | ... ]  --send-->  device [ input_ids | positions | ... ]

The device's addresses never change, so that a CUDA graph may read them. Each array begins at a
multiple of 16 bytes: kernels are compiled for that, and would be compiled again without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT: Final = 16
_NUMPY: Final[dict[torch.dtype, type[np.generic]]] = {
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
    torch.float64: np.float64,
}
Fields = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class Staged:
    """host: arrays to fill; tensors: the same on the device, as of the last `send`."""

    def __init__(self, fields: Fields, device: torch.device) -> None:
        offsets, total = {}, 0
        for name, (dtype, shape) in fields.items():
            offsets[name] = total
            # Something to point at, even where there is nothing.
            num_bytes = max(1, math.prod(shape)) * dtype.itemsize
            total += -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        pinned = device.type == "cuda"  # a copy from pageable memory would wait for the device
        self._host = torch.zeros(total, dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.zeros(total, dtype=torch.uint8, device=device)
        self.host: dict[str, NDArray[Any]] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, (dtype, shape) in fields.items():
            end = offsets[name] + math.prod(shape) * dtype.itemsize
            part = slice(offsets[name], end)
            self.host[name] = self._host[part].numpy().view(_NUMPY[dtype]).reshape(shape)
            self.tensors[name] = self._device[part].view(dtype).view(shape)

    def send(self) -> None:
        """Queues the copy. The host's arrays may change once the device has been waited for."""
        self._device.copy_(self._host, non_blocking=True)

"""A step that a CUDA graph replays; anywhere else it is simply called.

Nothing of the graph itself has ever run: there was no device (kernels/MEASURED.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar

import torch

Out = TypeVar("Out")


class GraphedStep(Generic[Out]):
    """Runs `step` once as it is, which compiles its kernels, records it the next time, and from
    then on replays what was recorded: no call does the work twice.

    step: launches kernels on buffers that stay where they are, waits for nothing, and returns
          tensors that later calls overwrite
    """

    def __init__(self, step: Callable[[], Out], device: torch.device) -> None:
        self._step = step
        self._has_graphs = device.type == "cuda"
        self._has_run = False
        self._recorded: tuple[torch.cuda.CUDAGraph, Out] | None = None

    def __call__(self) -> Out:
        if not self._has_graphs or not self._has_run:
            self._has_run = True
            return self._step()
        if self._recorded is None:
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the device meanwhile: the event loop's never do, tests' might.
            with torch.cuda.graph(graph, pool=_shared_pool(), capture_error_mode="thread_local"):
                out = self._step()
            self._recorded = graph, out
        graph, out = self._recorded
        graph.replay()
        return out


@cache
def _shared_pool() -> Any:  # a type of torch's own, which nobody looks into
    """Steps follow one another, so that all graphs may use the same memory for what they hold."""
    return torch.cuda.graph_pool_handle()

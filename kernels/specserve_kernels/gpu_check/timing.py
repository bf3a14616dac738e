"""Times on a CUDA device: medians of replayed graphs, over data that no cache holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch


def median_microseconds(calls: Seq[Callable[[], object]], *, rounds: int = 15) -> float:
    """Of one call: `calls` in turn, captured as one graph, which is replayed `rounds` times.

    Several calls over different data keep what one has read out of the next one's cache.
    """
    for call in calls:  # compiles, and fills what is filled once
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(rounds):
        begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e3 / len(calls))
    return statistics.median(times)


def copy_bytes_per_s(device: torch.device) -> float:
    """Read and written, of 2 GiB of random numbers."""
    source = torch.empty(2**29, device=device).normal_()
    target = torch.empty_like(source)
    microseconds = median_microseconds([lambda: target.copy_(source)])
    return 2 * source.numel() * source.element_size() / microseconds * 1e6

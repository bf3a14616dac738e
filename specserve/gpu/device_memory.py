"""How much of a GPU the KV pool may have: what was asked for, less all that is there already.

What asks the device has never run (kernels/MEASURED.md); the arithmetic is `memory.py`'s and here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from specserve.errors import ConfigError
from specserve.memory import GIB, MIB


def budget_of(*, total: int, free: int, own: int, utilization: float) -> int:
    """Bytes that this process may fill: weights, steps and KV pool together.

    total, free: of the device; own: what this process's allocator holds already
    utilization: above 0, at most 1, of `total`; what others hold counts, too
    ConfigError where others leave nothing
    """
    others = max(0, total - free - own)
    budget = int(utilization * total) - others
    if budget <= own:
        raise ConfigError(
            f"the GPU has {total / GIB:.1f} GiB, of which others hold {others / GIB:.1f} and the "
            f"weights {own / MIB:.0f} MiB: --gpu-memory-utilization {utilization:g} leaves nothing "
            "for the KV pool; raise it, or free the GPU"
        )
    return budget


def device_budget(utilization: float) -> int:
    """`budget_of` of the current CUDA device, once the weights are there."""
    free, total = torch.cuda.mem_get_info()
    return budget_of(
        total=total, free=free, own=torch.cuda.memory_reserved(), utilization=utilization
    )


def peak_while(work: Callable[[], None]) -> int:
    """Bytes of the current CUDA device that the allocator holds at most while `work` runs, beyond
    what was in use before. ConfigError where it does not fit beside that."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    try:
        work()
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU has no room for the largest step beside the weights, {before / MIB:.0f} MiB "
            f"({error}): lower --max-num-batched-tokens, --max-num-seqs or --max-draft-tokens, "
            "choose a smaller model, or free the GPU"
        ) from error
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_reserved() - before
    torch.cuda.empty_cache()  # what the pool is about to take must not lie in the allocator's hands
    return peak

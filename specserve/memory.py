"""The memory arithmetic: how many KV blocks fit, said with its parts.

blocks = (memory budget - weights - peak activation) / (S x sum over models of bytes per token)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec

from specserve.errors import ConfigError

GIB = 2**30
MIB = 2**20


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """All sizes in bytes."""

    budget: int
    weights: int
    activation: int  # measured: growth of the process while one full step ran
    kv_bytes_per_token: int  # over all models that share the pool
    block_size: int
    num_blocks: int

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_size * self.kv_bytes_per_token

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def lines(self) -> list[str]:
        """For a person, at start."""
        per_block = self.block_size * self.kv_bytes_per_token
        return [
            f"memory budget {self.budget / GIB:.2f} GiB"
            f" - weights {self.weights / MIB:.0f} MiB"
            f" - peak activation {self.activation / MIB:.0f} MiB (measured)",
            f"KV pool {self.kv_bytes / MIB:.0f} MiB = {self.num_blocks} blocks"
            f" x {self.block_size} tokens x {self.kv_bytes_per_token:,} bytes per token"
            f" ({per_block / 1024:.0f} KiB per block), {self.num_tokens:,} tokens in all",
        ]


def physical_memory() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def give_back() -> None:
    """Return freed memory that the allocator kept to the system, where it can."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
    if trim is not None:
        trim(0)


def growth_while(work: Callable[[], None]) -> int:
    """Bytes by which the process's resident memory peaks above what it held before `work`.

    Linux lets the peak be reset; elsewhere only growth beyond the highest peak so far is seen.
    """
    status = Path("/proc/self/status")
    if not status.exists():  # not Linux
        before = _peak_so_far()
        work()
        return _peak_so_far() - before
    give_back()  # freed memory that the allocator kept would hide what the step needs of it
    with contextlib.suppress(OSError):  # sandboxes forbid it: then only a new highest peak shows
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak
    before = _kilobytes(status, "VmRSS")
    work()
    return max(0, _kilobytes(status, "VmHWM") - before) * 1024


def _kilobytes(status: Path, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
    return int(found.group(1)) if found else 0


def _peak_so_far() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def plan_memory(
    *,
    budget: int,
    weights: int,
    activation: int,
    kv_bytes_per_token: int,
    block_size: int,
    kv_limit: int,
) -> MemoryReport:
    """Blocks that fit the budget, at most kv_limit bytes; ConfigError when not one fits."""
    room = min(budget - weights - activation, kv_limit)
    num_blocks = room // (block_size * kv_bytes_per_token)
    if num_blocks < 1:
        raise ConfigError(
            f"no KV block fits: memory budget {budget / GIB:.2f} GiB, weights "
            f"{weights / MIB:.0f} MiB, activation {activation / MIB:.0f} MiB, one block "
            f"{block_size * kv_bytes_per_token / MIB:.2f} MiB: raise --memory-gb or "
            "--kv-cache-gb, on a GPU --gpu-memory-utilization"
        )
    return MemoryReport(
        budget=budget,
        weights=weights,
        activation=activation,
        kv_bytes_per_token=kv_bytes_per_token,
        block_size=block_size,
        num_blocks=num_blocks,
    )

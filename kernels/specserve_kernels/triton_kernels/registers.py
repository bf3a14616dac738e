"""Options of a launch that say how many registers a thread may have."""

from __future__ import annotations

import triton


def all_registers() -> dict[str, int]:
    """NVIDIA's assembler, unasked, spills some to fit one more program onto a processor."""
    if triton.knobs.runtime.interpret:
        return {}
    is_cuda = triton.runtime.driver.active.get_current_target().backend == "cuda"
    return {"maxnreg": 255} if is_cuda else {}

"""Triton kernels for GPUs: one file each, with the picture, the kernel and its launcher.

Importing this package needs neither triton nor a driver; importing a kernel's file needs triton.
`reference.py` says readably what each kernel computes, and is its oracle. A row's result never
depends on its batch mates: every tile and every split has a size that the model alone decides.

Without a GPU: the tests run each kernel in Triton's interpreter, and `aot.py` compiles each one for
real targets and reads registers, spills and shared memory out of the machine code.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

# Triton's default changes in 3.10, and bits with it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")


def why_not_triton() -> str | None:
    """Why no kernel of this package can be imported here; None where they can."""
    if find_spec("triton") is None:
        return "triton is not installed: pip install 'specserve[gpu]' (Linux only)"
    return None

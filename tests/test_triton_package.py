"""What can be imported where there is no triton, and no driver."""

from __future__ import annotations

import os
import subprocess
import sys

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import specserve_kernels
from specserve_kernels import triton_kernels
from specserve_kernels.triton_kernels import attention_rows, model_shapes, reference
print("imported")
"""
WITH_TRITON = """
import importlib, pkgutil, sys
from specserve_kernels import triton_kernels
if triton_kernels.why_not_triton() is None:
    for module in pkgutil.iter_modules(triton_kernels.__path__):
        importlib.import_module(f"specserve_kernels.triton_kernels.{module.name}")
    from triton.runtime.driver import driver
    assert driver._active is None and driver._default is None, "a driver was asked for"
print("imported")
"""


def run(program: str) -> str:
    compiling = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=compiling
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_package_and_its_references_need_no_triton() -> None:
    assert run(WITHOUT_TRITON) == "imported"


def test_importing_every_kernel_asks_for_no_driver() -> None:
    assert run(WITH_TRITON) == "imported"

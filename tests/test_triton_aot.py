"""Every Triton kernel compiles for real targets without a GPU, spills nothing, keeps its bounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
TARGETS = ("sm_80", "sm_90", "gfx942")
# Of about the same length each, so that test processes side by side end together.
GROUPS = ("attention", "cuts,edits,gemm,masks", "")


def compile_kernels(*arguments: str) -> dict[str, list[object]]:
    """In a process of its own: in this one kernels are interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "specserve_kernels.triton_kernels.aot", "--json", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.stdout, done.stderr
    report: dict[str, list[object]] = json.loads(done.stdout)
    return report


@pytest.mark.aot
@pytest.mark.timeout(1600)
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group or "the rest")
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_within_its_bounds_and_without_spills(
    target: str, group: str
) -> None:
    from specserve_kernels.triton_kernels.aot import MODULES

    grouped = ",".join(GROUPS).split(",")
    rest = ",".join(module for module in MODULES if module not in grouped)
    report = compile_kernels("--targets", target, "--kernels", group or rest)
    assert report["problems"] == []
    assert report["rows"]


def test_one_kernel_compiles_within_its_bounds_in_every_run() -> None:
    """The rest is marked `aot`: compiling everything takes minutes."""
    report = compile_kernels("--targets", "sm_90", "--kernels", "norms")
    assert report["problems"] == []
    models = {model for row in report["rows"] for model in row["models"]}  # type: ignore[index]
    assert {"Llama-3-8B", "Qwen3-0.6B", "SmolLM2-135M", "TinyLlama-1.1B"} <= models


def test_spills_bounds_and_orders_of_sums_are_told_apart() -> None:
    from specserve_kernels.triton_kernels import aot

    good = aot.Resources("attention_kernel", "chain", ("A",), "sm_90", 99, 0, 9, 4, 3, ("sum",))
    assert aot.problems([good, replace(good, case="tree")]) == []
    for worse, complaint in [
        (replace(good, spill_bytes=8), "8 bytes of spills, 0 allowed"),
        (replace(good, registers=256), "256 registers, 255 allowed"),
        (replace(good, shared_bytes=99999), "99999 bytes of shared memory, 49152 allowed"),
        (replace(good, case="tree", orders=("other",)), "'tree' sums in the order"),
    ]:
        [problem] = aot.problems([good, worse])
        assert complaint in problem

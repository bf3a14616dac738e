"""Compiles kernels before they are needed, on all cores at once, into Triton's own cache.

One after another they would take minutes of a check that has eight. A process per kernel file calls
the launchers that `aot` calls, for the models that are measured; what is not found in the cache
afterwards is compiled where it is needed, as ever. That a GPU finds them there was never seen.
"""

from __future__ import annotations

import subprocess
import sys
import time

import torch

from specserve_kernels.triton_kernels import aot

MODELS = "Llama-3-8B,Qwen3-0.6B"
_SECONDS = 90.0


def compile_ahead(device: torch.device) -> list[str]:
    """What could not be compiled ahead, and why; nothing depends on it."""
    if device.type != "cuda":
        return []
    major, minor = torch.cuda.get_device_capability(device)
    target = f"sm_{major}{minor}"
    if target not in aot.TARGETS:
        return [f"compiling ahead: {target} is not among {', '.join(aot.TARGETS)}"]
    return compile_in_processes(target, aot.MODULES, MODELS, _SECONDS)


def compile_in_processes(
    target: str, kernels: tuple[str, ...], models: str, seconds: float
) -> list[str]:
    """kernels: files of triton_kernels; models: names of MODEL_SHAPES; the rest as above"""
    end = time.monotonic() + seconds
    command = [sys.executable, "-m", "specserve_kernels.triton_kernels.aot", "--compile-only"]
    running = {
        name: subprocess.Popen(  # noqa: S603 (our own module)
            [*command, "--targets", target, "--kernels", name, "--models", models],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in kernels
    }
    failed = []
    for name, process in running.items():
        try:
            _, errors = process.communicate(timeout=max(0.0, end - time.monotonic()))
            if process.returncode:
                failed.append(f"compiling {name} ahead: {errors.strip().splitlines()[-1:]}")
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            failed.append(f"compiling {name} ahead took over {seconds:.0f} s")
    return failed

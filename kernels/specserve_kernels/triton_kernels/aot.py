"""Compiles every kernel for real targets on a machine without a GPU, and reads what came out:

    python -m specserve_kernels.triton_kernels.aot --targets sm_90,gfx942 --kernels norms

Each kernel file's `aot_cases(shape)` calls its own launchers; a stand-in driver names the target,
and every launch inside becomes a compilation. So what is measured is what a GPU would run, chosen
by the launcher's own table. Registers and stack come from the machine code (stack > 0 is a spill),
not from estimates. `BOUNDS` holds what each kernel may use at most; `problems` compares.

A row's bits also rest on how the compiler spreads a product or a row's sum over threads, which it
decides for each binary alone. Kernels of ONE_ORDER must be laid out alike in all cases of a model:
the interpreter cannot show that a tree's row is not summed as a chain's is, but this can.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from specserve_kernels.triton_kernels.model_shapes import MODEL_SHAPES

COMMAND = "python -m specserve_kernels.triton_kernels.aot"
MODULES = (
    *("attention", "compaction", "cuts", "edits", "gemm", "masks", "norms", "reading"),
    *("rejection", "rope_kv", "sampling", "shares", "swiglu", "verification"),
)

MODELS = tuple(shape.name for shape in MODEL_SHAPES)


@dataclass(frozen=True)
class Target:
    """shared_bytes: what one program may have at most on that hardware."""

    backend: str
    arch: int | str
    warp_size: int
    shared_bytes: int
    has_fp8: bool


TARGETS = {
    "sm_80": Target("cuda", 80, 32, 166912, has_fp8=False),
    "sm_90": Target("cuda", 90, 32, 232448, has_fp8=True),
    "gfx942": Target("hip", "gfx942", 64, 65536, has_fp8=False),
}


@dataclass(frozen=True)
class Bound:
    """At most so many registers per thread and bytes of shared memory, for any model."""

    registers: int  # of 255 on NVIDIA
    shared_bytes: int
    vector_registers: int | None = None  # of 512 on AMD, where that is another number


BOUNDS = {
    "mask_kernel": Bound(64, 256),
    "law_kernel": Bound(160, 4096),
    "left_kernel": Bound(160, 4096),
    "judge_kernel": Bound(96, 4096),
    "last_kernel": Bound(200, 40960),
    "read_kernel": Bound(64, 256),
    "gemm_kernel": Bound(200, 65536),
    "add_splits_kernel": Bound(64, 256),
    "walk_kernel": Bound(64, 256),
    "cut_kernel": Bound(192, 32768),
    "edit_kernel": Bound(64, 256),
    "restore_kernel": Bound(64, 256),
    "race_kernel": Bound(160, 32768),
    "decide_kernel": Bound(128, 256),
    "share_kernel": Bound(128, 8192),
    "score_kernel": Bound(96, 256),
    "attention_kernel": Bound(255, 49152, vector_registers=320),
    "compaction_kernel": Bound(40, 0),
    "merge_kernel": Bound(72, 0),
    "rms_norm_kernel": Bound(40, 64),
    "rope_kv_kernel": Bound(128, 0),
    "swiglu_kernel": Bound(40, 0),
}


ONE_ORDER = ("attention_kernel",)


@dataclass(frozen=True)
class Resources:
    """One compiled kernel. spill_bytes: stack per thread, which only spills use.

    orders: the layouts over threads in which it multiplies matrices and reduces fp32 rows.
    """

    kernel: str
    case: str
    models: tuple[str, ...]
    target: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    num_warps: int
    num_stages: int
    orders: tuple[str, ...]


class _StandInDriver:
    """What a launch asks of a driver before it compiles; nothing ever runs."""

    def __init__(self, name: str) -> None:
        target = TARGETS[name]
        self._name = name
        self._target = GPUTarget(target.backend, target.arch, target.warp_size)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> str:
        return self._name  # the key of a kernel's compilations: one cache per target

    def get_current_stream(self, device: str) -> int:
        return 0


@contextmanager
def _compiling_for(target: str) -> Iterator[list[Any]]:
    """Inside, launches compile for `target` instead; yields the compiled kernels as they come."""
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return compiled[-1]

    driver.set_active(_StandInDriver(target))
    with patch.object(JITFunction, "run", compile_only):
        yield compiled


def compile_cases(
    targets: Iterable[str], modules: Iterable[str], models: Collection[str]
) -> Iterator[tuple[Any, str, str, str]]:
    """(binary, case, model, target) of every launch in every case of the models' shapes."""
    shapes = [shape for shape in MODEL_SHAPES if shape.name in models]
    for target in targets:
        for module in modules:
            cases = import_module(f"specserve_kernels.triton_kernels.{module}").aot_cases
            for shape in shapes:
                for case in cases(shape):
                    if case.has_fp8 and not TARGETS[target].has_fp8:
                        continue
                    with _compiling_for(target) as compiled:
                        case.call()
                    for binary in compiled:
                        yield binary, case.name, shape.name, target


def measure(
    targets: Iterable[str], modules: Iterable[str], models: Collection[str] = MODELS
) -> list[Resources]:
    """Every case of every model's shape, compiled; shapes that share a binary share a row."""
    found: dict[tuple[int, str, str], tuple[Any, str, list[str]]] = {}
    for binary, case, model, target in compile_cases(targets, modules, models):
        key = (id(binary), case, target)
        found.setdefault(key, (binary, case, []))[2].append(model)
    return [
        _resources(binary, case, tuple(models), target)
        for (_, _, target), (binary, case, models) in found.items()
    ]


def _resources(binary: Any, case: str, models: tuple[str, ...], target: str) -> Resources:
    read = _read_cubin if TARGETS[target].backend == "cuda" else _read_amdgcn
    registers, spill_bytes = read(binary)
    return Resources(
        kernel=binary.metadata.name,
        case=case,
        models=tuple(dict.fromkeys(models)),
        target=target,
        registers=registers,
        spill_bytes=spill_bytes,
        shared_bytes=binary.metadata.shared,
        num_warps=binary.metadata.num_warps,
        num_stages=binary.metadata.num_stages,
        orders=_orders(binary.asm["ttgir"]),
    )


def _orders(ttgir: str) -> tuple[str, ...]:
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    products = re.findall(r"(tt\.dot|warp_group_dot)\b.*-> tensor<(\S+), (#\w+)>", ttgir)
    sums = re.findall(r'"(tt\.reduce)"(?:.*\n)*?.*\}\) : \(tensor<(\S+), (#\w+)>', ttgir)
    return tuple(
        sorted(
            {
                f"{operation} {shape} {layouts[layout]}"
                for operation, shape, layout in products + sums
                if shape.endswith("f32")
            }
        )
    )


def _read_cubin(binary: Any) -> tuple[int, int]:
    """(registers, stack bytes) per thread, as the assembler wrote them into the cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run(  # noqa: S603 (Triton's own tool, on our own bytes)
            [str(tool), "-res-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    usage = {key: int(value) for key, value in re.findall(r"\b([A-Z]+):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def _read_amdgcn(binary: Any) -> tuple[int, int]:
    """(vector registers, private bytes) per thread, from the kernel's own metadata."""
    text = binary.asm["amdgcn"]
    values = {
        name: int(found[1])
        for name in ("vgpr_count", "agpr_count", "private_segment_fixed_size")
        if (found := re.search(rf"\.{name}:\s+(\d+)", text))
    }
    return values["vgpr_count"], values["private_segment_fixed_size"]


def problems(rows: Iterable[Resources]) -> list[str]:
    """One sentence for each kernel that spills, is over its bound, or sums in several orders."""
    found = []
    first: dict[tuple[str, str, str], Resources] = {}
    for row in rows:
        bound, target = BOUNDS[row.kernel], TARGETS[row.target]
        registers = bound.registers
        if target.backend == "hip" and bound.vector_registers is not None:
            registers = bound.vector_registers
        checks: tuple[tuple[str, int, int], ...] = (
            ("bytes of spills", row.spill_bytes, 0),
            ("registers", row.registers, registers),
            ("bytes of shared memory", row.shared_bytes, bound.shared_bytes),
            ("bytes of shared memory", row.shared_bytes, target.shared_bytes),
        )
        found += [
            f"{row.kernel} ({row.case}, {row.target}, {row.models[0]}): "
            f"{value} {what}, {limit} allowed"
            for what, value, limit in checks
            if value > limit
        ]
        for model in row.models if row.kernel in ONE_ORDER else ():
            other = first.setdefault((row.kernel, row.target, model), row)
            if row.orders != other.orders:
                found.append(
                    f"{row.kernel} ({row.target}, {model}): {row.case!r} sums in the order "
                    f"{row.orders}, {other.case!r} in {other.orders}"
                )
    return found


def table(rows: Iterable[Resources]) -> str:
    """Markdown: what each kernel takes on each target; models that take the same share a row."""
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for row in rows:
        for model in row.models:
            cells.setdefault((row.kernel, row.case, model), {})[row.target] = (
                f"{row.registers} / {row.spill_bytes} / {row.shared_bytes} / {row.num_warps}"
            )
    targets = list(dict.fromkeys(target for cell in cells.values() for target in cell))
    merged: dict[tuple[str, ...], list[str]] = {}
    for (kernel, case, model), cell in cells.items():
        key = (kernel, case, *(cell.get(target, "-") for target in targets))
        merged.setdefault(key, []).append(model)
    lines = [
        "Registers / spilled bytes per thread / shared bytes / warps of each program:\n",
        f"| kernel | case | {' | '.join(targets)} | models |",
        "|---|---|" + "---|" * (len(targets) + 1),
    ]
    lines += [f"| {' | '.join(key)} | {', '.join(models)} |" for key, models in merged.items()]
    return "\n".join(lines)


def main(arguments: list[str], write: Callable[[str], object] = print) -> int:
    """Writes the table (or JSON) and what is over its bound; 1 where anything is."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="What the kernels compile to.")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--kernels", default=",".join(MODULES), help="files of this folder")
    parser.add_argument("--models", default=",".join(MODELS), help="of model_shapes.py")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--compile-only", action="store_true", help="fills Triton's cache")
    options = parser.parse_args(arguments)
    parts = options.targets.split(","), options.kernels.split(","), options.models.split(",")
    if unknown := set(parts[2]) - set(MODELS):
        parser.error(f"{', '.join(sorted(unknown))}: no such model, choose from {MODELS}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        parser.error("TRITON_INTERPRET=1 is set: interpreted kernels cannot be compiled, unset it")
    if options.compile_only:
        write(f"{sum(1 for _ in compile_cases(*parts))} launches compiled")
        return 0
    rows = measure(*parts)
    found = problems(rows)
    if options.json:
        write(json.dumps({"rows": [asdict(row) for row in rows], "problems": found}))
    else:
        write(f"triton {triton.__version__}\n\n{table(rows)}")
        for problem in found:
            write(problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Checks and measures the Triton kernels on a GPU; no network, a few minutes:

    python -m specserve_kernels.gpu_check [--json FILE] [--seconds N] [--parts correct,speed,step]

Writes a Markdown table, and JSON where asked; ends with 1 if anything is wrong or misses its goal.
Without a GPU it says so and ends with 2. Each part has its share of --seconds, and what earlier
ones leave; what does not fit is named as skipped. Kernels are compiled ahead, on all cores at once.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from specserve_kernels.gpu_check.report import (
    Correct,
    Report,
    Speed,
    Step,
    as_json,
    problems,
    table,
)
from specserve_kernels.triton_kernels import why_not_triton

if TYPE_CHECKING:
    from specserve_kernels.gpu_check.correctness import Check, Sizes
    from specserve_kernels.gpu_check.speeds import Scale
    from specserve_kernels.gpu_check.steps import Plan

COMMAND = "python -m specserve_kernels.gpu_check"
PARTS = {"correct": 0.45, "speed": 0.3, "step": 0.25}  # and their shares of the time
Found = TypeVar("Found", Correct, Speed, Step)


def why_not() -> str | None:
    """Why the kernels cannot be measured in this process; None where they can."""
    if (reason := why_not_triton()) is not None:
        return reason
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set: kernels would be interpreted, unset it"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU on this machine"
    return None


@dataclass(frozen=True)
class Extent:
    """How much is checked and measured; tests rehearse with less."""

    sizes: Sizes
    scale: Scale
    plan: Plan
    device: torch.device


class _Collector:
    """Runs parts while there is time; a kernel that raises does not hide what others do."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self.skipped: list[str] = []
        self.failures: list[str] = []

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def results(self, name: str, work: Iterator[Found], limit: float) -> list[Found]:
        """limit: seconds since the beginning after which no new result is begun"""
        found: list[Found] = []
        try:
            while self.seconds < limit:
                if (result := next(work, None)) is None:
                    return found
                found.append(result)
            self.skipped.append(f"{name} after {len(found)} results: {limit:.0f} s are over")
        except Exception as error:
            self.failures.append(f"{name} raised {type(error).__name__}: {error}")
        return found


def limits(parts: Collection[str], seconds: float) -> dict[str, float]:
    """By part: seconds since the beginning after which it begins nothing new."""
    wanted = [part for part in PARTS if part in parts]
    whole, until = sum(PARTS[part] for part in wanted), 0.0
    found = {}
    for part in wanted:
        until += PARTS[part] / whole * seconds
        found[part] = until
    return found


def run(
    parts: Collection[str],
    seconds: float,
    command: str,
    more: Mapping[str, Check],
    extent: Extent,
) -> Report:
    """The wanted parts, as far as the time goes.

    more: checks of who uses the kernels; they come first, being of everything at once
    """
    import triton

    from specserve_kernels.gpu_check import decoder, speeds, steps, timing
    from specserve_kernels.gpu_check.compiling import compile_ahead
    from specserve_kernels.gpu_check.correctness import CHECKS
    from specserve_kernels.gpu_check.paged import PAGED_CHECKS

    collector, device = _Collector(), extent.device
    ahead = compile_ahead(device)
    copied = timing.copy_bytes_per_s(device)
    until = limits(parts, seconds)
    correct: list[Correct] = []
    measured: list[Speed] = []
    times: list[Step] = []
    if "correct" in until:
        checks = {**more, **CHECKS, **PAGED_CHECKS, "step": decoder.check_replay}
        for name, check in checks.items():
            work = check(extent.sizes, device)
            correct += collector.results(name, work, until["correct"])
    if "speed" in until:
        for measure in speeds.SPEEDS:
            work_of_speed = measure(extent.scale, device)
            measured += collector.results(measure.__name__, work_of_speed, until["speed"])
    if "step" in until:
        steps_of_plan = steps.step_times(extent.plan, device, copied)
        times = collector.results("steps", steps_of_plan, until["step"])
    return Report(
        device=torch.cuda.get_device_name(),
        versions={
            "torch": torch.__version__,
            "triton": triton.__version__,
            "CUDA": str(torch.version.cuda),
            "Python": platform.python_version(),
        },
        command=command,
        copy_gb_per_s=copied / 1e9,
        seconds=collector.seconds,
        correct=correct,
        speeds=measured,
        steps=times,
        skipped=[*ahead, *collector.skipped],
        failures=collector.failures,
    )


def _whole() -> Extent:
    from specserve_kernels.gpu_check import correctness, speeds, steps

    return Extent(correctness.FULL, speeds.FULL, steps.FULL, torch.device("cuda"))


def main(
    arguments: list[str],
    write: Callable[[str], object] = print,
    *,
    more: Mapping[str, Check] | None = None,
    command: str = COMMAND,
    extent: Extent | None = None,
) -> int:
    """extent: how much; None: all that a GPU is to be asked"""
    parser = argparse.ArgumentParser(prog=command, description="The kernels on this GPU.")
    parser.add_argument("--json", type=Path, help="write all numbers there")
    parser.add_argument("--seconds", type=float, default=420.0)
    parser.add_argument("--parts", default=",".join(PARTS))
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"{', '.join(sorted(unknown))}: no such part, choose from {', '.join(PARTS)}")
    if (reason := why_not()) is not None:
        write(f"the kernels cannot be checked on a GPU here: {reason}")
        return 2
    said = " ".join([command, *arguments])
    report = run(parts, options.seconds, said, more or {}, extent or _whole())
    if options.json is not None:
        options.json.write_text(as_json(report))
    write(table(report))
    return 1 if problems(report) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Checks and measures the Triton kernels on a GPU; no network, a few minutes:

    python -m specserve_kernels.gpu_check [--json FILE] [--seconds N] [--parts correct,speed,step]

Writes a Markdown table, and JSON where asked; ends with 1 if anything is wrong or misses its goal.
Without a GPU it says so and ends with 2. What does not fit into --seconds is named as skipped.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
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
    from specserve_kernels.gpu_check.correctness import Check

COMMAND = "python -m specserve_kernels.gpu_check"
PARTS = ("correct", "speed", "step")
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


class _Collector:
    """Runs parts while there is time; a kernel that raises does not hide what others do."""

    def __init__(self, seconds: float) -> None:
        self._begin, self._limit = time.monotonic(), seconds
        self.skipped: list[str] = []
        self.failures: list[str] = []

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begin

    def results(self, name: str, work: Iterator[Found]) -> list[Found]:
        found: list[Found] = []
        try:
            while self.seconds < self._limit:
                if (result := next(work, None)) is None:
                    return found
                found.append(result)
            self.skipped.append(f"{name} after {len(found)} results: {self._limit:.0f} s are over")
        except Exception as error:
            self.failures.append(f"{name} raised {type(error).__name__}: {error}")
        return found


def run(parts: Collection[str], seconds: float, command: str, more: Mapping[str, Check]) -> Report:
    """The wanted parts on the current CUDA device, as far as the time goes.

    more: checks of who uses the kernels; they come first, being of everything at once
    """
    import triton

    from specserve_kernels.gpu_check import decoder, speeds, steps, timing
    from specserve_kernels.gpu_check.correctness import CHECKS, FULL
    from specserve_kernels.gpu_check.paged import PAGED_CHECKS

    collector, device = _Collector(seconds), torch.device("cuda")
    copied = timing.copy_bytes_per_s(device)
    checks = {**more, **CHECKS, **PAGED_CHECKS, "step": decoder.check_replay}
    correct = [
        result
        for name, check in checks.items()
        if "correct" in parts
        for result in collector.results(name, check(FULL, device))
    ]
    measured = [
        result
        for measure in speeds.SPEEDS
        if "speed" in parts
        for result in collector.results(measure.__name__, measure(speeds.FULL, device))
    ]
    times = steps.step_times(steps.FULL, device, copied) if "step" in parts else iter(())
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
        correct=correct,
        speeds=measured,
        steps=collector.results("steps", times),
        seconds=collector.seconds,
        skipped=collector.skipped,
        failures=collector.failures,
    )


def main(
    arguments: list[str],
    write: Callable[[str], object] = print,
    *,
    more: Mapping[str, Check] | None = None,
    command: str = COMMAND,
) -> int:
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
    report = run(parts, options.seconds, " ".join([command, *arguments]), more or {})
    if options.json is not None:
        options.json.write_text(as_json(report))
    write(table(report))
    return 1 if problems(report) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

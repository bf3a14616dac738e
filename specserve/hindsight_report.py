"""`specserve study regret FILE`: what `serve --record-steps FILE` wrote, looked back upon.

How much more the best B in hindsight would have given (speculation/hindsight.py), and whether what
was believed of guesses was what happened to them.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Final

import msgspec

from specserve.errors import ConfigError, SpecserveError
from specserve.speculation.hindsight import (
    Bin,
    Hindsight,
    RecordedStep,
    calibration_error,
    calibration_pairs,
    look_back,
    reliability,
)
from specserve.speculation.recording import read_steps

MOST_REGRET: Final = 0.03
MOST_ERROR: Final = 0.02  # expected calibration error
_SCHEMA: Final = "specserve.study.regret/1"


class RegretReport(msgspec.Struct, frozen=True, kw_only=True):
    """calibration_error: of survival, over all proposed guesses behind the warm-up

    by_drafter: the same, of each drafter's proposals alone
    """

    schema: str = _SCHEMA
    file: str
    num_steps: int
    warm_up: int
    num_guesses: int
    hindsight: Hindsight
    calibration_error: float
    by_drafter: dict[str, float]
    bins: tuple[Bin, ...]

    @property
    def holds(self) -> bool:
        return self.hindsight.regret <= MOST_REGRET and self.calibration_error <= MOST_ERROR


def main(argv: Seq[str]) -> int:
    """Exit code 0: both goals hold. 1: one does not. 2: there is nothing to look back upon."""
    options = _parser().parse_args(argv)
    try:
        report = report_on(options.file, options.warm_up)
    except SpecserveError as error:
        print(f"specserve study regret: {error}", file=sys.stderr)
        return 2
    print(render(report))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return 0 if report.holds else 1


def report_on(path: Path, warm_up: int) -> RegretReport:
    """warm_up: steps at the beginning that are in no number. ConfigError says what is wrong."""
    steps = [step for step in read_steps(path) if not step.named][warm_up:]
    if not steps:
        raise ConfigError(
            f"{path} holds no step behind the first {warm_up} (--warm-up): serve more requests "
            "that leave speculation to the server, with a drafter loaded"
        )
    pairs = list(calibration_pairs(steps))
    return RegretReport(
        file=str(path),
        num_steps=len(steps),
        warm_up=warm_up,
        num_guesses=len(pairs),
        hindsight=look_back(steps),
        calibration_error=calibration_error(pairs),
        by_drafter=_by_drafter(steps),
        bins=tuple(reliability(pairs)),
    )


def _by_drafter(steps: Seq[RecordedStep]) -> dict[str, float]:
    pairs: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    for step in steps:
        for row in step.rows:
            pairs[row.drafter] += zip(row.chances, row.right, strict=True)
    return {name: calibration_error(of_it) for name, of_it in sorted(pairs.items()) if of_it}


def render(report: RegretReport) -> str:
    look = report.hindsight
    lines = [
        f"{report.num_steps} steps behind {report.warm_up} of warm-up, "
        f"{report.num_guesses} guesses",
        "",
        "   rows   steps  guesses/step  off tok/s  chosen  best in hindsight        regret",
    ]
    for one in look.classes:
        rows = f"{one.least_rows}-{one.most_rows}" if one.most_rows > 1 else "1"
        lines.append(
            f"{rows:>7} {one.num_steps:>7} {one.num_guesses / one.num_steps:>13.2f} "
            f"{one.without:>10.1f} {one.chosen:>7.1f} "
            f"{one.best:>7.1f} ({one.best_policy:<17}) {one.regret:>7.2%}"
        )
    lines += [
        "",
        "believed  observed  guesses",
        *(f"{one.believed:>8.3f} {one.observed:>9.3f} {one.num_guesses:>8}" for one in report.bins),
        "",
        f"regret {look.regret:.2%} of the time (goal: at most {MOST_REGRET:.0%})",
        f"calibration error of survival {report.calibration_error:.2%} (goal: at most "
        f"{MOST_ERROR:.0%}); "
        + ", ".join(f"{name} {error:.2%}" for name, error in report.by_drafter.items()),
    ]
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specserve study regret",
        description="Looks back upon the steps that `serve --record-steps FILE` wrote.",
        epilog="exit code: 0 both goals hold, 1 one does not, 2 nothing could be read",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--warm-up", type=int, default=200, metavar="N", help="steps left out; default: 200"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    return parser

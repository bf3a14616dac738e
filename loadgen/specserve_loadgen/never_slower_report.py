"""The never-slower study in words: a line per cell for a person who waits, and the table."""

from __future__ import annotations

import statistics

from specserve_loadgen.never_slower import AUTO, AUTO_OVER_BEST, AUTO_OVER_OFF, OFF, Cell, Study
from specserve_loadgen.render import MISSING, table


def describe(cell: Cell) -> str:
    """One line for a person who waits."""
    verdict = "holds" if cell.holds else "FALLS SHORT"
    doubt = "" if cell.is_sure else ", not sure"
    return (
        f"{cell.workload:>10} c{cell.concurrency:<3} "
        f"auto/off {cell.auto_over_off:.3f} {_spread(cell.auto_over_off_interval)} "
        f"auto/best {cell.auto_over_best_fixed:.3f} {_spread(cell.auto_over_best_fixed_interval)} "
        f"(best: {cell.best_fixed}; {len(cell.arms[0].tokens_per_second)} rounds)  "
        f"{verdict}{doubt}"
    )


def _spread(interval: tuple[float, float] | None) -> str:
    return f"[{MISSING}]" if interval is None else f"[{interval[0]:.2f}, {interval[1]:.2f}]"


def render_study(study: Study) -> str:
    rows = [
        ["workload", "c", "off tok/s", "auto tok/s", "auto/off", "auto/best", "best", "tok/step"]
    ]
    for cell in study.cells:
        by_name = {arm.arm: arm for arm in cell.arms}
        auto, off = by_name[AUTO.name], by_name[OFF.name]
        length = auto.mean_acceptance_length
        rows.append(
            [
                cell.workload,
                str(cell.concurrency),
                f"{statistics.median(off.tokens_per_second):.1f}",
                f"{statistics.median(auto.tokens_per_second):.1f}",
                f"{cell.auto_over_off:.3f} {_spread(cell.auto_over_off_interval)}",
                f"{cell.auto_over_best_fixed:.3f} {_spread(cell.auto_over_best_fixed_interval)}",
                cell.best_fixed,
                MISSING if length is None else f"{length:.2f}",
            ]
        )
    wanted = f"auto/off >= {AUTO_OVER_OFF} and auto/best >= {AUTO_OVER_BEST}"
    num_holding = len(study.cells) - study.num_failing
    num_unsure = sum(not cell.is_sure for cell in study.cells)
    differing = sum(not cell.same_output_tokens for cell in study.cells)
    lines = [
        table(rows),
        f"{num_holding} of {len(study.cells)} cells hold ({wanted}); {study.seconds:.0f} s",
    ]
    if num_unsure:
        lines.append(f"{num_unsure} of them not for sure: an interval has its goal inside")
    if differing:
        lines.append(f"{differing} cells emitted different numbers of tokens under different arms")
    return "\n".join(lines)

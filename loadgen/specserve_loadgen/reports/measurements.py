"""Every number of a study as one row, for CSV and for comparing two files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Final

import msgspec

from specserve_loadgen.intervals import Interval
from specserve_loadgen.reports.document import MISSING, Table, number, with_interval

_LABELS: Final = (
    "arm", "temperature", "concurrency", "category", "context", "position", "run", "load",
)  # fmt: skip


class Measurement(msgspec.Struct, frozen=True):
    """labels: what it is of, among _LABELS; those that are missing: all of them together"""

    labels: dict[str, str]
    measure: str
    interval: Interval


def measured(labels: dict[str, str], values: dict[str, Interval | None]) -> list[Measurement]:
    """Those that were measured."""
    return [
        Measurement(labels, name, interval)
        for name, interval in values.items()
        if interval is not None
    ]


def to_csv(measurements: Sequence[Measurement]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*_LABELS, "measure", "estimate", "low_95", "high_95", "num_clusters"])
    for one in measurements:
        interval = one.interval
        bounds = ["" if v is None else repr(v) for v in (interval.low, interval.high)]
        labels = [one.labels.get(name, "") for name in _LABELS]
        writer.writerow(
            [*labels, one.measure, repr(interval.estimate), *bounds, interval.num_clusters]
        )
    return file.getvalue()


def compared(before: Sequence[Measurement], after: Sequence[Measurement]) -> Table:
    """What both files measured, and the second over the first."""
    known = {_key(one): one for one in before}
    rows = []
    for one in after:
        other = known.get(_key(one))
        if other is None:
            continue
        ratio = ratio_of(other.interval, one.interval)
        rows.append(
            (
                _name(one),
                one.measure,
                with_interval(other.interval, 4),
                with_interval(one.interval, 4),
                MISSING if ratio is None else with_interval(ratio, 3),
                _verdict(ratio),
            )
        )
    return Table(("of", "measure", "A", "B", "B / A", "differs"), tuple(rows))


def ratio_of(before: Interval, after: Interval) -> Interval | None:
    """after / before of two independent runs, from their intervals alone (Zou and Donner's MOVER,
    on logarithms). None where one is 0 or below."""
    if before.estimate <= 0 or after.estimate <= 0:
        return None
    ratio = math.log(after.estimate / before.estimate)
    count = min(before.num_clusters, after.num_clusters)
    down = _reach(after.estimate, after.low), _reach(before.estimate, before.high)
    up = _reach(after.estimate, after.high), _reach(before.estimate, before.low)
    if None in down or None in up:
        return Interval(math.exp(ratio), None, None, count)
    low = ratio - math.hypot(*(value for value in down if value is not None))
    high = ratio + math.hypot(*(value for value in up if value is not None))
    return Interval(math.exp(ratio), math.exp(low), math.exp(high), count)


def _reach(estimate: float, bound: float | None) -> float | None:
    return None if bound is None or bound <= 0 else abs(math.log(bound / estimate))


def _verdict(ratio: Interval | None) -> str:
    if ratio is None or ratio.low is None or ratio.high is None:
        return MISSING
    if ratio.low > 1 or ratio.high < 1:
        return f"yes ({number((ratio.estimate - 1) * 100, 1)} %)"
    return "not shown"


def _key(one: Measurement) -> tuple[object, ...]:
    return (one.measure, *sorted(one.labels.items()))


def _name(one: Measurement) -> str:
    shown = [f"{name} {one.labels[name]}" for name in _LABELS if name in one.labels]
    return ", ".join(shown) or "all"

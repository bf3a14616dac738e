"""What a report says, before it is a page or a terminal's text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from specserve_loadgen.intervals import Interval
from specserve_loadgen.report import Environment

MISSING = "–"


class Table(msgspec.Struct, frozen=True):
    """head: of the columns; the first column is a label, the others are numbers"""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class Figure(msgspec.Struct, frozen=True):
    """svg: inline, without anything from elsewhere; table: the same numbers, for who cannot see"""

    caption: str
    svg: str
    table: Table | None = None


class Section(msgspec.Struct, frozen=True):
    """text: what is shown and how to read it, for someone who never saw this before"""

    title: str
    text: str
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()


class Document(msgspec.Struct, frozen=True):
    """lead: the answer, in sentences; facts: settings and environment, (name, value)"""

    title: str
    lead: tuple[str, ...]
    sections: tuple[Section, ...]
    facts: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()


def number(value: float | None, digits: int = 2) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def with_interval(interval: Interval | None, digits: int = 2, scale: float = 1.0) -> str:
    """1.92 [1.85, 2.01], or the estimate and ± ? where there is no interval."""
    if interval is None:
        return MISSING
    shown = f"{interval.estimate * scale:.{digits}f}"
    if interval.low is None or interval.high is None:
        return f"{shown} [too few]"
    return f"{shown} [{interval.low * scale:.{digits}f}, {interval.high * scale:.{digits}f}]"


def share(interval: Interval | None) -> str:
    """In percent."""
    return MISSING if interval is None else with_interval(interval, 1, 100.0)


def milliseconds(interval: Interval | None, digits: int = 1) -> str:
    return with_interval(interval, digits, 1e3)


def users(concurrency: int) -> str:
    return "1 user" if concurrency == 1 else f"{concurrency} users"


def temperature_text(temperature: float | None) -> str:
    return "default" if temperature is None else f"{temperature:g}"


def environment_facts(environment: Environment) -> list[tuple[str, str]]:
    return [
        ("client", f"specserve_loadgen {environment.loadgen_version or 'unknown'}"),
        ("client's Python", environment.python),
        ("client's platform", f"{environment.platform}, {environment.num_cpus} CPUs"),
    ]


def joined(values: Sequence[object]) -> str:
    return ", ".join(str(value) for value in values)

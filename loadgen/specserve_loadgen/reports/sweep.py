"""The document of `loadgen --sweep`, and its numbers as rows."""

from __future__ import annotations

from specserve_loadgen.reports import svg
from specserve_loadgen.reports.document import (
    MISSING,
    Document,
    Figure,
    Section,
    Table,
    environment_facts,
    milliseconds,
    number,
    share,
    users,
    with_interval,
)
from specserve_loadgen.reports.measurements import Measurement, measured
from specserve_loadgen.reports.svg import Axes, Series, estimates
from specserve_loadgen.sweep import Sweep, SweepLevel


def sweep_document(sweep: Sweep) -> Document:
    names = tuple(str(level.users) for level in sweep.levels)
    head = [
        "users", "requests", "failed", "tokens/s", "per user", "TTFT p50 ms", "TTFT p99 ms",
        "ITL ms/token",
    ]  # fmt: skip
    if sweep.settings.slo is not None:
        head.append("good %")
    rows = tuple(_row(level)[: len(head)] for level in sweep.levels)
    table = Table(tuple(head), rows)
    figures = (
        Figure("Output tokens per second by users", _speeds(sweep, names), table),
        Figure("Time to the first token by users", _waits(sweep, names)),
    )
    text = (
        "Each user sends one request, waits for its end, and sends the next. Tokens per second are "
        "counted while every user was busy. A server is saturated where more users only wait "
        "longer: speed is flat, waiting climbs. p99: what 99 of 100 stay below. Intervals are "
        "95 %: of speeds from drawing ten slices of a level's time again, of the rest from drawing "
        "requests again."
    )
    return Document(
        title=f"How many users saturate {sweep.model}?",
        lead=(_lead(sweep),),
        sections=(Section("Users and speed", text, figures),),
        facts=(
            ("run", sweep.schema),
            ("server", f"{sweep.settings.url}, version {sweep.server_version or 'unknown'}"),
            ("prompts", sweep.settings.prompts_file or "the shipped pack"),
            ("most output tokens", str(sweep.settings.max_tokens)),
            ("most users", str(sweep.most_users)),
            *environment_facts(sweep.environment),
        ),
        notes=sweep.notes,
    )


def _lead(sweep: Sweep) -> str:
    best = max(sweep.levels, key=_speed)
    speed = f"{with_interval(best.tokens_per_second, 1)} output tokens per second"
    if sweep.saturated_at is None:
        why = "it was stopped" if sweep.interrupted else "that was the most that was tried"
        return f"Still rising with {users(best.users)}, at {speed}: {why}."
    return f"Saturated with {users(sweep.saturated_at)}: the most was {speed}."


def _speed(level: SweepLevel) -> float:
    return 0.0 if level.tokens_per_second is None else level.tokens_per_second.estimate


def _row(level: SweepLevel) -> tuple[str, ...]:
    return (
        str(level.users),
        str(level.num_requests),
        str(level.num_failed),
        with_interval(level.tokens_per_second, 1),
        number(_speed(level) / level.users, 1) if level.tokens_per_second else MISSING,
        milliseconds(level.ttft_p50),
        milliseconds(level.ttft_p99),
        milliseconds(level.itl, 2),
        share(level.good),
    )


def _speeds(sweep: Sweep, names: tuple[str, ...]) -> str:
    points = estimates(enumerate(level.tokens_per_second for level in sweep.levels))
    axes = Axes(x_label="users at once", y_label="output tokens per second", x_names=names)
    return svg.lines([Series("tokens/s", points, 0)], axes, "Output tokens per second by users")


def _waits(sweep: Sweep, names: tuple[str, ...]) -> str:
    series = []
    for style, (name, found) in enumerate(
        (
            ("p50", [level.ttft_p50 for level in sweep.levels]),
            ("p99", [level.ttft_p99 for level in sweep.levels]),
        )
    ):
        series.append(Series(name, estimates(enumerate(found)), style))
    axes = Axes(x_label="users at once", y_label="seconds", x_names=names)
    return svg.lines(series, axes, "Time to the first token by users")


def sweep_measurements(sweep: Sweep) -> list[Measurement]:
    rows: list[Measurement] = []
    for level in sweep.levels:
        values = {
            "output_tokens_per_second": level.tokens_per_second,
            "ttft_p50_seconds": level.ttft_p50,
            "ttft_p99_seconds": level.ttft_p99,
            "itl_seconds": level.itl,
            "good_share": level.good,
        }
        rows += measured({"concurrency": str(level.users)}, values)
    return rows

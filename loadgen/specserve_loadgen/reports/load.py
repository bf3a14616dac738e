"""The document of one `loadgen` run, and its numbers as rows."""

from __future__ import annotations

from collections.abc import Callable

from specserve_loadgen import latency
from specserve_loadgen.intervals import Interval, quantile_interval, ratio_interval
from specserve_loadgen.records import RequestRecord
from specserve_loadgen.report import Report
from specserve_loadgen.reports import svg
from specserve_loadgen.reports.document import (
    Document,
    Figure,
    Section,
    Table,
    environment_facts,
    milliseconds,
    number,
    share,
    with_interval,
)
from specserve_loadgen.reports.measurements import Measurement, measured
from specserve_loadgen.reports.svg import Axes, Series
from specserve_loadgen.studies.summary import Summary, by_category, summarise

LATENCIES: tuple[tuple[str, Callable[[RequestRecord], float | None]], ...] = (
    ("TTFT", latency.ttft),
    ("TTFT from schedule", latency.ttft_from_schedule),
    ("TPOT", latency.tpot),
    ("E2E", latency.e2e),
    ("E2E from schedule", latency.e2e_from_schedule),
)


def load_document(report: Report) -> Document:
    done = [r for r in report.requests if r.succeeded]
    summary = summarise(done)
    speed = report.throughput.output_tokens_per_second
    return Document(
        title=f"Load on {report.model}",
        lead=(
            f"{report.num_requests} requests in {report.throughput.seconds:.1f} s: "
            f"{report.num_succeeded} succeeded, {report.num_failed} failed, "
            f"{report.num_stopped} stopped.",
            f"{number(speed, 1)} output tokens per second (of one run: it has no interval).",
        ),
        sections=(_latencies(done), _speculation(done, summary)),
        facts=(
            ("run", report.schema),
            ("server", f"{report.settings.url}, version {report.server_version or 'unknown'}"),
            ("load", str(report.settings.load)),
            ("prompts", report.settings.prompts_file or "the shipped pack"),
            *environment_facts(report.environment),
        ),
        notes=(*report.warnings, *report.cross_check.disagreements),
    )


def _values(done: list[RequestRecord], name: str) -> list[float]:
    pick = dict(LATENCIES)[name]
    return [value for r in done if (value := pick(r)) is not None]


def _latencies(done: list[RequestRecord]) -> Section:
    rows, series = list[tuple[str, ...]](), list[Series]()
    for name, _ in LATENCIES:
        values = _values(done, name)
        if values:
            quantiles = (milliseconds(quantile_interval(values, q)) for q in (0.5, 0.9, 0.99))
            rows.append((name, str(len(values)), *quantiles))
        if positive := [value for value in values if value > 0]:
            series.append(Series(name, svg.ecdf(positive), len(series)))
    axes = Axes(x_label="seconds", y_label="share of requests", x_is_log=True, y_range=(0, 1))
    head = ("ms", "requests", "p50", "p90", "p99")
    figure = Figure("Latencies", svg.curves(series, axes, "Latencies"), Table(head, tuple(rows)))
    text = (
        "TTFT: from sending to the first text. TPOT: seconds per token after it. E2E: to the end. "
        "From schedule: from when the request should have left, which is what a user waits in an "
        "open loop. Each curve climbs from the fastest request to the slowest; half its height is "
        "the median."
    )
    return Section("Latencies", text, (figure,) if series else ())


def _speculation(done: list[RequestRecord], summary: Summary) -> Section:
    rows = [("all", *_speculation_row(summary))]
    rows += [(name, *_speculation_row(one)) for name, one in by_category(done)]
    head = ("kind of prompt", "requests", "accepted length", "accepted %", "tokens/step")
    text = (
        "Accepted length: tokens that one checking step gives, the model's own included. "
        "Accepted: the share of guesses that were right. Intervals are 95 %, from drawing "
        "requests again."
    )
    return Section("Speculation", text, tables=(Table(head, tuple(rows)),))


def _speculation_row(summary: Summary) -> tuple[str, ...]:
    return (
        str(summary.num_requests),
        with_interval(summary.mean_acceptance_length),
        share(summary.acceptance_rate),
        with_interval(summary.tokens_per_step),
    )


def load_measurements(report: Report) -> list[Measurement]:
    done = [r for r in report.requests if r.succeeded]
    values: dict[str, Interval | None] = {}
    for name, _ in LATENCIES:
        found = _values(done, name)
        for q in (0.5, 0.9, 0.99):
            key = f"{name.lower().replace(' ', '_')}_p{q * 100:g}_seconds"
            values[key] = quantile_interval(found, q)
    gaps = [latency.itl_per_token(r) for r in done]
    values["itl_seconds"] = ratio_interval([sum(g) for g in gaps], [len(g) for g in gaps])
    rows = measured({}, values)
    groups = [({}, summarise(done)), *(({"category": n}, s) for n, s in by_category(done))]
    for labels, summary in groups:
        rows += measured(
            labels,
            {
                "acceptance_rate": summary.acceptance_rate,
                "mean_acceptance_length": summary.mean_acceptance_length,
                "tokens_per_step": summary.tokens_per_step,
            },
        )
    return rows

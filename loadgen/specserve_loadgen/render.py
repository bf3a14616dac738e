"""The report as text for a terminal. A dash is a number that was not measured."""

from __future__ import annotations

from collections.abc import Sequence

from specserve_loadgen.acceptance import Acceptance
from specserve_loadgen.intervals import Interval
from specserve_loadgen.report import Latencies, Report, Throughput
from specserve_loadgen.settings import ClosedLoop, Load, TraceReplay
from specserve_loadgen.stats import SAMPLES_FOR, Distribution
from specserve_loadgen.studies.summary import Summary

MISSING = "-"


def render(report: Report) -> str:
    """All sections, separated by blank lines, without a trailing newline."""
    sections = [_head(report)]
    if report.num_succeeded:  # otherwise there is nothing to measure, and nothing that agrees
        sections += [
            _latency(report),
            _throughput(report.throughput),
            _goodput(report),
            _speculation(report.acceptance, report.speculation),
            _categories(report),
            _cross_check(report),
        ]
    sections += [_errors(report), _notes(report)]
    return "\n\n".join(section for section in sections if section)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned: the first to the left, the others to the right. The first row is a head."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _head(report: Report) -> str:
    settings = report.settings
    pace = describe_load(settings.load)
    ended = f", stopped early ({report.num_stopped} cut off)" if report.interrupted else ""
    return (
        f"{report.model} at {settings.url} ({report.engine}) · {settings.endpoint} · {pace}\n"
        f"{report.num_requests} requests in {report.throughput.seconds:.2f} s: "
        f"{report.num_succeeded} succeeded, {report.num_failed} failed{ended}"
    )


def describe_load(load: Load) -> str:
    if isinstance(load, ClosedLoop):
        text = f"{load.concurrency} concurrent"
    elif isinstance(load, TraceReplay):
        return f"a trace's times, {load.speed:g} times as fast"
    else:
        shape = f" of shape {load.burstiness:g}" if load.arrivals == "gamma" else ""
        text = f"{load.arrivals} arrivals{shape}, {load.rate:g} requests/s"
    return text + (f" after {load.ramp:g} s" if load.ramp else "")


_FIELDS = Latencies.__struct_fields__  # the intervals have the same names


def _latency(report: Report) -> str:
    measured = report.latency
    named = [
        ("TTFT", measured.ttft),
        ("TTFT from schedule", measured.ttft_from_schedule),
        ("ITL per token", measured.itl_per_token),
        ("inter-chunk gap", measured.inter_chunk),
        ("TPOT", measured.tpot),
        ("E2E", measured.e2e),
        ("E2E from schedule", measured.e2e_from_schedule),
    ]
    sure = report.intervals
    spans = [None] * len(named) if sure is None else [getattr(sure, n).mean for n in _FIELDS]
    rows = [["latency (ms)", "mean", "p50", "p90", "p99", "n", "95 % of mean"]]
    few = False
    for (name, values), span in zip(named, spans, strict=True):
        if values is not None:
            cells, short = _quantiles(values)
            few |= short
            rows.append([name, *cells, str(values.count), _span(span, 1e3)])
    if len(rows) == 1:
        return ""
    note = "\n* too few values for this percentile: it is nearly the maximum" if few else ""
    return table(rows) + note


def _quantiles(values: Distribution) -> tuple[list[str], bool]:
    """mean, p50, p90, p99 in ms, starred where the sample is too small; and whether any is."""
    cells = [_ms(values.mean)]
    few = False
    for name, number in (("p50", values.p50), ("p90", values.p90), ("p99", values.p99)):
        short = values.count < SAMPLES_FOR[name]
        few |= short
        cells.append(_ms(number) + ("*" if short else ""))
    return cells, few


def _throughput(measured: Throughput) -> str:
    prompt = MISSING if measured.num_prompt_tokens is None else str(measured.num_prompt_tokens)
    cached = measured.num_cached_prompt_tokens
    if cached is not None and measured.num_prompt_tokens:
        prompt += f" ({cached} cached, {cached / measured.num_prompt_tokens:.1%})"
    rows = [
        ["throughput", ""],
        ["output tokens/s", _number(measured.output_tokens_per_second)],
        ["requests/s", _number(measured.requests_per_second)],
        ["output tokens", str(measured.num_output_tokens)],
        ["tokens per chunk", _number(measured.tokens_per_chunk, 3)],
        ["prompt tokens", prompt],
    ]
    if measured.num_lost_output_tokens:
        rows.append(["output tokens of failed requests", str(measured.num_lost_output_tokens)])
    return table(rows)


def _goodput(report: Report) -> str:
    good, slo = report.goodput, report.settings.slo
    if good is None or slo is None:
        return ""
    known = {name: getattr(slo, name) for name in slo.__struct_fields__}  # its own fields
    limits = ", ".join(f"{n} {v * 1e3:g} ms" for n, v in known.items() if v is not None)
    rows = [
        [f"goodput ({limits})", ""],
        ["good requests/s", _number(good.requests_per_second)],
        ["good requests", f"{good.num_good} of {good.num_judged} ({_share(good.share)})"],
    ]
    rows += [
        [f"over {name}" if name != "failed" else name, str(n)] for name, n in good.broken.items()
    ]
    return table(rows)


def _speculation(pooled: Acceptance, sure: Summary | None) -> str:
    if not pooled.num_requests:
        return "speculation: the replies carry no metrics"
    rows = [
        ["speculation", "pooled", "per request"],
        [
            "mean acceptance length",
            _number(pooled.mean_acceptance_length, 3),
            _number(pooled.mean_acceptance_length_per_request, 3),
        ],
        [
            "acceptance rate",
            _share(pooled.acceptance_rate),
            _share(pooled.acceptance_rate_per_request),
        ],
        ["tokens per target step", _number(pooled.tokens_per_step, 3), ""],
        ["target steps", str(pooled.num_steps), ""],
        ["target steps avoided", str(pooled.num_steps_avoided), ""],
        ["draft tokens accepted", str(pooled.num_accepted_draft_tokens), ""],
        ["draft tokens", str(pooled.num_draft_tokens), ""],
    ]
    parts = [table(rows), *_sureness(sure)]
    if pooled.drafters:
        names = ", ".join(f"{name} ({count} requests)" for name, count in pooled.drafters.items())
        parts.append(f"drafters: {names}")
    if sure is not None and sure.positions:
        parts.append(table(_by_position(sure)))
    return "\n".join(parts)


def _sureness(sure: Summary | None) -> list[str]:
    """One line: the pooled numbers' intervals."""
    if sure is None or sure.mean_acceptance_length is None:
        return []
    length = _span(sure.mean_acceptance_length)
    rate = _span(sure.acceptance_rate, 100, 1)
    return [f"95 %: mean acceptance length {length}, acceptance rate {rate} %"]


def _by_position(sure: Summary) -> list[list[str]]:
    """Where each step's own counts are told, conditional rates too. Intervals in percent."""
    places = sure.positions
    rates = [[place.marginal for place in places]]
    names = ["acceptance rate"]
    if all(place.num_at_risk is not None for place in places):
        rates.append([place.conditional for place in places])
        names.append("if all before held")
    rows = [["by position", *(str(place.position) for place in places)]]
    for name, known in zip(names, rates, strict=True):
        rows.append([name, *(_share(one.estimate if one else None) for one in known)])
        if any(one is not None and one.low is not None for one in known):
            rows.append(["  95 % of it", *(_span(one, 100, 0) for one in known)])
    rows.append(["drafted", *(str(place.num_drafted) for place in places)])
    return rows


def _span(interval: Interval | None, factor: float = 1.0, digits: int = 2) -> str:
    if interval is None or interval.low is None or interval.high is None:
        return MISSING
    return f"{interval.low * factor:.{digits}f}-{interval.high * factor:.{digits}f}"


def _categories(report: Report) -> str:
    if len(report.categories) < 2:
        return ""
    rows = [
        ["by category", "n", "accept len", "accept rate", "tokens/step", "TTFT ms", "ITL ms/token"]
    ]
    for entry in report.categories:
        pooled = entry.acceptance
        rows.append(
            [
                entry.category,
                str(entry.num_succeeded),
                _number(pooled.mean_acceptance_length),
                _share(pooled.acceptance_rate),
                _number(pooled.tokens_per_step),
                _ms(entry.ttft.mean if entry.ttft else None),
                _ms(entry.itl_per_token.mean if entry.itl_per_token else None),
            ]
        )
    return table(rows)


def _cross_check(report: Report) -> str:
    checked = report.cross_check
    rows = [["cross-check", "replies", "/metrics", "chunks"]]
    for count in checked.counts:
        values = (count.replies, count.server, count.chunks)
        rows.append([count.name, *(MISSING if v is None else str(v) for v in values)])
    lines = [table(rows)]
    if checked.times:
        times = [["seconds of all requests", "client", "server", "client/server", "n"]]
        for check in checked.times:
            share = check.client_seconds / check.server_seconds if check.server_seconds else None
            seconds = (check.client_seconds, check.server_seconds, share)
            cells = [_number(value, 3) for value in seconds]
            times.append([check.name, *cells, str(check.num_requests)])
        lines.append(table(times))
    verdict = "DISAGREE" if checked.disagreements else "agree where they can be compared"
    lines.append(f"the three sources {verdict}")
    lines += [f"  ! {text}" for text in checked.disagreements]
    lines += [f"  note: {text}" for text in checked.notes]
    return "\n".join(lines)


def _errors(report: Report) -> str:
    if not report.errors:
        return ""
    rows = [["errors", "count"]]
    rows += [[error.kind, str(error.count)] for error in report.errors]
    lines = []
    for error in report.errors:
        wait = f" (Retry-After: {error.retry_after})" if error.retry_after else ""
        lines.append(f"  {error.kind}: {error.first_message}{wait}")
    return table(rows) + "\n" + "\n".join(lines)


def _notes(report: Report) -> str:
    return "\n".join(f"warning: {text}" for text in report.warnings)


def _ms(seconds: float | None) -> str:
    return MISSING if seconds is None else f"{seconds * 1e3:.2f}"


def _number(value: float | None, digits: int = 2) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def _share(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1%}"

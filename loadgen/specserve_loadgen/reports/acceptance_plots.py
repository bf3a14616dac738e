"""The plots of `study acceptance`, each with what it shows and how to read it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specserve_loadgen.intervals import Interval
from specserve_loadgen.reports import svg
from specserve_loadgen.reports.document import (
    MISSING,
    Figure,
    Section,
    Table,
    number,
    share,
    temperature_text,
    users,
    with_interval,
)
from specserve_loadgen.reports.svg import Axes, Point, Series, estimated, estimates
from specserve_loadgen.studies.acceptance import AcceptanceStudy, CellResult, Group
from specserve_loadgen.studies.arms import Arm
from specserve_loadgen.studies.summary import Position
from specserve_loadgen.studies.watch import KWindow

PHASES = ("draft", "target_forward", "verify", "commit", "plan")


def by_position(study: AcceptanceStudy) -> Section | None:
    figures = [
        figure
        for kind, pick in (("conditional", _conditional), ("marginal", _marginal))
        for temperature in study.plan.temperatures
        if (figure := _position_figure(study, temperature, kind, pick)) is not None
    ]
    if not figures:
        return None
    text = (
        "A step guesses several tokens in a row, each standing on the ones before it. (Where a "
        "drafter draws trees, as auto may, a step has more guesses than places: late places then "
        "look worse than they are.)\nConditional: of the guesses whose predecessors were all "
        "right, how many were right. A flat line means that every further guess is as good as the "
        "last.\nMarginal: of all guesses made at that place, how many were kept; it falls, since "
        "one wrong guess loses all behind it, and rises where a guesser goes so far only when it "
        "is sure. Vertical bars: 95 % intervals."
    )
    return Section("Acceptance by position", text, tuple(figures))


def _conditional(place: Position) -> Interval | None:
    return place.conditional


def _marginal(place: Position) -> Interval | None:
    return place.marginal


def _position_figure(
    study: AcceptanceStudy,
    temperature: float | None,
    kind: str,
    pick: Callable[[Position], Interval | None],
) -> Figure | None:
    cells = _least_loaded(study, temperature)
    most = max((len(c.summary.positions) for c in cells), default=0)
    series = [
        Series(
            c.arm.name,
            tuple(
                estimated(place.position - 1, interval)
                for place in c.summary.positions
                if (interval := pick(place)) is not None
            ),
            _style(study, c.arm),
        )
        for c in cells
        if c.summary.positions
    ]
    series = [one for one in series if one.points]
    if not series:
        return None
    names = tuple(str(at + 1) for at in range(most))
    caption = f"{kind} acceptance by position, temperature {temperature_text(temperature)}"
    axes = Axes(x_label="position of the guess", y_label="share", x_names=names, y_range=(0.0, 1.0))
    head = ("choice", *names)
    rows = [
        (c.arm.name, *_padded([share(pick(p)) for p in c.summary.positions], most))
        for c in cells
        if c.summary.positions
    ]
    return Figure(_capital(caption), svg.lines(series, axes, caption), Table(head, tuple(rows)))


def runs(study: AcceptanceStudy) -> Section | None:
    figures = []
    for temperature in study.plan.temperatures:
        cells = [c for c in _least_loaded(study, temperature) if c.summary.num_spec_steps]
        if not cells:
            continue
        most = max(len(c.summary.runs) for c in cells)
        series = [
            Series(c.arm.name, estimates(enumerate(c.summary.run_shares)), _style(study, c.arm))
            for c in cells
        ]
        names = tuple(map(str, range(most)))
        axes = Axes(x_label="guesses accepted in one step", y_label="share of steps", x_names=names)
        caption = f"Accepted runs, temperature {temperature_text(temperature)}"
        rows = [
            (c.arm.name, *_padded([str(count) for count in c.summary.runs], most)) for c in cells
        ]
        table = Table(("steps that accepted", *names), tuple(rows))
        figures.append(Figure(caption, svg.grouped(series, axes, caption), table))
    text = (
        "How many guesses one step kept. Many steps at 0: checking was for nothing there. Much at "
        "the right end: more guesses per step might pay."
    )
    return Section("How long accepted runs are", text, tuple(figures)) if figures else None


_FEW = "Thin bars: 95 % intervals; where there is none, there were too few requests to tell."


def by_category(study: AcceptanceStudy) -> Section | None:
    text = (
        "Tokens per checking step, by kind of prompt. Text that repeats its prompt (copying, "
        "summarising, translating) is easier to guess than free writing. " + _FEW
    )
    return _groups(study, "By kind of prompt", text, "kind of prompt", lambda c: c.categories)


def by_context(study: AcceptanceStudy) -> Section | None:
    text = "Tokens per checking step, by the length of the prompt in tokens. " + _FEW
    return _groups(study, "By length of the prompt", text, "prompt tokens", lambda c: c.contexts)


def _groups(
    study: AcceptanceStudy,
    title: str,
    text: str,
    x_label: str,
    pick: Callable[[CellResult], Sequence[Group]],
) -> Section | None:
    figures = []
    for temperature in study.plan.temperatures:
        cells = [c for c in _least_loaded(study, temperature) if c.summary.num_spec_steps]
        names = list(dict.fromkeys(group.label for c in cells for group in pick(c)))
        if not cells or len(names) < 2:
            continue
        found = [{g.label: g.summary.mean_acceptance_length for g in pick(c)} for c in cells]
        series = [
            Series(
                c.arm.name,
                estimates((at, of.get(n)) for at, n in enumerate(names)),
                _style(study, c.arm),
            )
            for c, of in zip(cells, found, strict=True)
        ]
        axes = Axes(x_label=x_label, y_label="accepted length", x_names=tuple(names), reference=1.0)
        caption = f"Accepted length, temperature {temperature_text(temperature)}"
        rows = [(name, *(with_interval(of.get(name)) for of in found)) for name in names]
        table = Table((x_label, *(c.arm.name for c in cells)), tuple(rows))
        figures.append(Figure(caption, svg.grouped(series, axes, caption), table))
    return Section(title, text, tuple(figures)) if figures else None


def by_temperature(study: AcceptanceStudy) -> Section | None:
    temperatures = study.plan.temperatures
    if len(temperatures) < 2:
        return None
    names = tuple(temperature_text(t) for t in temperatures)
    least = min(study.plan.concurrencies)
    series, rows = [], []
    for arm in study.plan.arms:
        cells = [c for c in study.cells if c.arm == arm and c.concurrency == least]
        rates = [c.summary.acceptance_rate for c in cells]
        if any(rate is not None for rate in rates):
            series.append(Series(arm.name, estimates(enumerate(rates)), _style(study, arm)))
            rows.append((arm.name, *(share(rate) for rate in rates)))
    if not series:
        return None
    axes = Axes(x_label="temperature", y_label="share accepted", x_names=names, y_range=(0, 1))
    caption = "Accepted guesses by temperature"
    figure = Figure(
        caption, svg.lines(series, axes, caption), Table(("choice", *names), tuple(rows))
    )
    text = "The hotter the sampling, the less the next token can be known beforehand."
    return Section("By temperature", text, (figure,))


def speed_up(study: AcceptanceStudy) -> Section | None:
    names = tuple(map(str, study.plan.concurrencies))
    figures = []
    for temperature in study.plan.temperatures:
        series, rows = [], []
        for arm in study.plan.arms:
            cells = [c for c in study.cells if c.arm == arm and c.temperature == temperature]
            if any(c.speed_up is not None for c in cells):
                points = estimates((at, c.speed_up) for at, c in enumerate(cells))
                series.append(Series(arm.name, points, _style(study, arm)))
                rows.append((arm.name, *(with_interval(c.speed_up) for c in cells)))
        if not series:
            continue
        axes = Axes(x_label="users at once", y_label="times as fast", x_names=names, reference=1.0)
        caption = f"Speed-up over concurrency, temperature {temperature_text(temperature)}"
        table = Table(("choice", *map(users, study.plan.concurrencies)), tuple(rows))
        figures.append(Figure(caption, svg.lines(series, axes, caption), table))
    text = (
        "Output tokens per second over those without speculation, same prompts, same seeds, "
        "neighbouring minutes. Below the dotted line speculation made things slower. With more "
        "users at once a step is already full, so checking guesses is no longer nearly free."
    )
    return Section("What it buys: speed-up", text, tuple(figures)) if figures else None


def latencies(study: AcceptanceStudy) -> Section | None:
    kinds = (
        ("ttft", "Time to first token", "seconds from sending to the first text"),
        ("tpot", "Time per token after the first", "seconds per token, one value per request"),
        ("e2e", "Whole reply", "seconds from sending to the end"),
    )
    figures = []
    temperature = study.plan.temperatures[0]
    for concurrency in study.plan.concurrencies:
        for kind, title, x_label in kinds:
            series = []
            for arm in study.plan.arms:
                values = _latency_values(study, arm.name, temperature, concurrency, kind)
                if values:
                    series.append(Series(arm.name, svg.ecdf(values), _style(study, arm)))
            if series:
                axes = Axes(
                    x_label=x_label, y_label="share of requests", x_is_log=True, y_range=(0, 1)
                )
                caption = (
                    f"{title}, {users(concurrency)}, temperature {temperature_text(temperature)}"
                )
                figures.append(Figure(caption, svg.curves(series, axes, caption)))
    text = (
        "Each curve climbs from the fastest request to the slowest: at height 0.5 is the median, "
        "at 0.9 what nine of ten stay below. Further left is faster. The scale is logarithmic."
    )
    return Section("Latencies", text, tuple(figures)) if figures else None


def _latency_values(
    study: AcceptanceStudy, arm: str, temperature: float | None, concurrency: int, kind: str
) -> list[float]:
    mine = (arm, temperature, concurrency)
    rows = [r for r in study.requests if (r.arm, r.temperature, r.concurrency) == mine]
    values = [{"ttft": r.ttft, "tpot": r.tpot, "e2e": r.e2e}[kind] for r in rows]
    return [value for value in values if value is not None and value > 0]


def costs(study: AcceptanceStudy) -> Section | None:
    figures = []
    for concurrency in study.plan.concurrencies:
        cells = [
            c
            for c in _least_loaded(study, study.plan.temperatures[0], concurrency)
            if c.phases and c.summary.num_output_tokens
        ]
        if not cells:
            continue
        shown = [p for p in PHASES if any(c.phases.get(p) for c in cells)]
        per_token = [
            [c.phases.get(p, 0.0) * 1e3 / c.summary.num_output_tokens for p in shown] for c in cells
        ]
        bars = [(c.arm.name, values) for c, values in zip(cells, per_token, strict=True)]
        axes = Axes(x_label="choice", y_label="ms per output token")
        caption = f"Where the server's time goes, {users(concurrency)}"
        table = _cost_table(cells, shown, per_token)
        figures.append(Figure(caption, svg.stacked(bars, shown, axes, caption), table))
    text = (
        "Seconds of the server's own steps, by phase, for each output token: guessing (draft), "
        "the model itself (target_forward; checking guesses makes it longer, fewer steps make it "
        "rarer), comparing (verify), and the host's work (plan, commit). Net gain: what one token "
        "costs less than without speculation. Prompts are included; other traffic on the server "
        "would be, too."
    )
    return Section("What it costs", text, tuple(figures)) if figures else None


def _cost_table(
    cells: Sequence[CellResult], shown: Sequence[str], per_token: Sequence[Sequence[float]]
) -> Table:
    totals = [sum(values) for values in per_token]
    base = next((t for c, t in zip(cells, totals, strict=True) if c.arm.name == "off"), None)
    rows = []
    for cell, values, total in zip(cells, per_token, totals, strict=True):
        gain = MISSING if base is None else number(base - total, 3)
        shares = [f"{number(v, 3)} ({v / total:.0%})" for v in values]
        rows.append((cell.arm.name, *shares, number(total, 3), gain))
    return Table(("ms per token", *shown, "all", "net gain"), tuple(rows))


def k_over_time(study: AcceptanceStudy) -> Section | None:
    arms = [a for a in study.plan.arms if any(w.label == a.name for w in study.windows)]
    labels = [arm.name for arm in arms]
    series = [
        Series(
            arm.name,
            _thinned([w for w in study.windows if w.label == arm.name], study.seconds),
            _style(study, arm),
        )
        for arm in arms
    ]
    if not series:
        return None
    axes = Axes(x_label="seconds since the study began", y_label="guesses per row and step")
    caption = "K over time"
    rows = [
        (label, str(len(ks)), number(min(ks)), number(sum(ks) / len(ks)), number(max(ks)))
        for label in labels
        if (ks := [w.mean_k for w in study.windows if w.label == label])
    ]
    table = Table(("choice", "windows", "least", "mean", "most"), tuple(rows))
    text = (
        "Guesses per row and step, as the server told them while the study ran; each point is the "
        "mean over a fortieth of it, and rows that guessed nothing count as 0. A fixed choice "
        "stays where it was put, but for guessers that have nothing to say; auto moves with the "
        "text and the load."
    )
    return Section(
        "K over time", text, (Figure(caption, svg.curves(series, axes, caption), table),)
    )


def _thinned(windows: Sequence[KWindow], seconds: float) -> tuple[Point, ...]:
    """At most one point in each fortieth of the study: the mean over its rows."""
    parts: dict[int, list[KWindow]] = {}
    for window in windows:
        parts.setdefault(int(40 * window.seconds / seconds), []).append(window)
    return tuple(
        Point(
            sum(w.seconds for w in part) / len(part),
            sum(w.mean_k * w.num_rows for w in part) / sum(w.num_rows for w in part),
        )
        for _, part in sorted(parts.items())
    )


def _least_loaded(
    study: AcceptanceStudy, temperature: float | None, concurrency: int | None = None
) -> list[CellResult]:
    """Acceptance does not depend on the load (under replay), so one load is shown."""
    load = min(study.plan.concurrencies) if concurrency is None else concurrency
    return [c for c in study.cells if c.temperature == temperature and c.concurrency == load]


def _style(study: AcceptanceStudy, arm: Arm) -> int:
    return study.plan.arms.index(arm)


def _padded(cells: Sequence[str], length: int) -> list[str]:
    return [*cells, *[MISSING] * (length - len(cells))]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]

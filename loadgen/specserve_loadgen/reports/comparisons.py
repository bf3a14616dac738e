"""The documents of `study ab`, `study lossless` and `study capacity`, and their numbers as rows."""

from __future__ import annotations

from specserve_loadgen.intervals import Interval
from specserve_loadgen.reports import svg
from specserve_loadgen.reports.document import (
    Document,
    Figure,
    Section,
    Table,
    environment_facts,
    joined,
    milliseconds,
    number,
    share,
    temperature_text,
    with_interval,
)
from specserve_loadgen.reports.measurements import Measurement, measured
from specserve_loadgen.reports.svg import Axes, Series, estimated
from specserve_loadgen.studies.ab import AbStudy, Measured, Side
from specserve_loadgen.studies.capacity import CapacityStudy
from specserve_loadgen.studies.difference import Difference
from specserve_loadgen.studies.lossless import CONTROL_FACTOR, REFUTED, LosslessStudy


def ab_document(study: AbStudy) -> Document:
    rows = tuple(_ab_row(one) for one in study.measures)
    shown = [one for one in study.measures if one.b_over_a is not None]
    names = tuple(one.name for one in shown)
    points = tuple(estimated(at, one.b_over_a) for at, one in enumerate(shown) if one.b_over_a)
    axes = Axes(x_label="measure", y_label="B / A", x_names=names, reference=1.0)
    text = (
        "Each pair of blocks had the same prompts and seeds, minutes apart at most; B / A is the "
        "geometric mean over pairs, with its 95 % interval. Where the interval leaves out 1 (the "
        "dotted line) A and B differ; where it does not, no difference was shown, which is not the "
        "same as that there is none."
    )
    figure = Figure("B over A", svg.lines([Series("B / A", points, 0)], axes, "B over A"))
    table = Table(("measure", "A, mean", "B, mean", "B / A", "differs"), rows)
    return Document(
        title=f"{_side(study.plan.b)} against {_side(study.plan.a)}",
        lead=(_ab_lead(study), _texts(study.texts, promised=study.plan.same_text_is_promised)),
        sections=(
            Section("B over A", text, (figure,) if points else (), (table,)),
            Section("Acceptance", _ACCEPTANCE, tables=(_acceptance_table(study),)),
        ),
        facts=(
            ("study", study.schema),
            ("A", f"{study.plan.a.target.url}, {study.plan.a.arm.name}"),
            ("B", f"{study.plan.b.target.url}, {study.plan.b.arm.name}"),
            ("model", study.model),
            ("temperature", temperature_text(study.plan.cell.temperature)),
            ("users at once", str(study.plan.cell.concurrency)),
            ("requests", f"{study.num_requests} for each side in {study.num_blocks} pairs"),
            ("prompts", study.plan.prompts_file or "the shipped pack"),
            ("intervals", "95 %, bootstrap-t over pairs of blocks"),
            *environment_facts(study.environment),
        ),
    )


_ACCEPTANCE = (
    "Accepted length: tokens that one checking step gives, the model's own included. Intervals are "
    "over requests, of each side by itself."
)


def _side(side: Side) -> str:
    return f"{side.name} ({side.arm.name} at {side.target.url})"


def _ab_row(one: Measured) -> tuple[str, ...]:
    unit = f" {one.unit}" if one.unit else ""
    return (
        one.name,
        f"{number(one.a, 4)}{unit}",
        f"{number(one.b, 4)}{unit}",
        with_interval(one.b_over_a, 3),
        _verdict(one.b_over_a),
    )


def _verdict(interval: Interval | None) -> str:
    if interval is None or interval.low is None or interval.high is None:
        return "unknown"
    return "yes" if interval.low > 1 or interval.high < 1 else "not shown"


def _ab_lead(study: AbStudy) -> str:
    speed = next((one for one in study.measures if one.name == "output tokens/s"), None)
    if speed is None:
        return "No speed was measured."
    return (
        f"B gives {with_interval(speed.b_over_a, 3)} times the output tokens per second of A, over "
        f"{study.num_blocks} pairs."
    )


def _texts(texts: Difference, *, promised: bool) -> str:
    if not texts.num_different_requests:
        return f"All {texts.num_requests} replies are equal, {texts.num_compared} {texts.by}."
    where = ""
    if (first := texts.first) is not None:
        where = (
            f" First: prompt {first.prompt_id}, place {first.token_idx}: …{first.one!r} against "
            f"…{first.other!r}."
        )
    promise = "exact replay promises equal ones" if promised else "nothing promised equal ones"
    return (
        f"{texts.num_different_requests} of {texts.num_requests} replies differ ({promise})."
        + where
    )


def _acceptance_table(study: AbStudy) -> Table:
    rows = tuple(
        (
            name,
            with_interval(s.mean_acceptance_length),
            share(s.acceptance_rate),
            with_interval(s.tokens_per_step),
        )
        for name, s in (("A", study.a), ("B", study.b))
    )
    return Table(("side", "accepted length", "accepted %", "tokens/step"), rows)


def ab_measurements(study: AbStudy) -> list[Measurement]:
    ratios = {f"b_over_a {one.name}": one.b_over_a for one in study.measures}
    rows = measured({}, ratios)
    for name, summary in (("A", study.a), ("B", study.b)):
        values = {
            "acceptance_rate": summary.acceptance_rate,
            "mean_acceptance_length": summary.mean_acceptance_length,
            "tokens_per_step": summary.tokens_per_step,
        }
        rows += measured({"arm": name}, values)
    return rows


# ---- lossless ----------------------------------------------------------------------------------


def lossless_document(study: LosslessStudy) -> Document:
    identity = Table(
        ("choice", "T", "replies", "compared", "different", "steps with guesses", "verdict"),
        tuple(
            (
                one.arm,
                f"{one.temperature:g}",
                str(one.difference.num_requests),
                f"{one.difference.num_compared} {one.difference.by}",
                str(one.difference.num_different),
                str(one.num_spec_steps),
                _identity_verdict(one.difference, one.num_spec_steps),
            )
            for one in study.identities
        ),
    )
    law = Table(
        ("choice", "T", "replies per group", "steps with guesses", "p", "control p", "verdict"),
        tuple(
            (
                one.arm,
                f"{one.temperature:g}",
                f"{one.num_samples} to {one.num_prompts} prompts",
                str(one.num_spec_steps),
                number(one.p_value, 4),
                number(one.control_p_value, 4),
                "another law" if one.refuted else "no difference" + _power(one.could_tell),
            )
            for one in study.laws
        ),
    )
    sections = [Section("Token for token", _IDENTITY, tables=(identity,))] if identity.rows else []
    sections += [Section("The same distribution?", _LAW, tables=(law,))] if law.rows else []
    return Document(
        title=f"Does speculation change what {study.model} says?",
        lead=tuple(_lossless_lead(study)),
        sections=tuple(sections),
        facts=(
            ("study", study.schema),
            ("server", f"{study.plan.target.url}, version {study.server_version or 'unknown'}"),
            ("choices", joined([arm.name for arm in study.plan.arms])),
            ("temperatures", joined([f"{t:g}" for t in study.plan.temperatures])),
            ("users at once", str(study.plan.concurrency)),
            ("prompts", study.plan.prompts_file or "the shipped pack"),
            ("most output tokens", str(study.plan.target.max_tokens)),
            *environment_facts(study.environment),
        ),
    )


_IDENTITY = (
    "The same prompts and seeds with and without speculation; every token is compared. A row "
    "without steps that had guesses proves nothing."
)
_LAW = (
    "These rules promise the same distribution, not the same text. p: how often groups of replies "
    f"drawn at random lie as far apart as these two; below {REFUTED:g} the laws differ. Control "
    f"p: the same for two temperatures a factor of {CONTROL_FACTOR:g} apart, both without "
    "speculation: a test that does not see that could not have seen much."
)


def _identity_verdict(difference: Difference, num_spec_steps: int) -> str:
    if difference.num_different:
        return "DIFFERENT"
    return "equal" if num_spec_steps else "nothing was guessed"


def _power(could_tell: bool) -> str:
    return " found" if could_tell else " found, but even the control was not seen"


def _lossless_lead(study: LosslessStudy) -> list[str]:
    lines = []
    if study.identities:
        replies = sum(one.difference.num_requests for one in study.identities)
        compared = sum(one.difference.num_compared for one in study.identities)
        lines.append(
            f"{study.num_different} of {compared} tokens differ from the replies without "
            f"speculation, over {replies} replies."
        )
        lines += [
            f"{one.arm}, T = {one.temperature:g}: {_texts(one.difference, promised=True)}"
            for one in study.identities
            if one.difference.num_different
        ]
    if study.laws:
        refuted = [law.arm for law in study.laws if law.refuted]
        found = f"another law: {joined(refuted)}" if refuted else "no difference in law was found"
        lines.append(f"{len(study.laws)} tests of distributions: {found}.")
    return lines


def lossless_measurements(study: LosslessStudy) -> list[Measurement]:
    """Counts and p-values are exact: their intervals are themselves."""
    rows = []
    for one in study.identities:
        labels = {"arm": one.arm, "temperature": f"{one.temperature:g}"}
        count, found = one.difference.num_requests, float(one.difference.num_different)
        rows.append(Measurement(labels, "different", Interval(found, found, found, count)))
    for law in study.laws:
        labels = {"arm": law.arm, "temperature": f"{law.temperature:g}"}
        p = law.p_value
        rows.append(Measurement(labels, "p_value", Interval(p, p, p, law.num_samples)))
    return rows


# ---- capacity ----------------------------------------------------------------------------------


def capacity_document(study: CapacityStudy) -> Document:
    plan = study.plan
    known = {name: getattr(plan.slo, name) for name in plan.slo.__struct_fields__}  # its own fields
    limits = [f"{name} at most {v * 1e3:g} ms" for name, v in known.items() if v is not None]
    points = tuple(estimated(level.rate, level.good) for level in study.levels)
    axes = Axes(
        x_label="requests per second offered",
        y_label="share good",
        y_range=(0, 1),
        x_is_log=True,
        reference=plan.share,
    )
    plot = svg.lines([Series("good requests", points, 0)], axes, "Good requests by offered load")
    head = (
        "requests/s", "good %", "good/s", "tokens/s", "TTFT p50 ms", "TTFT p99 ms",
        "over the limit", "",
    )  # fmt: skip
    rows = tuple(
        (
            number(level.rate, 2),
            share(level.good),
            number(level.good_per_second, 2),
            number(level.output_tokens_per_second, 1),
            milliseconds(level.ttft_p50),
            milliseconds(level.ttft_p99),
            joined([f"{name} {count}" for name, count in level.broken.items()]) or "none",
            "holds" if level.holds else "fails",
        )
        for level in study.levels
    )
    text = (
        f"A request is good when it keeps every limit ({joined(limits)}), counted from when it "
        f"should have been sent. A rate holds when {plan.share:.0%} of its requests are good "
        "(dotted line)."
    )
    figure = Figure("Good requests by offered load", plot, Table(head, rows))
    return Document(
        title=f"How much load does {study.model} carry?",
        lead=(_capacity_lead(study),),
        sections=(Section("Load and limits", text, (figure,)),),
        facts=(
            ("study", study.schema),
            ("server", f"{plan.target.url}, version {study.server_version or 'unknown'}"),
            ("choice", plan.arm.name),
            ("load", f"Poisson arrivals, {plan.num_requests} requests for each rate"),
            ("prompts", plan.prompts_file or "the shipped pack"),
            ("most output tokens", str(plan.target.max_tokens)),
            *environment_facts(study.environment),
        ),
        notes=study.notes,
    )


def _capacity_lead(study: CapacityStudy) -> str:
    if study.capacity is None:
        return f"Not even {study.levels[0].rate:.3g} requests per second hold."
    level = next(one for one in study.levels if one.rate == study.capacity)
    more = (
        "no rate that was tried failed"
        if study.first_failing is None
        else f"{study.first_failing:.3g} does not"
    )
    return (
        f"{study.capacity:.3g} requests per second hold ({share(level.good)} % good, "
        f"{level.output_tokens_per_second:.0f} output tokens per second); {more}."
    )


def capacity_measurements(study: CapacityStudy) -> list[Measurement]:
    rows: list[Measurement] = []
    for level in study.levels:
        values = {
            "good_share": level.good,
            "ttft_p50_seconds": level.ttft_p50,
            "ttft_p99_seconds": level.ttft_p99,
        }
        rows += measured({"load": f"{level.rate:.4g}"}, values)
    return rows

"""The document of `study acceptance`, and its numbers as rows."""

from __future__ import annotations

from collections.abc import Sequence

from specserve_loadgen.intervals import Interval
from specserve_loadgen.reports.acceptance_plots import (
    by_category,
    by_context,
    by_position,
    by_temperature,
    costs,
    k_over_time,
    latencies,
    runs,
    speed_up,
)
from specserve_loadgen.reports.document import (
    MISSING,
    Document,
    Section,
    Table,
    environment_facts,
    joined,
    milliseconds,
    share,
    temperature_text,
    users,
    with_interval,
)
from specserve_loadgen.reports.measurements import Measurement, measured
from specserve_loadgen.studies.acceptance import AcceptanceStudy, CellResult
from specserve_loadgen.studies.arms import OFF
from specserve_loadgen.studies.summary import Summary


def acceptance_document(study: AcceptanceStudy) -> Document:
    sections = [
        Section(
            "All choices at a glance", _OVERVIEW, tables=(accepted_table(study), speed_table(study))
        ),
        by_position(study),
        runs(study),
        by_category(study),
        by_temperature(study),
        by_context(study),
        speed_up(study),
        latencies(study),
        costs(study),
        k_over_time(study),
    ]
    return Document(
        title=f"How often are guesses right? Model: {study.model}",
        lead=tuple(_lead(study)),
        sections=tuple(section for section in sections if section is not None),
        facts=tuple(_facts(study)),
        notes=study.notes if study.failure is None else (_cut(study.failure), *study.notes),
    )


_OVERVIEW = (
    "Speculation lets a cheap guesser propose the next K tokens; the model then checks all of "
    "them in one step, keeps those that are right and adds one of its own. Each row is one way of "
    "guessing. NAME:K is a guesser and how many tokens it proposes at most: suffix and ngram look "
    "up what followed the same words before, other names are small models that were trained to "
    "guess. auto: the server chooses. off: no speculation.\n"
    "Accepted length: tokens that one checking step gives, the model's own token included: 1 "
    "would be no gain. Accepted: the share of guesses that were right; wasted: how many were not. "
    "Tokens/step: over all steps, also those in which the guesser had nothing to propose. Other "
    "text: replies that are not, token for token, the ones without speculation.\n"
    "Speed-up: output tokens per second over those without speculation, on the same prompts; below "
    "1 speculation made it slower. TTFT: from sending to the first text. ITL: between two tokens. "
    "In brackets: the 95 % interval, from drawing requests (for speeds: blocks of requests) again "
    "and again; two numbers whose intervals are far apart differ for certain, two that overlap "
    "widely may not differ at all."
)
_LABELS = ("choice", "temperature", "users")


def accepted_table(study: AcceptanceStudy) -> Table:
    head = (
        *_LABELS, "requests", "accepted length", "accepted %", "tokens/step", "guesses wasted",
        "other text",
    )  # fmt: skip
    rows = []
    for cell in study.cells:
        s = cell.summary
        rows.append(
            (
                *_labels(cell),
                str(s.num_requests),
                with_interval(s.mean_acceptance_length),
                share(s.acceptance_rate),
                with_interval(s.tokens_per_step),
                str(s.num_wasted_draft_tokens) if s.num_draft_tokens else MISSING,
                MISSING if cell.num_different is None else str(cell.num_different),
            )
        )
    return Table(head, tuple(rows))


def speed_table(study: AcceptanceStudy) -> Table:
    head = (*_LABELS, "tokens/s", "speed-up", "TTFT p50 ms", "ITL ms/token")
    rows = tuple(
        (
            *_labels(cell),
            with_interval(cell.tokens_per_second, 1),
            "1 (baseline)" if cell.arm == OFF else with_interval(cell.speed_up),
            milliseconds(cell.ttft_p50),
            milliseconds(cell.itl, 2),
        )
        for cell in study.cells
    )
    return Table(head, rows)


def _labels(cell: CellResult) -> tuple[str, str, str]:
    return cell.arm.name, temperature_text(cell.temperature), str(cell.concurrency)


def _lead(study: AcceptanceStudy) -> list[str]:
    guessing = [c for c in study.cells if c.summary.mean_acceptance_length is not None]
    first = study.cells[0].summary
    lines = [
        f"{study.num_asked} prompts of {len(study.cells[0].categories)} kinds, "
        f"{first.num_output_tokens} output tokens for each choice and temperature, "
        f"in {study.seconds / 60:.1f} minutes."
    ]
    if guessing:
        best = max(guessing, key=lambda c: _estimate(c.summary.mean_acceptance_length))
        lines.append(
            f"Longest accepted runs: {_where(best)}, "
            f"{with_interval(best.summary.mean_acceptance_length)} tokens per checking step."
        )
        most = max(guessing, key=lambda c: _estimate(c.summary.tokens_per_step))
        lines.append(
            f"Fewest steps: {_where(most)}, {with_interval(most.summary.tokens_per_step)} tokens "
            "per step, steps without guesses counted too."
        )
    if rated := [c for c in study.cells if c.speed_up is not None]:
        lines.append(_fastest(max(rated, key=lambda c: _estimate(c.speed_up))))
    compared = [c for c in study.cells if c.num_different is not None]
    if compared:
        different = sum(c.num_different or 0 for c in compared)
        count = sum(c.summary.num_requests for c in compared)
        lines.append(
            f"All {count} replies with speculation are the ones without it, token for token."
            if not different
            else f"{different} of {count} replies differ from the ones without speculation."
        )
    return lines


def _where(cell: CellResult) -> str:
    return f"{cell.arm.name} at temperature {temperature_text(cell.temperature)}"


def _fastest(best: CellResult) -> str:
    gain = best.speed_up
    found = (
        f"{best.arm.name} with {users(best.concurrency)} at once at temperature "
        f"{temperature_text(best.temperature)}, {with_interval(gain)} times the tokens per second "
        "of no speculation"
    )
    if gain is None or gain.low is None or gain.low <= 1:
        return f"No choice was shown to be faster than no speculation. The best: {found}."
    return f"Fastest: {found}."


def _estimate(interval: Interval | None) -> float:
    return 0.0 if interval is None else interval.estimate


def _cut(failure: str) -> str:
    return f"A request failed, which ended the study early: {failure}"


def _facts(study: AcceptanceStudy) -> list[tuple[str, str]]:
    plan = study.plan
    return [
        ("study", study.schema),
        ("server", f"{plan.target.url}, version {study.server_version or 'unknown'}"),
        ("model", study.model),
        ("choices", joined([arm.name for arm in plan.arms])),
        ("temperatures", joined([temperature_text(t) for t in plan.temperatures])),
        ("users at once", joined(plan.concurrencies)),
        ("prompts", f"{plan.prompts_file or 'the shipped pack'}: {study.num_asked} asked of "
                    f"{study.num_prompts} chosen"),
        ("most output tokens", f"{plan.target.max_tokens}"
                               + (", ends of text ignored" if plan.target.ignore_eos else "")),
        ("seed", str(plan.target.seed)),
        ("order", f"blocks of {plan.block_size} prompts; each block once by every choice, whose "
                  "order rotates; each run with a prefix cache of its own"),
        ("intervals", "95 %, bootstrap-t, 2000 resamples of requests (speeds: of blocks, paired)"),
        *environment_facts(study.environment),
    ]  # fmt: skip


def acceptance_measurements(study: AcceptanceStudy) -> list[Measurement]:
    rows: list[Measurement] = []
    for cell in study.cells:
        labels = {
            "arm": cell.arm.name,
            "temperature": temperature_text(cell.temperature),
            "concurrency": str(cell.concurrency),
        }
        speeds = {
            "tokens_per_second": cell.tokens_per_second,
            "speed_up": cell.speed_up,
            "ttft_p50_seconds": cell.ttft_p50,
            "ttft_p99_seconds": cell.ttft_p99,
            "itl_seconds": cell.itl,
            "e2e_p50_seconds": cell.e2e_p50,
        }
        rows += measured(labels, speeds)
        rows += _of_summary(labels, cell.summary)
        for name, groups in (("category", cell.categories), ("context", cell.contexts)):
            for group in groups:
                rows += _of_summary(labels | {name: group.label}, group.summary)
    return rows


def _of_summary(labels: dict[str, str], summary: Summary) -> Sequence[Measurement]:
    rows = measured(
        labels,
        {
            "acceptance_rate": summary.acceptance_rate,
            "acceptance_rate_per_request": summary.acceptance_rate_per_request,
            "mean_acceptance_length": summary.mean_acceptance_length,
            "mean_acceptance_length_per_request": summary.mean_acceptance_length_per_request,
            "tokens_per_step": summary.tokens_per_step,
        },
    )
    for place in summary.positions:
        rates = {"marginal_acceptance": place.marginal, "conditional_acceptance": place.conditional}
        rows += measured(labels | {"position": str(place.position)}, rates)
    for length, interval in enumerate(summary.run_shares):
        rows += measured(labels | {"run": str(length)}, {"share_of_steps": interval})
    return rows

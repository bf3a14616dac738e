"""`specserve study whatif FILE`: what other Ks would have given, from what was recorded.

`serve --record-steps FILE` keeps every proposal with where it stood in its text and which of its
guesses were right. Under exact replay the text does not depend on K, so each text is walked again
with another K: at a place where a proposal began, its first K guesses count; at a place that the
recorded walk passed over, what is left of the proposal that passed over it. Guesses beyond what was
proposed are drawn by the rates found at their depth. So a K below the recorded one is predicted
from guesses that were made a few tokens earlier than they would have been: a drafter that sees more
would have guessed a little better.

The analytic figure is (1 - a^(K+1)) / (1 - a), with a the share right among all guesses at risk: as
if every guess were equally hard. A live run (`study acceptance --json`) shows how good both are.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Final

import msgspec

from specserve.errors import ConfigError, SpecserveError
from specserve.speculation.hindsight import RecordedRow, RecordedStep
from specserve.speculation.recording import read_steps
from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.reports.files import read_report
from specserve_loadgen.studies.acceptance import AcceptanceStudy

SCHEMA: Final = "specserve.study.whatif/1"
CLOSE: Final = 0.05  # a prediction is good within this share of the live run


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per step that had guesses, the extra one included. live: None: not measured"""

    drafter: str
    k: int
    num_steps: int
    predicted: float
    analytic: float
    live: float | None = None
    live_low: float | None = None
    live_high: float | None = None

    @property
    def error(self) -> float | None:
        return None if self.live is None else self.predicted / self.live - 1


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """conditional: share right at each depth, of guesses whose predecessors were right"""

    schema: str = SCHEMA
    file: str
    num_texts: int
    conditional: dict[str, tuple[float, ...]]
    predictions: tuple[Prediction, ...]

    @property
    def holds(self) -> bool:
        errors = [one.error for one in self.predictions]
        return all(error is None or abs(error) <= CLOSE for error in errors)


# By the place of its first guess: (right guesses from the left, guesses that were proposed).
_Text = Mapping[int, tuple[int, int]]


def predict(steps: Seq[RecordedStep], drafter: str, k: int, seed: int = 0) -> Prediction:
    """ConfigError where nothing of this drafter was recorded as a chain."""
    texts = texts_of(steps, drafter)
    if not texts:
        raise ConfigError(f"no chain of guesses by {drafter} was recorded")
    rates = conditional_rates(texts)
    rng = random.Random(seed)
    emitted = num_steps = 0
    for text in texts.values():
        place, end = min(text), max(place + right for place, (right, _) in text.items())
        while place <= end:
            right = _accepted(text, place, k, rates, rng)
            if right is not None:
                emitted, num_steps = emitted + right + 1, num_steps + 1
            place += (right or 0) + 1
    return Prediction(
        drafter=drafter,
        k=k,
        num_steps=num_steps,
        predicted=emitted / num_steps,
        analytic=analytic_length(_pooled(texts), k),
    )


def texts_of(steps: Seq[RecordedStep], drafter: str) -> dict[int, dict[int, tuple[int, int]]]:
    """By sequence; proposals that are no chains are left out."""
    texts: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
    for step in steps:
        for row in step.rows:
            if row.drafter == drafter and row.position >= 0 and row.right and _is_chain(row):
                texts[row.seq][row.position] = sum(row.right), len(row.right)
    return dict(texts)


def _is_chain(row: RecordedRow) -> bool:
    return row.parents == tuple(range(-1, len(row.parents) - 1))


def conditional_rates(texts: Mapping[int, _Text]) -> tuple[float, ...]:
    """[deepest] of the guesses whose predecessors were right, how many were right at each depth."""
    proposals = [one for text in texts.values() for one in text.values()]
    deepest = max(count for _, count in proposals)
    rates = []
    for depth in range(deepest):
        at_risk = [right for right, count in proposals if count > depth and right >= depth]
        rates.append(sum(right > depth for right in at_risk) / max(1, len(at_risk)))
    return tuple(rates)


def _pooled(texts: Mapping[int, _Text]) -> float:
    """Of all guesses whose predecessors were right, how many were right."""
    proposals = [one for text in texts.values() for one in text.values()]
    right = sum(one for one, _ in proposals)
    return right / (right + sum(one < count for one, count in proposals))


def analytic_length(chance: float, k: int) -> float:
    """(1 - a^(K+1)) / (1 - a)"""
    return k + 1.0 if chance == 1.0 else (1 - chance ** (k + 1)) / (1 - chance)


def _accepted(text: _Text, place: int, k: int, rates: Seq[float], rng: random.Random) -> int | None:
    """How many of K guesses at a place would be right; None: nothing was proposed there."""
    found = next(
        (
            (start, text[start])
            for start in range(place, place - len(rates) - 1, -1)
            if start in text and text[start][0] >= place - start
        ),
        None,
    )
    if found is None:
        return None
    start, (right, count) = found
    right, count = right - (place - start), count - (place - start)
    if start < place and count == 0:
        return None
    if right < count or k <= count or start == place:
        return min(k, right)
    while right < k and rng.random() < rates[min(right, len(rates) - 1)]:
        right += 1
    return right


def with_live(predictions: Seq[Prediction], study: AcceptanceStudy) -> list[Prediction]:
    """Beside each prediction, what the study measured with that drafter and K."""
    measured = {
        (cell.arm.drafter, cell.arm.max_draft_tokens): cell.summary.mean_acceptance_length
        for cell in reversed(study.cells)  # of several loads or temperatures the first counts
    }
    compared = []
    for one in predictions:
        live = measured.get((one.drafter, one.k))
        if live is not None:
            one = msgspec.structs.replace(
                one, live=live.estimate, live_low=live.low, live_high=live.high
            )
        compared.append(one)
    return compared


def render(report: WhatIf) -> str:
    lines = [f"{report.num_texts} texts in {report.file}", ""]
    for drafter, rates in report.conditional.items():
        shown = " ".join(f"{rate:.3f}" for rate in rates)
        lines.append(f"{drafter}: right at each depth, if all before were: {shown}")
    lines += ["", "drafter     K  tokens/step  analytic     live          95 %   error"]
    for one in report.predictions:
        line = f"{one.drafter:<9} {one.k:>3} {one.predicted:>12.3f} {one.analytic:>9.3f}"
        if one.live is not None and one.error is not None:
            bounds = "too few"
            if one.live_low is not None and one.live_high is not None:
                bounds = f"{one.live_low:.2f}-{one.live_high:.2f}"
            line += f" {one.live:>8.3f} {bounds:>13} {one.error:>+7.1%}"
        lines.append(line)
    return "\n".join(lines)


def main(argv: Seq[str]) -> int:
    """Exit code 0: no prediction is off by more than 5 %. 1: one is. 2: nothing could be read."""
    options = _parser().parse_args(argv)
    try:
        report = report_on(options.file, options.k, options.live)
    except (SpecserveError, LoadgenError) as error:
        print(f"specserve study whatif: {error}", file=sys.stderr)
        return 2
    print(render(report))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return 0 if report.holds else 1


def report_on(path: Path, ks: str, live: Path | None) -> WhatIf:
    parts = [part for part in ks.split(",") if part]
    if not parts or not all(part.isdigit() and int(part) >= 1 for part in parts):
        raise ConfigError(f"--k {ks}: write whole numbers of at least 1, as in 1,3,7")
    steps = read_steps(path)
    drafters = sorted({row.drafter for step in steps for row in step.rows if row.position >= 0})
    texts = {name: found for name in drafters if (found := texts_of(steps, name))}
    if not texts:
        raise ConfigError(
            f"{path} holds no chain of guesses with its place: record with this version, drafts of "
            "width 1, and requests that name a drafter and the largest K of interest"
        )
    predictions = [predict(steps, name, int(k)) for name in texts for k in parts]
    if live is not None:
        study = read_report(live)
        if not isinstance(study, AcceptanceStudy):
            raise ConfigError(f"--live {live}: holds {study.schema}, not a study of acceptance")
        predictions = with_live(predictions, study)
    return WhatIf(
        file=str(path),
        num_texts=sum(len(found) for found in texts.values()),
        conditional={name: conditional_rates(found) for name, found in texts.items()},
        predictions=tuple(predictions),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specserve study whatif",
        description="What other Ks would have given, from what `serve --record-steps FILE` wrote: "
        "record requests that name a drafter and a large K.",
        epilog="exit code: 0 all within 5 % of the live run, 1 one is not, 2 nothing could be read",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--k", default="1,2,3,5,7", metavar="K,...", help="default: 1,2,3,5,7")
    parser.add_argument(
        "--live", type=Path, metavar="STUDY.json", help="of `study acceptance`, to compare with"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    return parser

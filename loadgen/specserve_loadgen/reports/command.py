"""`specserve report A.json [B.json]`: what a study or a run wrote, shown or compared."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.reports.document import Document, Section
from specserve_loadgen.reports.files import (
    Outputs,
    Shown,
    measurements_of,
    read_report,
    show,
)
from specserve_loadgen.reports.html import render_html
from specserve_loadgen.reports.measurements import compared
from specserve_loadgen.reports.text import render_text

EXIT_OK, EXIT_USAGE = 0, 2


def main(argv: Sequence[str]) -> int:
    """Exit code 0: shown. 2: a file cannot be read, or two have nothing in common."""
    try:
        options = _parser().parse_args(argv)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    try:
        _run(options)
    except LoadgenError as error:
        print(f"specserve report: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return EXIT_OK


def _run(options: argparse.Namespace) -> None:
    outputs = Outputs(None, options.csv, options.html)
    outputs.check()
    report = read_report(options.file)
    if options.other is None:
        show(report, outputs)
        return
    if options.csv is not None:
        raise LoadgenError("--csv holds one file's numbers: give it with one file")
    document = comparison(options.file, report, options.other, read_report(options.other))
    print(render_text(document))
    if options.html is not None:
        options.html.write_text(render_html(document), encoding="utf-8")


def comparison(name: Path, report: Shown, other_name: Path, other: Shown) -> Document:
    table = compared(measurements_of(report), measurements_of(other))
    if not table.rows:
        raise LoadgenError(
            f"{name} ({report.schema}) and {other_name} ({other.schema}) measured nothing in "
            "common: compare files of one study with some of the same arms"
        )
    text = (
        "B / A with its 95 % interval, as of two independent runs. Differs: the interval leaves "
        "out 1. Of twenty rows that do not differ one will say yes by chance. `study ab` pairs "
        "prompts and minutes, and sees smaller differences."
    )
    return Document(
        title=f"{other_name.name} (B) against {name.name} (A)",
        lead=(f"A: {report.model}; B: {other.model}. {len(table.rows)} numbers in common.",),
        sections=(Section("Side by side", text, tables=(table,)),),
        facts=(
            ("A", f"{name}, {report.schema}, server {report.server_version or 'unknown'}"),
            ("B", f"{other_name}, {other.schema}, server {other.server_version or 'unknown'}"),
        ),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specserve report",
        description="Shows what `specserve study` or `specserve loadgen --json` wrote; with two "
        "files, compares all numbers that both have.",
        allow_abbrev=False,
    )
    parser.add_argument("file", type=Path, metavar="A.json")
    parser.add_argument("other", type=Path, nargs="?", metavar="B.json")
    parser.add_argument("--html", type=Path, metavar="FILE", help="a page that opens offline")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="every number, one a row")
    return parser

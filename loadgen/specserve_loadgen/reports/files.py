"""What each schema is read as and shown by; one more study is one more line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.report import SCHEMA as LOAD
from specserve_loadgen.report import Report
from specserve_loadgen.reports.acceptance import acceptance_document, acceptance_measurements
from specserve_loadgen.reports.comparisons import (
    ab_document,
    ab_measurements,
    capacity_document,
    capacity_measurements,
    lossless_document,
    lossless_measurements,
)
from specserve_loadgen.reports.document import Document
from specserve_loadgen.reports.html import render_html
from specserve_loadgen.reports.load import load_document, load_measurements
from specserve_loadgen.reports.measurements import Measurement, to_csv
from specserve_loadgen.reports.sweep import sweep_document, sweep_measurements
from specserve_loadgen.reports.text import render_text
from specserve_loadgen.studies.ab import SCHEMA as AB
from specserve_loadgen.studies.ab import AbStudy
from specserve_loadgen.studies.acceptance import SCHEMA as ACCEPTANCE
from specserve_loadgen.studies.acceptance import AcceptanceStudy
from specserve_loadgen.studies.capacity import SCHEMA as CAPACITY
from specserve_loadgen.studies.capacity import CapacityStudy
from specserve_loadgen.studies.lossless import SCHEMA as LOSSLESS
from specserve_loadgen.studies.lossless import LosslessStudy
from specserve_loadgen.sweep import SCHEMA as SWEEP
from specserve_loadgen.sweep import Sweep

Shown = AcceptanceStudy | AbStudy | LosslessStudy | CapacityStudy | Report | Sweep


class Shape(NamedTuple):
    kind: type[Shown]
    document: Callable[..., Document]
    measurements: Callable[..., Sequence[Measurement]]


SHAPES = {
    ACCEPTANCE: Shape(AcceptanceStudy, acceptance_document, acceptance_measurements),
    AB: Shape(AbStudy, ab_document, ab_measurements),
    LOSSLESS: Shape(LosslessStudy, lossless_document, lossless_measurements),
    CAPACITY: Shape(CapacityStudy, capacity_document, capacity_measurements),
    LOAD: Shape(Report, load_document, load_measurements),
    SWEEP: Shape(Sweep, sweep_document, sweep_measurements),
}


class _Head(msgspec.Struct, frozen=True):
    schema: str


def read_report(path: Path) -> Shown:
    """What a study or `loadgen --json` wrote. LoadgenError names the file and what is wrong."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise LoadgenError(f"{path}: {error.strerror or error}") from None
    try:
        schema = msgspec.json.decode(data, type=_Head).schema
        if schema not in SHAPES:
            raise LoadgenError(
                f"{path} holds {schema!r}; this version reads {', '.join(sorted(SHAPES))}"
            )
        return msgspec.json.decode(data, type=SHAPES[schema].kind)
    except msgspec.DecodeError as error:
        raise LoadgenError(f"{path} is no report: {error}") from None


def document_of(report: Shown) -> Document:
    return SHAPES[report.schema].document(report)


def measurements_of(report: Shown) -> Sequence[Measurement]:
    return SHAPES[report.schema].measurements(report)


class Outputs(NamedTuple):
    """Files to write; None: not asked for."""

    json: Path | None
    csv: Path | None
    html: Path | None

    def check(self) -> None:
        """Before an hour of measuring. LoadgenError names the option."""
        for name, path in self._asdict().items():
            if path is not None and not path.absolute().parent.is_dir():
                raise LoadgenError(f"--{name} {path}: its folder does not exist")

    def write(self, report: Shown) -> None:
        if self.json is not None:
            encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
            _write("--json", self.json, encoded + b"\n")
        if self.csv is not None:
            _write("--csv", self.csv, to_csv(measurements_of(report)).encode())
        if self.html is not None:
            _write("--html", self.html, render_html(document_of(report)).encode())


def show(report: Shown, outputs: Outputs) -> None:
    """To the terminal, and into the files."""
    print(render_text(document_of(report)), flush=True)
    outputs.write(report)


def _write(flag: str, path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise LoadgenError(f"{flag} {path}: {error.strerror or error}") from None

"""`specserve bench step`: a decode step taken apart, against the floor of its matrix products.

For every batch and K one line: the step, the floor of the same rows measured in between, their
ratio, and what the rest is. `--context-sweep` fits step time against attended tokens; `--waiting N`
shows the host's part with N requests in the queue.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from specserve.bench.floor import floor_of
from specserve.bench.measure import Breakdown, Case, measure
from specserve.errors import ConfigError
from specserve.loading import (
    DTYPES,
    LoadedModel,
    check_backend,
    choose_dtype,
    load_model,
    use_threads,
)
from specserve.version import __version__

SWEEP = (128, 256, 512, 1024, 2048, 4096, 8192)


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """step = fixed + slope * attended tokens, by least squares."""

    batch: int
    fixed_ms: float
    ms_per_1000_tokens: float
    r_squared: float


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    schema_version: int = 1
    kind: str = "specserve.bench.step"
    version: str = __version__
    model: str
    dtype: str
    decoder: str  # the class that ran the forward
    threads: int
    machine: str
    torch: str
    cases: tuple[Breakdown, ...]
    fit: Fit | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `specserve bench step`."""
    parser.add_argument("--model", default="demo", help="as for serve (default: demo)")
    parser.add_argument("--dtype", choices=("auto", *DTYPES), default="auto", help="as for serve")
    parser.add_argument("--backend", default="auto", help="as for serve (default: auto)")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--batch", default="1,4,8,16", help="default: %(default)s")
    parser.add_argument("--guesses", default="0,3,7", help="K of every row; default: %(default)s")
    parser.add_argument("--context", type=int, default=256, help="default: %(default)s tokens")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="per line; default: %(default)s")
    parser.add_argument(
        "--waiting",
        type=int,
        default=0,
        metavar="N",
        help="measure the largest batch once more while N requests wait",
    )
    parser.add_argument(
        "--context-sweep",
        action="store_true",
        help="instead: the first batch without guesses at contexts of 128 to 8,192 tokens",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")


def run(options: argparse.Namespace) -> int:
    """Measure and print; ConfigError says what to change."""
    batches = _numbers("--batch", options.batch, least=1)
    guesses = _numbers("--guesses", options.guesses, least=0)
    for name, least in (("context", 2), ("steps", 1), ("threads", 0), ("waiting", 0)):
        value = getattr(options, name)  # the names are options of add_arguments
        if value < least:
            raise ConfigError(f"--{name} is {value}, it must be at least {least}")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {options.json}: its folder does not exist")
    check_backend(options.backend)
    use_threads(options.threads)
    dtype = choose_dtype(options.dtype)
    loaded = load_model(options.model, dtype, options.backend, _say)
    limit = loaded.decoder.max_position_embeddings
    cases = (
        sweep_cases(batches[0], options.temperature, limit, options.steps)
        if options.context_sweep
        else grid_cases(batches, guesses, options.context, options.temperature, options.waiting)
    )
    report = bench(options.model, dtype, loaded, cases, options.steps)
    if options.context_sweep:
        report = msgspec.structs.replace(report, fit=fit_of(report.cases))
    print(render(report))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    return 0


def _numbers(flag: str, text: str, *, least: int) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least:
        raise ConfigError(f"{flag} is {text!r}, it must be whole numbers of at least {least}")
    return numbers


def grid_cases(
    batches: Sequence[int],
    guesses: Sequence[int],
    context: int,
    temperature: float,
    num_waiting: int,
) -> list[Case]:
    """Every batch with every K, and at the end the largest batch beside a queue, if one is asked
    for."""
    cases = [
        Case(batch=batch, num_guesses=count, context=context, temperature=temperature)
        for batch in batches
        for count in guesses
    ]
    if num_waiting:
        largest = msgspec.structs.replace(cases[-1], batch=max(batches), num_guesses=0)
        cases += [largest, msgspec.structs.replace(largest, num_waiting=num_waiting)]
    return cases


def sweep_cases(batch: int, temperature: float, limit: int, num_steps: int) -> list[Case]:
    """Contexts of SWEEP that the model can hold beside the measured steps, the last one cut."""
    longest = limit - num_steps - 8
    contexts = sorted({min(context, longest) for context in SWEEP})
    return [
        Case(batch=batch, num_guesses=0, context=context, temperature=temperature)
        for context in contexts
    ]


def bench(
    model: str, dtype: str, loaded: LoadedModel, cases: Sequence[Case], num_steps: int
) -> StepReport:
    """Measure the cases one after the other; progress goes to standard error."""
    threads = torch.get_num_threads()
    floor = floor_of(loaded.decoder, loaded.decoder.config, DTYPES[dtype], threads)
    found = []
    for case in cases:
        _say(f"batch {case.batch}, K {case.num_guesses}, context {case.context} ...")
        found.append(measure(loaded, floor, case, num_steps))
    return StepReport(
        model=model,
        dtype=dtype,
        decoder=type(loaded.decoder).__name__,
        threads=threads,
        machine=f"{platform.system()} {platform.machine()}",
        torch=str(torch.__version__),
        cases=tuple(found),
    )


def fit_of(cases: Sequence[Breakdown]) -> Fit:
    """Step time over attended tokens; at least two contexts."""
    points = [(one.case.batch * one.case.context, one.step) for one in cases]
    fixed, slope, r_squared = least_squares(points)
    return Fit(
        batch=cases[0].case.batch,
        fixed_ms=fixed,
        ms_per_1000_tokens=1000 * slope,
        r_squared=r_squared,
    )


def least_squares(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """(intercept, slope, R squared) of y over x. Needs two different x."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    intercept = mean_y - slope * mean_x
    residue = sum((y - intercept - slope * x) ** 2 for x, y in points)
    total = sum((y - mean_y) ** 2 for y in ys)
    return intercept, slope, 1 - residue / total if total else 1.0


HEADERS = (
    *("batch", "K", "context", "waiting", "rows", "step", "floor", "ratio"),
    *("forward", "gemm", "attention", "rest", "draft", "verify", "host", "(plan)"),
)


def render(report: StepReport) -> str:
    """The table, in milliseconds."""
    rows = [list(HEADERS)]
    for one in report.cases:
        case = one.case
        counts = (case.batch, case.num_guesses, case.context, case.num_waiting, one.num_rows)
        times = (one.forward, one.gemm, one.attention, one.rest, one.draft, one.verify, one.host)
        rows.append(
            [
                *(str(count) for count in counts),
                *(f"{one.step:.2f}", f"{one.floor:.2f}", f"{one.ratio:.2f}"),
                *("-" if value is None else f"{value:.2f}" for value in times),
                f"{one.plan:.3f}",
            ]
        )
    widths = [max(len(row[idx]) for row in rows) for idx in range(len(HEADERS))]
    lines = [
        f"{report.model} as {report.dtype}, {report.decoder}, {report.threads} threads, "
        f"{report.machine}, torch {report.torch}; medians in ms",
        *(
            "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
            for row in rows
        ),
    ]
    if report.fit is not None:
        lines.append(
            f"step = {report.fit.fixed_ms:.2f} ms + {report.fit.ms_per_1000_tokens:.3f} ms per "
            f"1,000 attended tokens, R^2 = {report.fit.r_squared:.4f} "
            f"(batch {report.fit.batch})"
        )
    return "\n".join(lines)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

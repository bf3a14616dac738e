"""`specserve study NAME`: experiments over HTTP that end in a table and a JSON file."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from specserve_loadgen.cli import EXIT_FAILURES, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.never_slower import Arm, Cell, Plan, Study, run_study
from specserve_loadgen.never_slower_report import describe, render_study
from specserve_loadgen.studies.command import COMMANDS
from specserve_loadgen.studies.command import main as studies_main


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: what the study asks for holds. 1: it does not. 2: it could not run."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments and arguments[0] in COMMANDS:
        return studies_main(arguments)
    try:
        options = _parser().parse_args(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    try:
        study = asyncio.run(
            run_study(
                plan_from(options), lambda cell: print(describe(cell), flush=True), options.api_key
            )
        )
    except LoadgenError as error:
        print(f"specserve study: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    print(render_study(study))
    if options.json is not None:
        _write(study, options.json)
    return EXIT_FAILURES if study.num_failing else EXIT_OK


def _say(cell: Cell) -> None:
    print(describe(cell), flush=True)


def _write(study: Study, path: Path) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(study), indent=2) + b"\n")


def plan_from(options: argparse.Namespace) -> Plan:
    return Plan(
        url=options.url.rstrip("/").removesuffix("/v1"),
        fixed=tuple(parse_arm(text) for text in options.fixed.split(",") if text),
        concurrencies=_numbers("--concurrency", options.concurrency),
        workloads=tuple(name for name in options.workloads.split(",") if name),
        rounds=options.rounds,
        most_rounds=options.most_rounds,
        max_tokens=options.max_tokens,
        requests_per_user=options.requests_per_user,
        seconds_per_cell=options.seconds_per_cell,
        temperature=options.temperature,
        seed=options.seed,
    )


def parse_arm(text: str) -> Arm:
    """`suffix:7` -> the arm that forces drafter suffix with K = 7."""
    drafter, _, number = text.partition(":")
    if not drafter or not number.isdigit() or int(number) < 1:
        raise LoadgenError(f"--fixed {text}: write DRAFTER:K with K of at least 1, as in suffix:3")
    return Arm(text, drafter, int(number))


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    parts = [part for part in text.split(",") if part]
    if not parts or not all(part.isdigit() and int(part) >= 1 for part in parts):
        raise LoadgenError(f"{flag} {text}: write whole numbers of at least 1, as in 1,4,16")
    return tuple(int(part) for part in parts)


def _at_least_1(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    if not text.replace(".", "", 1).isdigit() or float(text) <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return float(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specserve study",
        description="Experiments on a running server. never-slower: speculation auto against off "
        "and against every fixed choice, interleaved, by concurrency and workload. "
        "`study regret --help`: looking back upon recorded steps, without a server.",
        allow_abbrev=False,
    )
    parser.add_argument("name", choices=("never-slower",))
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument(
        "--fixed", default="suffix:3,suffix:7", metavar="D:K,...", help="fixed choices"
    )
    parser.add_argument("--concurrency", default="1,4,8,16,32", metavar="N,...")
    parser.add_argument(
        "--workloads",
        default="chat,summarise,code,edit,random",
        metavar="A,...",
        help="categories of the shipped prompts, random, or adversarial (a server with "
        "--drafters suffix,ngram,anti)",
    )
    parser.add_argument("--rounds", type=_at_least_1, default=6, help="default: 6")
    parser.add_argument(
        "--most-rounds",
        type=_at_least_1,
        default=18,
        metavar="N",
        help="of a cell whose intervals do not tell whether it holds (default: 18)",
    )
    parser.add_argument("--max-tokens", type=_at_least_1, default=96)
    parser.add_argument("--requests-per-user", type=_at_least_1, default=3)
    parser.add_argument(
        "--seconds-per-cell",
        type=_seconds,
        metavar="S",
        help="instead: as many requests as fit; 25 cells of 60 take 25 minutes, and longer where "
        "more rounds are needed",
    )
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token, in no report")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole study there")
    return parser

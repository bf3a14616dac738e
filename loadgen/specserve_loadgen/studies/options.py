"""Command-line options that several studies share, and their checks."""

from __future__ import annotations

import argparse
from pathlib import Path

from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.options import NATURAL, NOT_NEGATIVE, POSITIVE_INT, base_url
from specserve_loadgen.prompts import Prompt
from specserve_loadgen.reports.files import Outputs
from specserve_loadgen.studies.cells import Target, chosen_prompts


def add_request_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    parser.add_argument(
        "--prompts", metavar="FILE", help="as for loadgen; default: the shipped pack"
    )
    parser.add_argument("--categories", default="", metavar="A,B", help="only these of the prompts")
    parser.add_argument(
        "--per-category", type=POSITIVE_INT, metavar="N", help="at most so many prompts of each"
    )
    parser.add_argument(
        "--max-tokens",
        type=POSITIVE_INT,
        default=max_tokens,
        metavar="N",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="go on behind the end of the text; biases acceptance",
    )
    parser.add_argument("--seed", type=NATURAL, default=0, help="request i samples with seed + i")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole study there")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="every number with its interval")
    parser.add_argument("--html", type=Path, metavar="FILE", help="a page that opens offline")


def target_from(options: argparse.Namespace) -> Target:
    return Target(
        url=base_url(options.url),
        model=options.model,
        endpoint=options.endpoint,
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
        seed=options.seed,
    )


def prompts_from(options: argparse.Namespace) -> list[Prompt]:
    categories = [name for name in options.categories.split(",") if name]
    return chosen_prompts(options.prompts, categories, options.per_category)


def outputs_from(options: argparse.Namespace) -> Outputs:
    return Outputs(options.json, options.csv, options.html)


def numbers(flag: str, text: str) -> tuple[int, ...]:
    parts = [part for part in text.split(",") if part]
    if not parts or not all(part.isdigit() and int(part) >= 1 for part in parts):
        raise LoadgenError(f"{flag} {text}: write whole numbers of at least 1, as in 1,4,16")
    return tuple(dict.fromkeys(int(part) for part in parts))


def temperatures(text: str) -> tuple[float | None, ...]:
    """`0,0.7`; `default` leaves it to the server."""
    found: list[float | None] = []
    for part in (part for part in text.split(",") if part):
        try:
            found.append(None if part == "default" else NOT_NEGATIVE(part))
        except argparse.ArgumentTypeError:
            raise LoadgenError(
                f"--temperatures {text}: write numbers of at least 0, as in 0,0.7"
            ) from None
    if not found:
        raise LoadgenError("--temperatures: name at least one")
    return tuple(dict.fromkeys(found))

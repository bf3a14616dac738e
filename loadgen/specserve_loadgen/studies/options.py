"""Command-line options that several studies share, and their checks."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from urllib.parse import urlsplit

from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.reports.files import Outputs
from specserve_loadgen.studies.cells import Target


def add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token, in no report")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat")


def add_request_options(parser: argparse.ArgumentParser, max_tokens: int) -> None:
    parser.add_argument(
        "--prompts", metavar="FILE", help="as for loadgen; default: the shipped pack"
    )
    parser.add_argument("--categories", default="", metavar="A,B", help="only these of the prompts")
    parser.add_argument(
        "--per-category", type=at_least_1, metavar="N", help="at most so many prompts of each"
    )
    parser.add_argument(
        "--max-tokens",
        type=at_least_1,
        default=max_tokens,
        metavar="N",
        help="default: %(default)s",
    )
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="go on behind the end of the text; biases acceptance",
    )
    parser.add_argument("--seed", type=natural, default=0, help="request i samples with seed + i")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole study there")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="every number with its interval")
    parser.add_argument("--html", type=Path, metavar="FILE", help="a page that opens offline")


def target_from(options: argparse.Namespace, url: str | None = None) -> Target:
    return Target(
        url=base_url("--url", options.url if url is None else url),
        model=options.model,
        endpoint=options.endpoint,
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
        seed=options.seed,
    )


def outputs_from(options: argparse.Namespace) -> Outputs:
    return Outputs(options.json, options.csv, options.html)


def base_url(flag: str, url: str) -> str:
    """scheme://host:port of an address with or without a path such as /v1."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise LoadgenError(f"{flag} {url}: not an address such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def at_least_1(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def natural(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 0")
    return int(text)


def positive(text: str) -> float:
    return _number(text, "a number above 0", least=0.0, or_equal=False)


def not_negative(text: str) -> float:
    return _number(text, "a number of at least 0", least=0.0, or_equal=True)


def _number(text: str, what: str, *, least: float, or_equal: bool) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
    if not math.isfinite(value) or value < least or (value == least and not or_equal):
        raise argparse.ArgumentTypeError(f"{text} is not {what}")
    return value


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
            found.append(None if part == "default" else not_negative(part))
        except argparse.ArgumentTypeError:
            raise LoadgenError(
                f"--temperatures {text}: write numbers of at least 0, as in 0,0.7"
            ) from None
    if not found:
        raise LoadgenError("--temperatures: name at least one")
    return tuple(dict.fromkeys(found))

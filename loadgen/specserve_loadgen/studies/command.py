"""`specserve study acceptance | ab | lossless | capacity`: options in, report out.

Exit code 0: done, and what the study asks for holds. 1: it does not. 2: it could not run. 130:
Ctrl-C before anything was measured; later Ctrl-C reports what there is.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specserve_loadgen.cli import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.reports.files import show
from specserve_loadgen.studies.acceptance import Plan as AcceptancePlan
from specserve_loadgen.studies.acceptance import run_acceptance
from specserve_loadgen.studies.arms import OFF, UNASKED, parse_arms
from specserve_loadgen.studies.options import (
    add_output_options,
    add_request_options,
    add_server_options,
    at_least_1,
    numbers,
    outputs_from,
    positive,
    target_from,
    temperatures,
)


class Command(NamedTuple):
    """run: of parsed options, returns the exit code"""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    help: str


def main(argv: Sequence[str]) -> int:
    """argv: NAME and its options; NAME is one of COMMANDS."""
    command = COMMANDS[argv[0]]
    parser = argparse.ArgumentParser(
        prog=f"specserve study {argv[0]}", description=command.help, allow_abbrev=False
    )
    command.add_arguments(parser)
    try:
        options = parser.parse_args(argv[1:])
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    try:
        return command.run(options)
    except LoadgenError as error:
        print(f"specserve study {argv[0]}: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _add_acceptance(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser)
    parser.add_argument(
        "--arms",
        default="suffix:1,suffix:3,suffix:7,auto",
        metavar="A,...",
        help="DRAFTER:K, auto, each with @RULE if not replay; `off` is always beside them; "
        "`unasked` for servers that know no such options",
    )
    parser.add_argument("--temperatures", default="0", metavar="T,...", help="default: 0")
    parser.add_argument("--concurrency", default="1", metavar="N,...", help="default: 1")
    add_request_options(parser, max_tokens=128)
    parser.add_argument(
        "--block",
        type=at_least_1,
        metavar="N",
        help="prompts per block; default 2 per user, 4 at least",
    )
    parser.add_argument(
        "--seconds", type=positive, metavar="S", help="begin no block after S seconds"
    )
    add_output_options(parser)


def _run_acceptance(options: argparse.Namespace) -> int:
    outputs = outputs_from(options)
    outputs.check()
    arms = parse_arms("--arms", options.arms)
    concurrencies = numbers("--concurrency", options.concurrency)
    plan = AcceptancePlan(
        target=target_from(options),
        # A server that is not to be asked has no "off" either.
        arms=arms if arms == (UNASKED,) else (OFF, *(arm for arm in arms if arm != OFF)),
        temperatures=temperatures(options.temperatures),
        concurrencies=concurrencies,
        prompts_file=options.prompts,
        categories=tuple(name for name in options.categories.split(",") if name),
        per_category=options.per_category,
        block_size=options.block or max(4, 2 * max(concurrencies)),
        seconds=options.seconds,
    )
    study = asyncio.run(run_acceptance(plan, _say, options.api_key))
    show(study, outputs)
    return EXIT_INTERRUPTED if study.interrupted else EXIT_OK


COMMANDS = {
    "acceptance": Command(
        _add_acceptance,
        _run_acceptance,
        "How long accepted runs are, by drafter, K, temperature, kind of prompt, position and "
        "context, and what that buys in speed, against the same prompts without speculation.",
    ),
}

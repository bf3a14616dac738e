"""`specserve study acceptance | ab | lossless | capacity`: options in, report out.

Exit code 0: done, and what the study asks for holds. 1: it does not. 2: it could not run. 130:
Ctrl-C before anything was measured; later Ctrl-C reports what there is.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from specserve_loadgen.cli import EXIT_FAILURES, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.options import (
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_INT,
    add_server_options,
    base_url,
    parse_slo,
)
from specserve_loadgen.reports.files import show
from specserve_loadgen.studies.ab import Plan as AbPlan
from specserve_loadgen.studies.ab import Side, run_ab
from specserve_loadgen.studies.acceptance import Plan as AcceptancePlan
from specserve_loadgen.studies.acceptance import run_acceptance
from specserve_loadgen.studies.arms import OFF, UNASKED, parse_arm, parse_arms
from specserve_loadgen.studies.capacity import Plan as CapacityPlan
from specserve_loadgen.studies.capacity import run_capacity
from specserve_loadgen.studies.cells import Cell
from specserve_loadgen.studies.lossless import Plan as LosslessPlan
from specserve_loadgen.studies.lossless import run_lossless
from specserve_loadgen.studies.options import (
    add_output_options,
    add_request_options,
    numbers,
    outputs_from,
    prompts_from,
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
        type=POSITIVE_INT,
        metavar="N",
        help="prompts per block; default 2 per user, 4 at least",
    )
    parser.add_argument(
        "--seconds", type=POSITIVE, metavar="S", help="begin no block after S seconds"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="keep finished blocks there; with the same options again, go on behind them",
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
    study = asyncio.run(run_acceptance(plan, _say, options.api_key, options.resume))
    show(study, outputs)
    if study.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if study.failure is None else EXIT_FAILURES


def _add_ab(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser)
    parser.add_argument("--b-url", metavar="URL", help="B's server; default: A's")
    parser.add_argument("--a", default="off", metavar="ARM", help="default: off")
    parser.add_argument("--b", default="auto", metavar="ARM", help="default: auto")
    parser.add_argument("--temperature", type=NOT_NEGATIVE, default=0.0, metavar="T")
    parser.add_argument("--concurrency", type=POSITIVE_INT, default=1, metavar="N")
    add_request_options(parser, max_tokens=128)
    parser.add_argument(
        "--seconds", type=POSITIVE, metavar="S", help="begin no pair of blocks after S seconds"
    )
    add_output_options(parser)


def _run_ab(options: argparse.Namespace) -> int:
    outputs = outputs_from(options)
    outputs.check()
    target = target_from(options)
    b_target = target
    if options.b_url is not None:
        b_target = msgspec.structs.replace(target, url=base_url(options.b_url, "--b-url"))
    users = options.concurrency
    plan = AbPlan(
        a=Side("A", target, parse_arm("--a", options.a)),
        b=Side("B", b_target, parse_arm("--b", options.b)),
        cell=Cell(options.temperature, users),
        prompts_file=options.prompts,
        block_size=1 if users == 1 else 2 * users,
        seconds=options.seconds,
    )
    study = asyncio.run(run_ab(plan, prompts_from(options), _say, options.api_key))
    show(study, outputs)
    if study.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if study.holds else EXIT_FAILURES


def _add_lossless(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser)
    parser.add_argument(
        "--arms",
        default="suffix:3,suffix:7,auto",
        metavar="A,...",
        help="DRAFTER:K or auto: token for token; with @block, @rejection, @typical behind it: law",
    )
    parser.add_argument("--temperatures", default="0,0.7", metavar="T,...", help="default: 0,0.7")
    parser.add_argument("--concurrency", type=POSITIVE_INT, default=4, metavar="N")
    add_request_options(parser, max_tokens=128)
    law = parser.add_argument_group("tests of the distribution")
    law.add_argument("--samples", type=POSITIVE_INT, default=100, metavar="N", help="per prompt")
    law.add_argument("--sample-tokens", type=POSITIVE_INT, default=6, metavar="N")
    law.add_argument("--law-prompts", type=POSITIVE_INT, default=4, metavar="N")
    add_output_options(parser)


def _run_lossless(options: argparse.Namespace) -> int:
    outputs = outputs_from(options)
    outputs.check()
    found = temperatures(options.temperatures)
    plan = LosslessPlan(
        target=target_from(options),
        arms=parse_arms("--arms", options.arms),
        temperatures=tuple(t for t in found if t is not None),
        concurrency=options.concurrency,
        prompts_file=options.prompts,
        num_samples=options.samples,
        sample_tokens=options.sample_tokens,
        num_law_prompts=options.law_prompts,
    )
    if len(plan.temperatures) != len(found):
        raise LoadgenError("--temperatures default: name numbers, so that both sides have the same")
    study = asyncio.run(run_lossless(plan, prompts_from(options), _say, options.api_key))
    show(study, outputs)
    return EXIT_OK if study.holds else EXIT_FAILURES


def _add_capacity(parser: argparse.ArgumentParser) -> None:
    add_server_options(parser)
    parser.add_argument(
        "--slo",
        required=True,
        metavar="NAME:MS,...",
        help="of ttft, tpot, e2e, as ttft:500,tpot:50",
    )
    parser.add_argument("--arm", default="unasked", metavar="ARM", help="default: unasked")
    parser.add_argument("--share", type=_share, default=0.9, help="that must be good; default 0.9")
    parser.add_argument("--first-rate", type=POSITIVE, default=1.0, metavar="R", help="default: 1")
    parser.add_argument("--most-rate", type=POSITIVE, default=1000.0, metavar="R")
    parser.add_argument(
        "--num-requests", type=POSITIVE_INT, default=60, metavar="N", help="of each rate"
    )
    parser.add_argument("--temperature", type=NOT_NEGATIVE, metavar="T")
    add_request_options(parser, max_tokens=64)
    parser.add_argument(
        "--seconds", type=POSITIVE, metavar="S", help="begin no rate after S seconds"
    )
    add_output_options(parser)


def _share(text: str) -> float:
    value = POSITIVE(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share of at most 1")
    return value


def _run_capacity(options: argparse.Namespace) -> int:
    outputs = outputs_from(options)
    outputs.check()
    slo = parse_slo(options.slo)
    if slo is None:
        raise LoadgenError("--slo: name at least one limit, as in ttft:500")
    plan = CapacityPlan(
        target=target_from(options),
        arm=parse_arm("--arm", options.arm),
        slo=slo,
        share=options.share,
        first_rate=options.first_rate,
        most_rate=options.most_rate,
        num_requests=options.num_requests,
        temperature=options.temperature,
        prompts_file=options.prompts,
        seconds=options.seconds,
    )
    study = asyncio.run(run_capacity(plan, prompts_from(options), _say, options.api_key))
    show(study, outputs)
    if study.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if study.capacity is not None else EXIT_FAILURES


COMMANDS = {
    "acceptance": Command(
        _add_acceptance,
        _run_acceptance,
        "How long accepted runs are, by drafter, K, temperature, kind of prompt, position and "
        "context, and what that buys in speed, against the same prompts without speculation.",
    ),
    "ab": Command(
        _add_ab,
        _run_ab,
        "Two servers, or two settings of one: the same prompts and seeds in turn, B / A with its "
        "interval, and whether the texts are equal.",
    ),
    "lossless": Command(
        _add_lossless,
        _run_lossless,
        "Whether speculation changes what is said: token for token against speculation off, and "
        "for rules that promise the law alone by tests of the distribution.",
    ),
    "capacity": Command(
        _add_capacity,
        _run_capacity,
        "The highest rate of requests at which enough of them keep the limits that are set.",
    ),
}

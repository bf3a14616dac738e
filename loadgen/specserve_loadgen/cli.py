"""`specserve loadgen`: options in, table and JSON file out. `loadgen peers` compares servers.

Exit code 0: every request succeeded. 1: some failed. 2: the run could not start. 130: Ctrl-C,
after printing what was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.peers import add_peers_arguments, run_peers
from specserve_loadgen.prompts import load_prompts
from specserve_loadgen.render import render
from specserve_loadgen.report import make_report, to_json
from specserve_loadgen.run import run_load
from specserve_loadgen.settings import ClosedLoop, Load, OpenLoop, Settings

EXIT_OK, EXIT_FAILURES, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load generator with `argv` (None: the process's own) and return the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    compares = arguments[:1] == ["peers"]
    try:
        options = (
            _peers_parser().parse_args(arguments[1:])
            if compares
            else (_parser().parse_args(arguments))
        )
    except SystemExit as stop:  # argparse has printed its message; --help stops with 0
        return stop.code if isinstance(stop.code, int) else EXIT_USAGE
    try:
        return run_peers(options) if compares else _run(options)
    except LoadgenError as error:
        print(f"specserve loadgen: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("specserve loadgen: stopped before anything was measured", file=sys.stderr)
        return EXIT_INTERRUPTED


def _run(options: argparse.Namespace) -> int:
    settings = settings_from(options)
    prompts = load_prompts(settings.prompts_file, settings.categories)
    json_file: Path | None = options.json
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise LoadgenError(f"--json {json_file}: its folder does not exist")
    result = asyncio.run(
        run_load(
            settings,
            prompts,
            api_key=options.api_key,
            show_progress=not options.no_progress and sys.stderr.isatty(),
        )
    )
    report = make_report(settings, result)
    print(render(report))
    if json_file is not None:
        try:
            json_file.write_bytes(to_json(report))
        except OSError as error:
            raise LoadgenError(f"--json {json_file}: {error.strerror or error}") from None
    if report.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILURES if report.num_failed else EXIT_OK


def settings_from(options: argparse.Namespace) -> Settings:
    """The checked settings of parsed options. Raises LoadgenError for an address with no host."""
    load: Load = ClosedLoop(options.concurrency or 1)
    if options.rate is not None:
        load = OpenLoop(options.rate)
    return Settings(
        url=_base_url(options.url),
        endpoint=options.endpoint,
        prompts_file=options.prompts,
        categories=tuple(name for name in options.categories.split(",") if name),
        load=load,
        num_requests=options.num_requests,
        duration=options.duration,
        warmup=options.warmup,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        ignore_eos=options.ignore_eos,
        drafter=options.drafter,
        max_draft_tokens=options.max_draft_tokens,
        verify=options.verify,
        model=options.model,
        request_timeout=options.request_timeout,
    )


def _base_url(url: str) -> str:
    """scheme://host:port of an address given with or without a path such as /v1."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise LoadgenError(f"--url {url}: not an address such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _number(
    kind: Callable[[str], float], what: str, holds: Callable[[float], bool]
) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
        if not math.isfinite(value) or not holds(value):
            raise argparse.ArgumentTypeError(f"{text} is not {what}")
        return value

    return parse


_POSITIVE_INT = _number(int, "a whole number of at least 1", lambda value: value >= 1)
_NATURAL = _number(int, "a whole number of at least 0", lambda value: value >= 0)
_POSITIVE = _number(float, "a number above 0", lambda value: value > 0)
_NOT_NEGATIVE = _number(float, "a number of at least 0", lambda value: value >= 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specserve loadgen",
        description="Load a streaming LLM server over HTTP and measure latency, throughput and "
        "what speculation gave. Without --prompts it sends the shipped pack once.",
        epilog="exit code: 0 all succeeded, 1 some failed, 2 could not start, 130 stopped. "
        "`specserve loadgen peers --help`: comparing our server with others.",
        allow_abbrev=False,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token, in no report")
    _add_load_options(parser)
    _add_request_options(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report there")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    return parser


def _peers_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specserve loadgen peers",
        description="Starts our server and each installed peer in turn, measures them on the same "
        "prompts over HTTP, and prints ratios. Takes over an hour; wants an idle machine.",
        epilog="exit code: 0 all measured, 1 some server or request failed, 2 could not start",
        allow_abbrev=False,
    )
    add_peers_arguments(parser)
    return parser


def _add_load_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument(
        "--prompts", metavar="FILE", help=".jsonl with prompt, turns or messages; else one a line"
    )
    group.add_argument("--categories", default="", metavar="A,B", help="only these of the prompts")
    pace = group.add_mutually_exclusive_group()
    pace.add_argument(
        "--concurrency", type=_POSITIVE_INT, metavar="N", help="closed loop of N users; default 1"
    )
    pace.add_argument(
        "--rate", type=_POSITIVE, metavar="R", help="open loop: Poisson arrivals, R requests/s"
    )
    length = group.add_mutually_exclusive_group()
    length.add_argument(
        "--num-requests", type=_POSITIVE_INT, metavar="N", help="default: each prompt once"
    )
    length.add_argument(
        "--duration", type=_POSITIVE, metavar="S", help="start requests for S seconds, await all"
    )
    group.add_argument(
        "--warmup", type=_NATURAL, default=0, metavar="N", help="requests before, in no number"
    )
    group.add_argument(
        "--request-timeout", type=_POSITIVE, default=600.0, metavar="S", help="default: 600"
    )


def _add_request_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--max-tokens", type=_POSITIVE_INT, default=128, metavar="N")
    group.add_argument("--temperature", type=_NOT_NEGATIVE, metavar="T")
    group.add_argument(
        "--seed", type=_NATURAL, default=0, metavar="S", help="of the arrivals; request i has S+i"
    )
    group.add_argument("--ignore-eos", action="store_true")
    group.add_argument("--drafter", metavar="D", help="sent as speculation.drafter")
    group.add_argument("--max-draft-tokens", type=_NATURAL, metavar="K")
    group.add_argument("--verify", metavar="V", help="replay, block, rejection or typical")

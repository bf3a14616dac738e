"""`specserve loadgen`: options in, table and JSON file out. `loadgen peers` compares servers.

Exit code 0: every request succeeded. 1: some failed. 2: the run could not start. 130: Ctrl-C,
after printing what was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.options import (
    add_load_options,
    add_prompt_options,
    add_request_options,
    add_server_options,
    settings_from,
)
from specserve_loadgen.peers import add_peers_arguments, run_peers
from specserve_loadgen.prompt import Prompt
from specserve_loadgen.prompt_sets import prompts_for
from specserve_loadgen.render import render
from specserve_loadgen.report import make_report, to_json
from specserve_loadgen.reports.files import Outputs, show
from specserve_loadgen.run import run_load
from specserve_loadgen.settings import Settings
from specserve_loadgen.sweep import run_sweep

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
    prompts = prompts_for(settings)
    json_file: Path | None = options.json
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise LoadgenError(f"--json {json_file}: its folder does not exist")
    if options.sweep is not None:
        return _run_sweep(options, settings, prompts)
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


def _run_sweep(options: argparse.Namespace, settings: Settings, prompts: Sequence[Prompt]) -> int:
    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    sweep = asyncio.run(run_sweep(settings, options.sweep, prompts, say, options.api_key))
    show(sweep, Outputs(options.json, None, None))
    if sweep.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILURES if any(level.num_failed for level in sweep.levels) else EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specserve loadgen",
        description="Load a streaming LLM server over HTTP and measure latency, throughput and "
        "what speculation gave. Without --prompts it sends the shipped pack once.",
        epilog="exit code: 0 all succeeded, 1 some failed, 2 could not start, 130 stopped. "
        "`specserve loadgen peers --help`: comparing our server with others.",
        allow_abbrev=False,
    )
    add_server_options(parser)
    add_prompt_options(parser)
    add_load_options(parser)
    add_request_options(parser)
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

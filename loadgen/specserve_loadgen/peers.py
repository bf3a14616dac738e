"""`specserve loadgen peers`: our server and others, in turn, on the same prompts.

A round starts every server once, measures all cells and stops it: A B C, A B C, ... One server
runs at a time. After each turn the report so far is written, so that a long run that is stopped
has lost nothing. Installing (`--install`) is in `peers_install`, what is started in
`peers_servers`, what is measured in `peers_measure`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from specserve_loadgen.ended import run_until_ended
from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.peers_install import default_cache, install
from specserve_loadgen.peers_measure import Cell, Measured, Turn, make_cells, split_workloads
from specserve_loadgen.peers_process import busy_cores, cpu_seconds, describe_machine, memory_of
from specserve_loadgen.peers_recipes import NAMES, recipes
from specserve_loadgen.peers_report import (
    PeerReport,
    PeerSettings,
    TurnNotes,
    complete,
    render,
    to_json,
)
from specserve_loadgen.peers_servers import Lineup, Running, Server, lineup
from specserve_loadgen.prompts import Prompt, load_prompts

LOOK_SECONDS = 1.0  # at the idle machine before a start, and at the idle server after it


def add_peers_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--install", action="store_true", help="set up the peers, then stop")
    parser.add_argument("--list", action="store_true", help="say what would run, then stop")
    parser.add_argument("--peers", default=",".join(NAMES), help="default: %(default)s")
    parser.add_argument(
        "--only", default="", metavar="A,B", help="servers whose name contains one of these"
    )
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--concurrency", default="1,4,8,16", help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--prompts", metavar="FILE", help="default: the shipped pack")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the whole report there")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="default: %(default)s")
    parser.add_argument(
        "--serve",
        default=f"{sys.executable} -m specserve serve",
        metavar="COMMAND",
        help="how our server is started; default: %(default)s",
    )
    parser.add_argument(
        "--auto", default="", metavar="FLAGS", help="of ours with speculation; default: none"
    )
    parser.add_argument(
        "--model-dir", type=Path, help="the demo model's folder; default: our `pull demo` says"
    )


def run_peers(options: argparse.Namespace) -> int:
    """The exit code: 0 when every server was measured in every round, 1 otherwise."""
    settings = settings_from(options)
    cache: Path = options.cache.absolute()
    model_dir = options.model_dir or _demo_dir(settings.serve)
    if options.install:
        return _install(settings.peers, cache, model_dir)
    chosen = restrict(
        lineup(cache, model_dir, settings.serve, peers=settings.peers, auto=settings.auto),
        settings.only,
    )
    if options.list:
        for server in chosen.servers:
            print(f"{server.name}\n    {shlex.join(server.argv)}")
        for name, reason in chosen.left_out.items():
            print(f"left out: {name}: {reason}")
        return 0
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise LoadgenError(f"--json {options.json}: its folder does not exist")
    prompts = load_prompts(settings.prompts_file)
    report, interrupted = compare(settings, chosen, prompts, cache / "logs", options.json)
    print(render(report))
    if interrupted:
        return 130
    failed = any(turn.error for turn in report.turns) or any(m.num_failed for m in report.measured)
    return 1 if failed else 0


def settings_from(options: argparse.Namespace) -> PeerSettings:
    """The checked settings of parsed options. LoadgenError names option, value and limit."""
    peers = _words(options.peers)
    if unknown := [name for name in peers if name not in NAMES]:
        raise LoadgenError(f"--peers {','.join(unknown)}: known are {', '.join(NAMES)}")
    try:
        concurrency = tuple(int(word) for word in _words(options.concurrency))
    except ValueError:
        concurrency = ()
    if not concurrency or min(concurrency) < 1:
        raise LoadgenError(
            f"--concurrency {options.concurrency}: whole numbers of at least 1, such as 1,4,8,16"
        )
    for name in ("rounds", "max_tokens"):
        value = getattr(options, name)  # the names are options of add_peers_arguments
        if value < 1:
            raise LoadgenError(f"--{name.replace('_', '-')} is {value}, it must be at least 1")
    return PeerSettings(
        rounds=options.rounds,
        concurrency=concurrency,
        max_tokens=options.max_tokens,
        peers=peers,
        only=_words(options.only),
        prompts_file=options.prompts,
        serve=tuple(shlex.split(options.serve)),
        auto=tuple(shlex.split(options.auto)),
    )


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _demo_dir(serve: Sequence[str]) -> Path:
    """Where our server keeps the demo model; fetched on the first call."""
    command = [*serve[:-1], "pull", "demo"]
    try:
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError) as error:
        raise LoadgenError(f"{shlex.join(command)}: {error}: or give --model-dir") from None
    return Path(done.stdout.strip().splitlines()[-1])


def _install(peers: Sequence[str], cache: Path, model_dir: Path) -> int:
    known = recipes(cache, model_dir)
    results = install([known[name] for name in peers], cache, say)
    for result in results:
        state = "ready" if result.reason is None else f"NOT THERE: {result.reason}"
        print(f"{result.name}: {state} ({result.num_run} steps run, {result.seconds:.0f} s)")
    return 1 if any(result.reason for result in results) else 0


def restrict(all_of_them: Lineup, only: Sequence[str]) -> Lineup:
    """The servers whose name contains one of `only`, in any case; all where it is empty."""
    if not only:
        return all_of_them
    kept = tuple(
        server
        for server in all_of_them.servers
        if any(part.lower() in server.name.lower() for part in only)
    )
    if not kept:
        names = ", ".join(server.name for server in all_of_them.servers)
        raise LoadgenError(f"--only {','.join(only)}: none of {names}")
    return Lineup(kept, all_of_them.left_out)


def compare(
    settings: PeerSettings,
    chosen: Lineup,
    prompts: Sequence[Prompt],
    logs: Path,
    json_file: Path | None,
) -> tuple[PeerReport, bool]:
    """All rounds, and whether SIGINT or SIGTERM ended them early. Logs of servers go to `logs`."""
    logs.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(settings, chosen, prompts, logs, json_file)
    interrupted = run_until_ended(comparison.run())
    return complete(comparison.report), interrupted


class Comparison:
    """report: of the turns that have ended"""

    def __init__(
        self,
        settings: PeerSettings,
        chosen: Lineup,
        prompts: Sequence[Prompt],
        logs: Path,
        json_file: Path | None,
    ) -> None:
        self._workloads = split_workloads(prompts)
        self._logs = logs
        self._json_file = json_file
        self.report = PeerReport(
            started_at=time.time(),
            environment=describe_machine(),
            settings=settings,
            servers=chosen.servers,
            left_out=dict(chosen.left_out),
            turns=(),
            measured=(),
        )

    async def run(self) -> None:
        num_rounds = self.report.settings.rounds
        for round_idx in range(num_rounds):
            for server in self.report.servers:
                say(f"round {round_idx + 1}/{num_rounds}: {server.name}")
                await self._turn(server, round_idx)
                _write(complete(self.report), self._json_file)

    async def _turn(self, server: Server, round_idx: int) -> None:
        settings = self.report.settings
        measured: list[Measured] = []
        turn = Turn(
            server.name,
            self._workloads,
            round_idx=round_idx,
            max_tokens=settings.max_tokens,
        )
        cells = make_cells(settings.concurrency)
        notes = await take_turn(server, turn, cells, self._logs, measured)
        self.report = msgspec.structs.replace(
            self.report,
            turns=(*self.report.turns, notes),
            measured=(*self.report.measured, *measured),
        )


async def take_turn(
    server: Server, turn: Turn, cells: Sequence[Cell], logs: Path, measured: list[Measured]
) -> TurnNotes:
    """Start the server, measure every cell into `measured`, stop it. Never raises LoadgenError:
    a server that fails is a line of the report."""
    name = "".join(c if c.isalnum() else "-" for c in server.name)
    notes = TurnNotes(
        server=server.name,
        round_idx=turn.round_idx,
        busy_cores_before=await asyncio.to_thread(busy_cores, LOOK_SECONDS),
    )
    try:
        async with Running(server, logs / f"{name}.log") as running:
            say(f"    ready after {running.start_seconds:.1f} s")
            await turn.warm_up(running.url)
            used = cpu_seconds(running.pid)
            await asyncio.sleep(LOOK_SECONDS)
            idle = (cpu_seconds(running.pid) - used) / LOOK_SECONDS
            notes = msgspec.structs.replace(
                notes, start_seconds=running.start_seconds, idle_cores=idle
            )
            for cell in cells:
                one = await turn.measure(running.url, cell)
                measured.append(one)
                say(f"    {cell.label}: {one.tokens_per_second:.1f} tokens/s")
            return msgspec.structs.replace(notes, memory=memory_of(running.pid))
    except LoadgenError as error:
        say(f"    FAILED: {error}")
        return msgspec.structs.replace(notes, error=str(error))


def _write(report: PeerReport, json_file: Path | None) -> None:
    if json_file is None:
        return
    partial = json_file.with_name(json_file.name + ".part")
    try:
        partial.write_bytes(to_json(report))
        os.replace(partial, json_file)
    except OSError as error:
        raise LoadgenError(f"--json {json_file}: {error.strerror or error}") from None


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

"""A signal ends a run at whatever moment it comes, and nothing waits for ever."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from specserve_loadgen.peers_process import process_tree
from specserve_loadgen.prompts import load_prompts
from specserve_loadgen.run import run_load
from specserve_loadgen.settings import Settings
from tests.loadgen_server import app_with, serving, write_stream
from tests.peer_words import PEER_SERVER

NUM_RUNS = 60
# Each run is a process whose event loop is busy, and it is told to end at a moment of its own. With
# Python's handler, which raises where it is, a fifth of such runs never ended.
PROGRAM = """
import asyncio, os, signal, sys, time
from specserve_loadgen.ended import run_until_ended

async def work(ready):
    async with asyncio.TaskGroup() as group:
        for _ in range(10):
            group.create_task(hop())
        os.write(ready, b"x")

async def hop():
    try:
        while True:
            await asyncio.sleep(0)
    finally:
        await asyncio.sleep(0.001)  # what is put away takes a while

def one(idx):
    told, ready = os.pipe()
    pid = os.fork()
    if pid == 0:
        os._exit(7 if run_until_ended(work(ready)) else 1)
    os.read(told, 1)
    time.sleep(idx * 0.0001)
    number = signal.SIGTERM if idx % 2 else signal.SIGINT
    for _ in range(1 + idx % 3):  # further ones do not cut it short
        os.kill(pid, number)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

for idx in range(int(sys.argv[1])):
    print(one(idx), flush=True)
"""


def test_every_run_that_is_told_to_end_puts_away_what_it_has_and_ends() -> None:
    command = [sys.executable, "-c", PROGRAM, str(NUM_RUNS)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert said.stdout.split() == ["7"] * NUM_RUNS, said.stderr


async def test_after_a_load_ctrl_c_is_for_whom_it_was_before() -> None:
    def handler(*_: object) -> None:
        return

    async def complete(request: web.Request) -> web.StreamResponse:
        return await write_stream(request, b"data: [DONE]\n\n")

    before = signal.signal(signal.SIGINT, handler)
    try:
        async with serving(app_with(complete)) as url:
            await run_load(Settings(url=url, num_requests=1), load_prompts(None))
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_comparison_that_is_ended_leaves_no_server_behind(
    number: signal.Signals, tmp_path: Path
) -> None:
    serve = f"{sys.executable} {PEER_SERVER} --delay 30"
    arguments = ["--serve", serve, "--model-dir", str(tmp_path), "--cache", str(tmp_path)]
    comparison = subprocess.Popen(
        [sys.executable, "-m", "specserve", "loadgen", "peers", *arguments, "--only", "bf16"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    servers: list[int] = []
    try:
        assert comparison.stderr is not None
        while "ready after" not in comparison.stderr.readline():
            assert comparison.poll() is None
        servers = [pid for pid in process_tree(comparison.pid) if pid != comparison.pid]
        comparison.send_signal(number)
        assert "TOKENS PER SECOND" in comparison.communicate(timeout=100)[0]
    finally:
        for pid in (comparison.pid, *servers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        comparison.communicate()
    assert comparison.returncode == 130
    assert servers
    assert not any(process_tree(pid) for pid in servers)

"""`specserve serve` as a newcomer runs it: a process of its own, on any free port."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec


class Server(msgspec.Struct):
    process: subprocess.Popen[bytes]
    url: str
    greeting: str
    trace_file: Path
    log_path: Path

    @property
    def said(self) -> str:
        return self.log_path.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "specserve", *arguments]


def start(tmp_path: Path, *arguments: str) -> Server:
    """`specserve serve` on any free port; returns once it says where it listens."""
    trace_file = tmp_path / "serve.trace.jsonl"
    log_path = tmp_path / "serve.log"  # not a pipe: nobody would read the line of each request
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command("serve", "--port", "0", "--trace-file", str(trace_file), *arguments),
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    while "in a browser" not in (said := log_path.read_text()):  # the greeting's last line
        if process.poll() is not None:
            raise AssertionError(f"the server did not start:\n{log_path.read_text()}")
        time.sleep(0.05)
    found = re.search(r"https?://127\.0\.0\.1:\d+", said)
    assert found is not None, said
    return Server(process, found.group(), said, trace_file, log_path)

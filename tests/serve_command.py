"""`specserve serve` as a newcomer runs it: a process of its own, on any free port."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec


class Server(msgspec.Struct):
    process: subprocess.Popen[str]
    url: str
    greeting: str
    trace_file: Path

    def kill(self) -> str:
        """What it said since it was started."""
        self.process.kill()
        return self.process.communicate()[0]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "specserve", *arguments]


def start(tmp_path: Path, *arguments: str) -> Server:
    """`specserve serve` on any free port; returns once it says where it listens."""
    trace_file = tmp_path / "serve.trace.jsonl"
    process = subprocess.Popen(
        command("serve", "--port", "0", "--trace-file", str(trace_file), *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if "/metrics" in line:
            break
    found = re.search(r"https?://127\.0\.0\.1:\d+", said)
    if found is None:
        process.kill()
        raise AssertionError(f"the server did not start:\n{said}")
    return Server(process, found.group(), said, trace_file)

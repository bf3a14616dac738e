"""Debian's Prometheus on a real server: it scrapes, and is asked by its query API."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any  # decoded JSON

import pytest

# Where this is set, a machine without Prometheus fails the tests instead of skipping them.
REQUIRED = "SPECSERVE_REQUIRE_PROMETHEUS"


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; skips where it is not installed."""
    path = shutil.which(name)
    if path is None:
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set, but {name} is not installed")
        pytest.skip(f"{name} is not installed")
    return path


def promtool(*arguments: str, text: str = "") -> str:
    """What it says; AssertionError where it is not satisfied. text: its standard input"""
    done = subprocess.run(
        [program("promtool"), *arguments], input=text, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


class Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer of its API."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}/api/v1/{path}?{query}", timeout=30) as reply:
            answer = json.load(reply)
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> dict[str, float]:
        """Finite values now, by series' labels as sorted text; empty where there are none."""
        found = self.ask("query", query=expression)["result"]
        by_labels = {str(sorted(one["metric"].items())): float(one["value"][1]) for one in found}
        return {labels: value for labels, value in by_labels.items() if isfinite(value)}

    def value(self, expression: str) -> float:
        """Of the one series there is; NaN where there is none."""
        return next(iter(self.query(expression).values()), float("nan"))

    def has(self, expression: str, is_it: Callable[[float], bool], seconds: float = 60) -> None:
        """Waits for a scrape with such a value; AssertionError tells the last one."""
        deadline = time.monotonic() + seconds
        while not is_it(now := self.value(expression)):
            assert time.monotonic() < deadline, f"{expression} is {now}\n{self.ask('targets')}"
            time.sleep(0.1)


@contextmanager
def scraping(folder: Path, jobs: Mapping[str, str]) -> Iterator[Prometheus]:
    """jobs: addresses (host:port) to scrape, by job."""
    port = _free_port()
    scrapes = [{"job_name": j, "static_configs": [{"targets": [at]}]} for j, at in jobs.items()]
    config = {"global": {"scrape_interval": "200ms"}, "scrape_configs": scrapes}
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML, too
    log_path = folder / "prometheus.log"
    with log_path.open("w") as log:
        process = subprocess.Popen(
            [
                program("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--enable-feature=exemplar-storage",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_ready(process, f"http://127.0.0.1:{port}", log_path)
        yield Prometheus(f"http://127.0.0.1:{port}")
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log_path: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=5):
                return
        except OSError:
            assert process.poll() is None, log_path.read_text()
            assert time.monotonic() < deadline, log_path.read_text()
            time.sleep(0.05)

"""The process beside the server that makes and sends spans: it sees all, and holds up nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from specserve_observability import exporter_process
from specserve_observability.export import ExportSettings
from specserve_observability.metrics import Metrics
from specserve_observability.tracing import Tracing, open_tracing
from tests.otlp_receiver import attributes_of
from tests.trace_reading import record_two_requests, trace_of_file
from tests.trace_records import START, a_request, a_row, a_step

MODULE = "specserve_observability.exporter"


class Beside:
    """Tracing into a file by a side process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = Metrics(drafters=["ngram"])
        earlier = set(exporters())
        settings = ExportSettings(trace_file=str(path))
        self.tracing: Tracing = open_tracing(
            settings, service_version="1.2.3", metrics=self.metrics
        )
        (self.pid,) = set(exporters()) - earlier

    def has_counted(self, seconds: float = 60) -> None:
        """Waits until the side process has told that it left steps out."""
        deadline = time.monotonic() + seconds
        while not self.metrics.num_step_spans_sampled_out:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def exporters() -> Iterator[int]:
    """Process ids of this process's exporters."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "cmdline").read_bytes().decode().split("\0")
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:  # it ended meanwhile
                continue
            if MODULE in words and int(parent) == os.getpid():
                yield int(folder.name)


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Beside]:
    run = Beside(tmp_path / "traces.jsonl")
    yield run
    run.tracing.shutdown()
    assert run.pid not in set(exporters())


def test_a_side_process_makes_the_spans_that_a_thread_makes(tmp_path: Path) -> None:
    found = {}
    for where in ("process", "thread"):
        path = tmp_path / where
        settings = ExportSettings(trace_file=str(path), exporter=where)
        tracing = open_tracing(settings, service_version="1.2.3")
        record_two_requests(tracing)
        tracing.shutdown(timeout=30)
        trace = trace_of_file(path)
        # Ids and times of server spans are drawn anew; all the rest is the records'.
        found[where] = sorted(
            (
                span.name,
                sorted(attributes_of(span.attributes).items(), key=str),
                [(event.name, attributes_of(event.attributes)) for event in span.events],
                [linked.name for linked in trace.links_of(span)],
                bool(span.parent_span_id),
            )
            for span in trace.spans
        )
    assert len(found["process"]) > 20
    assert found["process"] == found["thread"]


def test_what_the_side_process_counts_is_seen_in_the_server(beside: Beside) -> None:
    for idx in range(300):
        beside.tracing.recorder.record_step(a_step(idx, [a_row()], start=START))
    beside.has_counted()
    beside.tracing.shutdown(timeout=30)
    num_kept = len(trace_of_file(beside.path).named("engine.step"))
    assert beside.metrics.num_step_spans_sampled_out == 300 - num_kept > 0
    assert beside.metrics.num_spans_dropped == beside.metrics.num_records_dropped == 0


def test_a_side_process_that_hangs_costs_records_and_nothing_else(beside: Beside) -> None:
    os.kill(beside.pid, signal.SIGSTOP)
    row = a_row(drafted=3, accepted=2)
    for idx in range(12_000):  # 8,192 wait for the drain thread, 64 KiB in the pipe
        beside.tracing.recorder.record_step(a_step(idx, [row] * 8))
    deadline = time.monotonic() + 60
    while not beside.metrics.num_records_dropped:  # it may have taken some at once
        beside.tracing.recorder.record_step(a_step(0, [row]))
        assert time.monotonic() < deadline
    beside.tracing.shutdown(timeout=0.5)  # kills it
    assert beside.metrics.num_spans_dropped > 0
    assert beside.metrics.num_steps >= 12_000


def test_a_side_process_that_died_is_replaced_and_what_it_missed_is_counted(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter_process, "RESTART_SECONDS", 0.0)
    os.kill(beside.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while beside.pid in (now := set(exporters())) or not now:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    beside.tracing.recorder.record_request(a_request(0))
    beside.tracing.shutdown(timeout=30)
    assert trace_of_file(beside.path).one("decode")
    assert beside.metrics.num_spans_dropped == 0


def test_a_side_process_ends_with_a_server_that_was_killed(tmp_path: Path) -> None:
    """Its pipe's end closes; what it has is still delivered."""
    path = tmp_path / "traces.jsonl"
    server = subprocess.run([sys.executable, "-m", __name__, str(path)], check=False)
    assert server.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while not (path.exists() and b"engine.window" in path.read_bytes()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert len(trace_of_file(path).named("engine.step")) >= 100


def _be_killed(path: Path) -> None:
    beside = Beside(path)
    for idx in range(300):
        beside.tracing.recorder.record_step(a_step(idx, [a_row()], start=START))
    beside.has_counted()
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _be_killed(Path(sys.argv[1]))

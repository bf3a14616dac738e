"""The side process that makes and delivers spans, seen from the server: a pipe that takes batches.

An exporter in the server's own process is Python that holds the interpreter while the event loop
wants it. Over a pipe the server pays for encoding compact records, and nothing else. Only the
drain thread writes: a full pipe blocks it and nobody else, and then the recorder's bounded queues
drop and count.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from struct import Struct

import msgspec

from .export import Batch, ExportSettings, SpanCounts
from .logs import get_logger

RESTART_SECONDS = 5.0  # from one start to the next
_SLACK_SECONDS = 0.5  # beyond the time that was given for delivery
LENGTH = Struct("<I")  # before each message to the side process
COUNTS = Struct("<QQQ")  # from it after each: sampled out, dropped at its queue, at export

_encode = msgspec.msgpack.Encoder().encode
_log = get_logger("specserve.tracing")


class Hello(msgspec.Struct, frozen=True):
    """The first message."""

    settings: ExportSettings
    resource: dict[str, str]
    version: str


class ExporterProcess:
    """Starts the side process, and again where it ended by itself."""

    def __init__(
        self,
        settings: ExportSettings,
        counts: SpanCounts,
        *,
        resource: Mapping[str, str],
        version: str,
    ) -> None:
        self._hello = Hello(settings, dict(resource), version)
        self._counts = counts
        self._earlier = (0, 0, 0)  # what ended processes had counted
        self._lost = 0  # records that no process took
        self._in_use = threading.Lock()  # by the drain thread, or by whoever closes the pipes
        self._closing = False
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def handle(self, batch: Batch) -> None:
        with self._in_use:
            if self._process.poll() is not None and (self._closing or not self._restart()):
                self.lose(batch)
                return
            try:
                self._send(batch)
            except OSError:  # it ended meanwhile
                self.lose(batch)
            self._read_counts()

    def lose(self, batch: Batch) -> None:
        self._lost += batch.num_records
        self._show_counts()

    def close(self, deadline: float) -> None:
        self._closing = True
        try:
            self._process.wait(max(0.0, deadline + _SLACK_SECONDS - time.monotonic()))
        except subprocess.TimeoutExpired:
            _log.warning("trace_exporter_killed", pid=self._process.pid)
            self._process.kill()
            self._process.wait()
        with self._in_use:  # a write that was stuck has failed by now
            self._end_pipes()

    def _start(self) -> None:
        self._started = time.monotonic()
        self._seen = (0, 0, 0)
        self._unread = b""
        # By a new interpreter, not by fork: this process has threads, and later a model.
        self._process = subprocess.Popen(
            # -P: what lies in the folder it is started from is no module.
            [sys.executable, "-P", "-m", "specserve_observability.exporter"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._send(self._hello)

    def _restart(self) -> bool:
        if time.monotonic() - self._started < RESTART_SECONDS:
            return False
        _log.warning("trace_exporter_restarted", exit_status=self._process.returncode)
        self._end_pipes()
        before, now = self._earlier, self._seen
        self._earlier = (before[0] + now[0], before[1] + now[1], before[2] + now[2])
        try:
            self._start()
        except OSError as error:
            _log.error("trace_exporter_did_not_start", error=str(error))
            return False
        return True

    def _send(self, message: Hello | Batch) -> None:
        assert self._process.stdin is not None
        data = _encode(message)
        self._process.stdin.write(LENGTH.pack(len(data)) + data)
        self._process.stdin.flush()

    def _read_counts(self) -> None:
        assert self._process.stdout is not None
        self._unread += self._process.stdout.read() or b""
        num_whole = len(self._unread) // COUNTS.size
        if num_whole:
            last = COUNTS.unpack_from(self._unread, (num_whole - 1) * COUNTS.size)
            self._seen = (last[0], last[1], last[2])
            self._unread = self._unread[num_whole * COUNTS.size :]
        self._show_counts()

    def _show_counts(self) -> None:
        counts, before, now = self._counts, self._earlier, self._seen
        counts.num_step_spans_sampled_out = before[0] + now[0]
        counts.num_spans_dropped_at_queue = before[1] + now[1] + self._lost
        counts.num_spans_dropped_at_export = before[2] + now[2]

    def _end_pipes(self) -> None:
        """Of a process that has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if self._process.stdout.closed:  # and none was started since
            return
        self._read_counts()
        self._process.stdout.close()
        with contextlib.suppress(OSError):  # what was written last and not taken
            self._process.stdin.close()

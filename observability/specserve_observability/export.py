"""What is asked of tracing, and what goes from the event loop's process to whoever makes spans."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from .records import HttpRecord, RequestRecord, StepRecord
from .sampling import ORDINARY_RATE

Protocols = Literal["http/protobuf", "grpc"]  # as OTEL_EXPORTER_OTLP_PROTOCOL spells them
Where = Literal["process", "thread"]


class ExportSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where spans go, who makes them, and of which steps there are any."""

    otlp_endpoint: str | None = None  # base URL of a collector
    otlp_protocol: Protocols = "http/protobuf"
    trace_file: str | None = None  # gets OTLP JSON lines
    trace_file_bytes: int = 256 * 1024 * 1024  # then it becomes FILE.1, and a new one begins
    exporter: Where = (
        "process"  # thread: of this process, whose loop then waits for it now and then
    )
    steps_per_second: float = ORDINARY_RATE  # spans of ordinary steps; inf: every step

    log_json: bool = False  # how a side process logs, as configure_logging takes it
    log_level: str = "info"

    @property
    def has_sink(self) -> bool:
        return self.otlp_endpoint is not None or self.trace_file is not None


class SpanCounts(Protocol):
    """What whoever makes spans counts; Metrics has these, a side process has its own."""

    num_step_spans_sampled_out: int
    num_spans_dropped_at_queue: int
    num_spans_dropped_at_export: int


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """All that was recorded since the last one.

    now:          time.time() at which it was gathered
    seconds_left: set in the last one: how long delivery may take
    """

    steps: list[StepRecord]
    requests: list[RequestRecord]
    http: list[HttpRecord]
    now: float
    seconds_left: float | None = None

    @property
    def num_records(self) -> int:
        return len(self.steps) + len(self.requests) + len(self.http)


class Exporter(Protocol):
    def handle(self, batch: Batch) -> None:
        """Called by the drain thread only. May block it, never the event loop."""
        ...

    def lose(self, batch: Batch) -> None:
        """Count what handle() failed at."""
        ...

    def close(self, deadline: float) -> None:
        """Behind the last batch: deliver what is left until `deadline` (time.monotonic)."""
        ...

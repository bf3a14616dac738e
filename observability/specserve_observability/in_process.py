"""Spans made and delivered by threads of the process that calls: the side process's own, or the
server's where `--trace-exporter thread` asks for it."""

from __future__ import annotations

from collections.abc import Mapping

from .export import Batch, ExportSettings, SpanCounts
from .pipeline import SpanPipeline
from .sampling import StepSampler
from .sinks import Sink, open_sinks


class InProcessExporter:
    """Raises ValueError (endpoint is not a URL) and OSError (file cannot be opened)."""

    def __init__(
        self,
        settings: ExportSettings,
        counts: SpanCounts,
        *,
        resource: Mapping[str, str],
        version: str,
    ) -> None:
        self._counts = counts
        self._sinks: list[Sink] = open_sinks(settings, counts)
        self._pipeline = SpanPipeline(
            self._sinks,
            counts,
            resource=resource,
            version=version,
            sampler=StepSampler(settings.steps_per_second),
        )

    def handle(self, batch: Batch) -> None:
        self._pipeline.handle(batch)

    def lose(self, batch: Batch) -> None:
        self._counts.num_spans_dropped_at_queue += batch.num_records

    def close(self, deadline: float) -> None:
        for sink in self._sinks:
            sink.close(deadline)

"""The bar on standard error: requests done, tokens per second, acceptance so far."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from specserve_loadgen.records import RequestRecord

REDRAW_SECONDS = 0.25


class Progress:
    """A context manager that shows nothing when `enabled` is false.

    It is drawn when a request has ended, and by no thread: a thread would take the interpreter
    from the client that is measuring.
    """

    def __init__(self, total: int | None, enabled: bool) -> None:
        self._bar = RichProgress(
            MofNCompleteColumn(),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
            auto_refresh=False,
            disable=not enabled,
        )
        self._task = self._bar.add_task("", total=total)
        self._started = self._drawn = time.perf_counter()
        self._num_tokens = 0
        self._num_emitted = 0
        self._num_spec_steps = 0
        self._num_failed = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def on_record(self, record: RequestRecord) -> None:
        self._num_tokens += record.num_output_tokens
        self._num_failed += not record.succeeded
        if (spec := record.speculative) is not None:
            self._num_emitted += spec.num_emitted_tokens
            self._num_spec_steps += spec.num_spec_steps
        now = time.perf_counter()
        self._bar.update(self._task, advance=1, description=self._text(now - self._started))
        if now - self._drawn >= REDRAW_SECONDS:
            self._drawn = now
            self._bar.refresh()

    def _text(self, seconds: float) -> str:
        shown = [f"{self._num_tokens / max(seconds, 1e-9):.0f} tok/s"]
        if self._num_spec_steps:
            shown.append(f"accept len {self._num_emitted / self._num_spec_steps:.2f}")
        if self._num_failed:
            shown.append(f"{self._num_failed} failed")
        return ", ".join(shown)

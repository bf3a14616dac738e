"""The bar on standard error: requests done, tokens per second, acceptance so far."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from tqdm import tqdm

from specserve_loadgen.records import RequestRecord


class Progress:
    """A context manager that shows nothing when `enabled` is false."""

    def __init__(self, total: int | None, enabled: bool) -> None:
        self._bar = tqdm(
            total=total, unit="req", disable=not enabled, dynamic_ncols=True, mininterval=0.2
        )
        self._started = time.perf_counter()
        self._num_tokens = 0
        self._num_emitted = 0
        self._num_spec_steps = 0
        self._num_failed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._bar.close()

    def on_record(self, record: RequestRecord) -> None:
        self._num_tokens += record.num_output_tokens
        self._num_failed += not record.succeeded
        if (spec := record.speculative) is not None:
            self._num_emitted += spec.num_emitted_tokens
            self._num_spec_steps += spec.num_spec_steps
        rate = self._num_tokens / max(time.perf_counter() - self._started, 1e-9)
        shown = [f"{rate:.0f} tok/s"]
        if self._num_spec_steps:
            shown.append(f"accept len {self._num_emitted / self._num_spec_steps:.2f}")
        if self._num_failed:
            shown.append(f"{self._num_failed} failed")
        self._bar.set_postfix_str(", ".join(shown), refresh=False)
        self._bar.update(1)

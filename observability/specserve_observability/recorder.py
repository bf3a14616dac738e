"""Where the engine leaves its records: counted at once, turned into spans later.

Called on the event loop, so both methods are O(1) and take microseconds. A full queue drops the
newest record and counts it: only the loop puts, so the count is exact without a lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from .metrics import Metrics
from .records import RequestRecord, StepRecord

T = TypeVar("T")


class BoundedQueue(Generic[T]):
    """One thread puts, another takes; deque's append and popleft are atomic."""

    def __init__(self, capacity: int) -> None:
        self._items: deque[T] = deque()
        self._capacity = capacity

    def put(self, item: T) -> bool:
        """False: the queue is full and the item was not kept."""
        if len(self._items) >= self._capacity:
            return False
        self._items.append(item)
        return True

    def take(self, at_most: int | None = None) -> list[T]:
        """Oldest first; what is put meanwhile waits for the next call."""
        num_items = len(self._items)
        if at_most is not None:
            num_items = min(num_items, at_most)
        return [self._items.popleft() for _ in range(num_items)]

    def __len__(self) -> int:
        return len(self._items)


class Listener:
    """What one reader of steps has not taken yet. num_dropped: never kept, it was too slow."""

    def __init__(self, capacity: int) -> None:
        self._steps: BoundedQueue[StepRecord] = BoundedQueue(capacity)
        self.num_dropped = 0

    def put(self, step: StepRecord) -> None:
        if not self._steps.put(step):
            self.num_dropped += 1

    def take(self) -> list[StepRecord]:
        """Oldest first."""
        return self._steps.take()


class StepFeed:
    """Finished steps as they come, for whoever listens just now; with nobody put() does nothing.

    All calls on the event loop.
    """

    def __init__(self) -> None:
        self._listeners: tuple[Listener, ...] = ()

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    def put(self, step: StepRecord) -> None:
        for listener in self._listeners:
            listener.put(step)

    @contextmanager
    def listening(self, capacity: int) -> Iterator[Listener]:
        """capacity: steps that may wait for this listener"""
        listener = Listener(capacity)
        self._listeners = (*self._listeners, listener)
        try:
            yield listener
        finally:
            self._listeners = tuple(one for one in self._listeners if one is not listener)


class Recorder:
    """has_sink: someone drains the queues. Without it a record is counted and forgotten."""

    def __init__(
        self, metrics: Metrics | None = None, *, has_sink: bool = False, capacity: int = 8192
    ) -> None:
        self.metrics = metrics or Metrics()
        self.feed = StepFeed()
        self.has_sink = has_sink
        self.steps: BoundedQueue[StepRecord] = BoundedQueue(capacity)
        self.requests: BoundedQueue[RequestRecord] = BoundedQueue(capacity)

    def record_step(self, step: StepRecord) -> None:
        self.metrics.add_step(step)
        self.feed.put(step)
        if self.has_sink and not self.steps.put(step):
            self.metrics.num_records_dropped += 1

    def record_request(self, request: RequestRecord) -> None:
        self.metrics.add_request(request)
        if self.has_sink and not self.requests.put(request):
            self.metrics.num_records_dropped += 1

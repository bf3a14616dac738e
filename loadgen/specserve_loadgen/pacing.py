"""When requests leave. A pattern of load is a function; each awaits every request it started."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator
from itertools import count
from typing import Protocol

from specserve_loadgen.settings import ClosedLoop, Settings


class Send(Protocol):
    def __call__(self, request_idx: int, scheduled: float | None) -> Coroutine[None, None, None]:
        """Send one request and return when it has ended, well or badly."""


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Endless send times in seconds from the start: exponential gaps of mean 1/rate."""
    rng = random.Random(seed)
    seconds = 0.0
    while True:
        seconds += rng.expovariate(rate)
        yield seconds


async def closed_loop(
    concurrency: int, request_idxs: Iterable[int], send: Send, may_start: Callable[[], bool]
) -> None:
    """`concurrency` users share one stream of requests; none starts once `may_start` is false."""
    shared = iter(request_idxs)

    async def user() -> None:
        for request_idx in shared:
            if not may_start():
                return
            await send(request_idx, None)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(user())


async def open_loop(arrivals: Iterable[float], send: Send, clock: Callable[[], float]) -> None:
    """Start each request at its time; when late, at once, with its scheduled time unchanged."""
    async with asyncio.TaskGroup() as group:
        for request_idx, scheduled in enumerate(arrivals):
            # Sleep even when late: without it a burst would never let the requests themselves run.
            await asyncio.sleep(max(0.0, scheduled - clock()))
            group.create_task(send(request_idx, scheduled))


async def drive(
    settings: Settings, num_prompts: int, send: Send, clock: Callable[[], float]
) -> None:
    """Run the measured load that the settings describe. The clock starts at 0."""
    num_requests = settings.num_requests
    if num_requests is None and settings.duration is None:
        num_requests = num_prompts
    duration = float("inf") if settings.duration is None else settings.duration
    request_idxs = count() if num_requests is None else range(num_requests)
    if isinstance(settings.load, ClosedLoop):
        await closed_loop(
            settings.load.concurrency,
            request_idxs,
            send,
            may_start=lambda: settings.duration is None or clock() < duration,
        )
        return
    arrivals = (
        seconds
        for _, seconds in zip(
            request_idxs, poisson_arrivals(settings.load.rate, settings.seed), strict=False
        )
    )
    await open_loop(_until(duration, arrivals), send, clock)


def _until(limit: float, arrivals: Iterable[float]) -> Iterator[float]:
    for seconds in arrivals:
        if seconds >= limit:
            return
        yield seconds

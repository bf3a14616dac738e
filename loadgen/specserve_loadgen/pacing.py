"""When requests leave. A pattern of load is a function; each awaits every request it started.

In an open loop and in a replayed trace a request has a time of its own. When the client is late,
it leaves at once and keeps that time, so that latency from the schedule has no blind spot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from itertools import count, islice, takewhile
from typing import Protocol

from specserve_loadgen.arrivals import arrival_times
from specserve_loadgen.prompts import Prompt
from specserve_loadgen.settings import ClosedLoop, OpenLoop, Settings, TraceReplay


class Send(Protocol):
    def __call__(self, session_idx: int, scheduled: float | None) -> Coroutine[None, None, None]:
        """Send one prompt, with all its turns, and return when it has ended, well or badly."""


async def closed_loop(
    load: ClosedLoop, session_idxs: Iterable[int], send: Send, may_start: Callable[[], bool]
) -> None:
    """The users share one stream of prompts; none starts once `may_start` is false."""
    shared = iter(session_idxs)

    async def user(user_idx: int) -> None:
        await asyncio.sleep(load.ramp * user_idx / load.concurrency)
        for session_idx in shared:
            if not may_start():
                return
            await send(session_idx, None)

    async with asyncio.TaskGroup() as group:
        for user_idx in range(load.concurrency):
            group.create_task(user(user_idx))


async def open_loop(arrivals: Iterable[float], send: Send, clock: Callable[[], float]) -> None:
    """Start each request at its time; when late, at once, with its scheduled time unchanged."""
    async with asyncio.TaskGroup() as group:
        for session_idx, scheduled in enumerate(arrivals):
            # Sleep even when late: without it a burst would never let the requests themselves run.
            await asyncio.sleep(max(0.0, scheduled - clock()))
            group.create_task(send(session_idx, scheduled))


def num_sessions(settings: Settings, num_prompts: int) -> int | None:
    """How many prompts are sent in all; None: as many as the duration lets."""
    if settings.num_requests is None and settings.duration is None:
        return num_prompts
    if settings.num_requests is None and isinstance(settings.load, TraceReplay):
        return num_prompts
    return settings.num_requests


def num_requests(settings: Settings, prompts: Sequence[Prompt]) -> int | None:
    """The requests of that many prompts, if none fails; None: not known beforehand."""
    most = num_sessions(settings, len(prompts))
    if most is None or not settings.multi_turn:
        return most
    turns = [1 + len(prompt.later_turns) for prompt in prompts]
    num_rounds, rest = divmod(most, len(turns))
    return num_rounds * sum(turns) + sum(turns[:rest])


async def drive(
    settings: Settings, prompts: Sequence[Prompt], send: Send, clock: Callable[[], float]
) -> None:
    """Run the measured load that the settings describe. The clock starts at 0."""
    most = num_sessions(settings, len(prompts))
    duration = float("inf") if settings.duration is None else settings.duration
    load = settings.load
    if isinstance(load, ClosedLoop):
        session_idxs = count() if most is None else range(most)
        await closed_loop(load, session_idxs, send, may_start=lambda: clock() < duration)
        return
    due = takewhile(lambda seconds: seconds < duration, _send_times(load, prompts, settings.seed))
    await open_loop(islice(due, most), send, clock)


def _send_times(
    load: OpenLoop | TraceReplay, prompts: Sequence[Prompt], seed: int
) -> Iterator[float]:
    if isinstance(load, OpenLoop):
        return arrival_times(load, seed)
    return (0.0 if p.arrival is None else p.arrival / load.speed for p in prompts)

"""GET /specserve/events: what the engine does, summed over short windows, as server-sent events.

Numbers of all requests together: no text, no id, and no step by itself. How many guesses of one
step were right says something of its text, so whoever may listen must not see one after the other.
Who listens shares the engine's own step records; while nobody does nothing is kept or summed. A
listener that is slow loses steps, is told how many, and delays nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq

import msgspec
from aiohttp import web

from specserve.engine import Engine
from specserve.errors import RequestError
from specserve.live import at_each_position
from specserve.server.sse import NAMED, EventStream
from specserve.server.state import STATE, ServerState
from specserve_observability.recorder import Listener
from specserve_observability.records import RowRecord, StepRecord

_CAPACITY = 1024  # steps that wait for one listener


class DrafterWindow(msgspec.Struct, frozen=True, kw_only=True):
    drafter: str
    drafted: int
    accepted: int


class PhaseSeconds(msgspec.Struct, frozen=True, kw_only=True):
    plan: float
    draft: float
    target_forward: float
    verify: float
    commit: float


class EngineWindow(msgspec.Struct, frozen=True, kw_only=True, tag="window"):
    """Sums over the steps since this stream's last event; gauges are those of now.

    seconds:               since the last event; of the first one 0
    dropped:               steps that are missing, because this stream was read too slowly
    rows_by_k:             rows that extended a text, by their number of guesses, from 0
    drafted_per_position, accepted_per_position: rows with a guess there, from the first
    """

    seconds: float
    steps: int
    dropped: int
    tokens: int
    prefill_tokens: int
    rows_by_k: list[int]
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    drafters: list[DrafterWindow]
    phase_seconds: PhaseSeconds
    preemptions: int
    running: int
    waiting: int
    blocks_free: int
    blocks_cached: int
    blocks_live: int
    engine_up: bool


async def events(request: web.Request) -> web.StreamResponse:
    """RequestError 429 where enough listen already."""
    state = request.app[STATE]
    _check_room(state)
    stream = EventStream(request, NAMED)
    if request.method == "HEAD":
        await stream.open()
        return stream.response
    with state.feed.listening(_CAPACITY) as listener:
        await stream.open()
        await _send_windows(state, listener, stream)
        await stream.done()
    return stream.response


def _check_room(state: ServerState) -> None:
    most = state.settings.max_event_listeners
    if state.feed.num_listeners >= most:
        raise RequestError(
            f"{most} clients listen to this server's events already: close one and try again",
            code="too_many_listeners",
            status=429,
        )


async def _send_windows(state: ServerState, listener: Listener, stream: EventStream) -> None:
    """Until the server drains, which waits for no listener. One that leaves is cancelled."""
    settings = state.settings
    loop = asyncio.get_running_loop()
    sent_at, num_dropped = loop.time(), 0
    await stream.send([window_of([], state.engine, seconds=0.0, dropped=0)])
    while not state.lifecycle.draining:
        await asyncio.sleep(settings.event_seconds)
        steps, now = listener.take(), loop.time()
        if not steps and now - sent_at < settings.idle_event_seconds:
            continue
        dropped, num_dropped = listener.num_dropped - num_dropped, listener.num_dropped
        window = window_of(steps, state.engine, seconds=now - sent_at, dropped=dropped)
        sent_at = now
        await stream.send([window])


def window_of(
    steps: Seq[StepRecord], engine: Engine, *, seconds: float, dropped: int
) -> EngineWindow:
    now = engine.snapshot()
    rows = [row for step in steps for row in step.rows]
    drafted = [row.num_draft_tokens for row in rows if row.num_draft_tokens]
    accepted = [row.num_accepted_tokens for row in rows if row.num_draft_tokens]
    num_positions = max(drafted, default=0)
    return EngineWindow(
        seconds=seconds,
        steps=len(steps),
        dropped=dropped,
        tokens=sum(row.num_emitted_tokens for row in rows),
        prefill_tokens=sum(row.num_tokens for row in rows if row.is_prefill),
        rows_by_k=_rows_by_k(rows),
        drafted_per_position=list(at_each_position(drafted, num_positions)),
        accepted_per_position=list(at_each_position(accepted, num_positions)),
        drafters=_by_drafter(rows),
        phase_seconds=_phase_seconds(steps),
        preemptions=sum(step.num_preempted for step in steps),
        running=now.num_running,
        waiting=now.num_waiting,
        blocks_free=now.blocks_free,
        blocks_cached=now.blocks_cached,
        blocks_live=now.blocks_live,
        engine_up=engine.error is None,
    )


def _rows_by_k(rows: Seq[RowRecord]) -> list[int]:
    counts = [row.num_draft_tokens for row in rows if not row.is_prefill]
    return [counts.count(k) for k in range(max(counts, default=-1) + 1)]


def _by_drafter(rows: Seq[RowRecord]) -> list[DrafterWindow]:
    guessed = [row for row in rows if row.num_draft_tokens]
    return [
        DrafterWindow(
            drafter=name,
            drafted=sum(row.num_draft_tokens for row in guessed if row.drafter == name),
            accepted=sum(row.num_accepted_tokens for row in guessed if row.drafter == name),
        )
        for name in dict.fromkeys(row.drafter for row in guessed)
    ]


def _phase_seconds(steps: Seq[StepRecord]) -> PhaseSeconds:
    return PhaseSeconds(
        plan=sum(step.plan_end - step.plan_start for step in steps),
        draft=sum(step.forward_start - step.draft_start for step in steps),
        target_forward=sum(step.verify_start - step.forward_start for step in steps),
        verify=sum(step.verify_end - step.verify_start for step in steps),
        commit=sum(step.commit_end - step.verify_end for step in steps),
    )

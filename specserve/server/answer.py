"""A job's reply, whole or streamed: the one path every generation takes, with one ending."""

from __future__ import annotations

import time
from typing import Protocol

import msgspec
from aiohttp import web

from specserve.errors import RequestError
from specserve.server import errors
from specserve.server.job import Job
from specserve.server.source import ChunkSource
from specserve.server.sse import EventStream, Framing
from specserve.server.state import CONTEXT, STATE, ServerState
from specserve.server.tally import Tally
from specserve.server.telling import may_tell_content, tell_job, tell_reply
from specserve.stream import merge
from specserve.types import TokenChunk
from specserve_observability import names
from specserve_observability.logs import get_logger

_log = get_logger("specserve.server")


class Shape(Protocol):
    """How one endpoint spells its replies. Holds what it needs between chunks of one reply."""

    @property
    def framing(self) -> Framing: ...

    def opening(self) -> list[msgspec.Struct]:
        """Stream events before anything has arrived."""
        ...

    def events(self, idx: int, chunk: TokenChunk, tally: Tally) -> list[msgspec.Struct]:
        """Stream events for one chunk of choice idx; the tally counts it already."""
        ...

    def closing(self, tally: Tally) -> list[msgspec.Struct]:
        """Stream events after the last chunk of the last choice."""
        ...

    def failure(self, error: RequestError) -> msgspec.Struct:
        """The stream's last event, where it ends before its reply does."""
        ...

    def whole(self, chunks: list[TokenChunk], tally: Tally) -> msgspec.Struct:
        """The reply that is not streamed, from each choice's merged chunks."""
        ...


async def answer(request: web.Request, job: Job, shape: Shape) -> web.StreamResponse:
    tally = Tally(
        [len(ids) for ids in job.prompts],
        job.params.n,
        detailed=job.detailed,
        keep_texts=may_tell_content(request),
    )
    tell_job(request, job)
    try:
        if job.stream:
            return await _stream(request, job, shape, tally)
        return await _whole(request, job, shape, tally)
    finally:
        tell_reply(request, job, tally)


def _source(state: ServerState, job: Job) -> ChunkSource:
    return ChunkSource(state.engine, state.backlog, job.requests, only_prompt=job.only_prompt)


async def _whole(request: web.Request, job: Job, shape: Shape, tally: Tally) -> web.Response:
    state = request.app[STATE]
    merged: dict[int, TokenChunk] = {}
    async with state.lifecycle.replying(), _source(state, job) as source:
        while not tally.complete:
            for idx, chunk in await source.next():
                merged[idx] = merge(merged[idx], chunk) if idx in merged else chunk
                tally.add(idx, chunk)
    reply = shape.whole([merged[idx] for idx in range(len(job.requests))], tally)
    return json_response(reply)


async def _stream(request: web.Request, job: Job, shape: Shape, tally: Tally) -> web.StreamResponse:
    state = request.app[STATE]
    events = EventStream(request, shape.framing)
    try:
        async with state.lifecycle.replying(), _source(state, job) as source:
            await events.open()
            await events.send(shape.opening())
            await _forward(source, events, shape, tally, state.settings.keep_alive_seconds)
            await events.send(shape.closing(tally))
            await events.done()
    except RequestError as error:
        if not events.is_open:
            raise
        await _fail(request, events, shape, errors.public_error(error))
    except ConnectionError:
        raise
    except Exception:
        if not events.is_open:
            raise
        _log.exception("stream_failed")
        await _fail(request, events, shape, errors.internal_error())
    finally:
        _tell_stream(request, events)
    return events.response


def _tell_stream(request: web.Request, events: EventStream) -> None:
    if events.opened is not None:
        request[CONTEXT].span.child(
            names.STREAM,
            events.opened,
            time.time(),
            {
                names.STREAM_CHUNKS: events.num_writes,
                names.STREAM_BLOCKED: events.blocked_seconds,
            },
        )


async def _forward(
    source: ChunkSource, events: EventStream, shape: Shape, tally: Tally, idle_seconds: float | None
) -> None:
    while not tally.complete:
        arrived = await source.next(idle_seconds)
        if not arrived:
            await events.keep_alive()
        ready: list[msgspec.Struct] = []
        for idx, chunk in arrived:
            tally.add(idx, chunk)
            ready += shape.events(idx, chunk, tally)
        await events.send(ready)


async def _fail(
    request: web.Request, events: EventStream, shape: Shape, error: RequestError
) -> None:
    request[CONTEXT].failed_status = error.status
    await events.fail(shape.failure(error))


def json_response(reply: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(reply), content_type="application/json")

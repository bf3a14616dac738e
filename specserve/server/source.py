"""The streams of one reply read as one, closed together whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from types import TracebackType

import msgspec

from specserve.engine import Engine
from specserve.server import errors
from specserve.server.backlog import Backlog
from specserve.stream import RequestStream
from specserve.types import Request, TokenChunk


class ChunkSource:
    """Submits on entry (RequestError 429, 503), closes every stream on exit.

    A sequence's prompt counts in the backlog until its first chunk.

    One task per stream moves chunks into a queue of one: while the reader is busy the tasks wait
    and the streams coalesce, so what is held here is bounded.
    """

    def __init__(
        self,
        engine: Engine,
        backlog: Backlog,
        requests: Seq[Request],
        *,
        only_prompt: bool = False,
    ) -> None:
        """only_prompt: leave out what follows the prompts"""
        self._engine = engine
        self._backlog = backlog
        self._waiting: dict[int, int] = {}  # stream index -> prompt tokens without a first chunk
        self._requests = requests
        self._read = _without_output if only_prompt else _usable
        self._streams: list[RequestStream] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._inbox: asyncio.Queue[tuple[int, TokenChunk | None]] = asyncio.Queue(maxsize=1)

    async def __aenter__(self) -> ChunkSource:
        waiting = {idx: len(request.prompt_ids) for idx, request in enumerate(self._requests)}
        self._backlog.add(sum(waiting.values()))
        self._waiting = waiting
        try:
            for request in self._requests:
                self._streams.append(self._engine.submit(request))
        except BaseException:
            self._close()
            raise
        self._tasks = [
            asyncio.create_task(self._pump(idx, stream)) for idx, stream in enumerate(self._streams)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        for idx in list(self._waiting):
            self._has_begun(idx)
        for stream in self._streams:
            stream.close()
        for task in self._tasks:
            task.cancel()

    def _has_begun(self, idx: int) -> None:
        if idx in self._waiting:
            self._backlog.remove(self._waiting.pop(idx))

    async def _pump(self, idx: int, stream: RequestStream) -> None:
        async for chunk in stream:
            self._has_begun(idx)
            await self._inbox.put((idx, chunk))
            if chunk.finish_reason is not None:
                return
        await self._inbox.put((idx, None))

    async def next(self, idle_seconds: float | None = None) -> list[tuple[int, TokenChunk]]:
        """What has arrived, at least one (stream index, chunk); empty after idle_seconds without.

        RequestError (400, 500, 503) as soon as any stream ends otherwise than by stop or length.
        """
        try:
            async with asyncio.timeout(idle_seconds):
                arrived = [await self._inbox.get()]
        except TimeoutError:
            return []
        while not self._inbox.empty():
            arrived.append(self._inbox.get_nowait())
        return [(idx, self._read(chunk)) for idx, chunk in arrived]


def _usable(chunk: TokenChunk | None) -> TokenChunk:
    if chunk is None:
        raise errors.engine_failure("the stream ended without a finish reason")
    if chunk.unfollowable:
        raise errors.unfollowable(chunk.error or "no reason given")
    if chunk.finish_reason == "error":
        raise errors.engine_failure(chunk.error or "no reason given")
    if chunk.finish_reason == "abort":
        raise errors.cut_short()
    return chunk


def _without_output(chunk: TokenChunk | None) -> TokenChunk:
    chunk = _usable(chunk)
    return msgspec.structs.replace(
        chunk,
        text="",
        token_ids=(),
        logprobs=(),
        num_output_tokens=0,
        finish_reason=chunk.finish_reason and "length",
        stop_reason=None,
    )

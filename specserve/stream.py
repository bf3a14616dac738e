"""How tokens leave the engine: one bounded, coalescing stream per sequence.

The engine puts and the handler gets, both on the event loop. A slow reader never blocks the
engine: chunks that wait are merged, so what waits is bounded by the sequence's own length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from specserve.types import TokenChunk


def merge(first: TokenChunk, second: TokenChunk) -> TokenChunk:
    """One chunk that says what the two say in order."""
    return msgspec.structs.replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
        steps=first.steps + second.steps,
    )


class RequestStream:
    """Async iterator of TokenChunk; ends after the chunk that has a finish_reason."""

    def __init__(self, request_id: str, abort: Callable[[], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._waiting: TokenChunk | None = None
        self._arrived = asyncio.Event()
        self._finished = False  # the engine has put its last chunk
        self._drained = False  # the reader has taken it

    def put(self, chunk: TokenChunk) -> None:
        """Engine side."""
        if self._finished:
            return
        self._waiting = chunk if self._waiting is None else merge(self._waiting, chunk)
        self._finished = chunk.finish_reason is not None
        self._arrived.set()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> TokenChunk:
        if self._drained:
            raise StopAsyncIteration
        await self._arrived.wait()
        self._arrived.clear()
        chunk, self._waiting = self._waiting, None
        assert chunk is not None
        self._drained = chunk.finish_reason is not None
        return chunk

    def close(self) -> None:
        """The reader is gone: abort unless finished. Closing twice is fine."""
        if not self._finished:
            self._abort()
        self._drained = True

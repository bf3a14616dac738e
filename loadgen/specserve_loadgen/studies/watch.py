"""K over time, as the server tells it: /specserve/events, kept while a study runs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import aiohttp
import msgspec

from specserve_loadgen.sse import SseParser


class _Window(msgspec.Struct, frozen=True):
    """The parts of an event that are kept."""

    rows_by_k: list[int] = []
    tokens: int = 0


class KWindow(msgspec.Struct, frozen=True):
    """About a quarter of a second. mean_k: over rows that extended a text, those without guesses
    too; label: who was being asked"""

    seconds: float  # since the study began
    label: str
    num_rows: int
    mean_k: float


class Watch:
    """`label` is whoever is asked now. since: seconds that the study has taken before"""

    def __init__(self, since: float = 0.0) -> None:
        self.label = ""
        self._windows: list[KWindow] = []
        self._zero = time.perf_counter() - since
        self._label_before = ""  # of the window before: one that spans two labels is of neither

    def take(self, data: bytes) -> None:
        try:
            window = msgspec.json.decode(data, type=_Window)
        except msgspec.DecodeError:
            return
        num_rows = sum(window.rows_by_k)
        spans, self._label_before = self.label != self._label_before, self.label
        if num_rows and self.label and not spans:
            mean_k = sum(k * count for k, count in enumerate(window.rows_by_k)) / num_rows
            seconds = time.perf_counter() - self._zero
            self._windows.append(KWindow(seconds, self.label, num_rows, mean_k))

    def take_windows(self) -> list[KWindow]:
        """Those that the server told since the last call."""
        taken, self._windows = self._windows, []
        return taken


@contextlib.asynccontextmanager
async def watching(url: str, api_key: str | None, since: float = 0.0) -> AsyncIterator[Watch]:
    """No events, or none any more, is no error: the page then says that K was not told."""
    watch = Watch(since)
    task = asyncio.create_task(_listen(url, api_key, watch))
    try:
        yield watch
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _listen(url: str, api_key: str | None, watch: Watch) -> None:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with (
            aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
            session.get(f"{url}/specserve/events") as response,
        ):
            if response.status != 200:
                return
            parser = SseParser()
            async for data in response.content.iter_any():
                for event in parser.feed(data):
                    watch.take(event.data)

"""A trace viewer on a real socket, in the test's loop or in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple  # Any: decoded JSON

import aiohttp
from aiohttp import web

from specserve_observability.trace_store import TraceStore
from specserve_observability.trace_viewer import FileReader, viewer_app


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    text: str

    @property
    def body(self) -> Any:
        return json.loads(self.text)


class Viewer:
    def __init__(self, port: int, reader: FileReader, store: TraceStore) -> None:
        self.port = port
        self.reader = reader
        self.store = store

    async def get(self, path: str, **headers: str) -> Answer:
        return await self._ask("GET", path, headers, None)

    async def post(self, path: str, body: bytes, **headers: str) -> Answer:
        return await self._ask("POST", path, headers, body)

    async def _ask(
        self, method: str, path: str, headers: dict[str, str], data: bytes | None
    ) -> Answer:
        url = f"http://127.0.0.1:{self.port}{path}"
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                method, url, headers=headers, data=data, allow_redirects=False
            ) as reply,
        ):
            found = {name.lower(): value for name, value in reply.headers.items()}
            return Answer(reply.status, found, await reply.text())


@asynccontextmanager
async def a_viewer(
    *paths: Path, max_bytes: int = 2**26, host: str = "127.0.0.1"
) -> AsyncIterator[Viewer]:
    """Has read all that is in the files; `viewer.reader.read()` reads on."""
    store = TraceStore(max_bytes)
    reader = FileReader(paths, store)
    reader.read()
    runner = web.AppRunner(viewer_app(store, reader, host))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield Viewer(runner.addresses[0][1], reader, store)
    finally:
        await runner.cleanup()
        reader.close()


@contextmanager
def a_viewer_in_a_thread(*paths: Path) -> Iterator[Viewer]:
    started, stop = threading.Event(), threading.Event()
    found: list[Viewer] = []

    async def serve() -> None:
        async with a_viewer(*paths) as viewer:
            found.append(viewer)
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.02)
                viewer.reader.read()

    def run() -> None:
        try:
            asyncio.run(serve())
        finally:
            started.set()

    thread = threading.Thread(target=run, name="viewer")
    thread.start()
    started.wait(30)
    try:
        yield found[0]
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()

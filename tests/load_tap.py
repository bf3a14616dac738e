"""A tap between a load tool and a server: bytes pass unchanged, and our own report is made of them.

So two tools measure the same requests. What they say of them is comparable to a percent on a
machine where no two runs are.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from specserve_loadgen.prompt import Message, Prompt
from specserve_loadgen.records import RequestRecord, Turn
from specserve_loadgen.reply import Reply
from specserve_loadgen.report import Report, make_report
from specserve_loadgen.run import RunResult
from specserve_loadgen.settings import Settings
from specserve_loadgen.sse import SseParser
from tests.loadgen_server import serving

UNKNOWN = Prompt(prompt_id="?", category="?", messages=(Message("user", "?"),))


class Tap:
    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session
        self.by_reply_id: dict[str, RequestRecord] = {}
        self._zero = time.perf_counter()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._pass)
        return app

    def report(self, reply_ids: Collection[str] | None = None) -> Report:
        """Of all streams, or of those that a tool says it counted."""
        chosen = self.by_reply_id if reply_ids is None else reply_ids
        records = sorted((self.by_reply_id[name] for name in chosen), key=lambda r: r.sent)
        result = RunResult(
            model="tapped",
            server_version=None,
            started_at=0.0,
            records=tuple(records),
            server_deltas={},
            loop_lags=(),
            num_failed_warmups=0,
            interrupted=False,
        )
        return make_report(Settings(url=self.url), result)

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        sent = time.perf_counter() - self._zero
        kept = {k: v for k, v in request.headers.items() if k.lower() not in ("host",)}
        async with self._session.request(
            request.method, self.url + request.raw_path, data=await request.read(), headers=kept
        ) as upstream:
            drop = ("transfer-encoding", "content-length", "connection", "keep-alive")
            headers = {k: v for k, v in upstream.headers.items() if k.lower() not in drop}
            response = web.StreamResponse(status=upstream.status, headers=headers)
            await response.prepare(request)
            if upstream.content_type == "text/event-stream":
                with contextlib.suppress(ConnectionError):  # a tool that has seen enough goes
                    await self._pass_stream(upstream, response, sent)
            else:
                await response.write(await upstream.read())
            return response

    async def _pass_stream(
        self, upstream: aiohttp.ClientResponse, response: web.StreamResponse, sent: float
    ) -> None:
        reply, parser = Reply(), SseParser()
        reply_id = ""
        async for data in upstream.content.iter_any():
            now = time.perf_counter() - self._zero
            await response.write(data)
            for event in parser.feed(data):
                reply.on_event(event, now)
                if not reply_id:
                    reply_id = json.loads(event.data)["id"]
        self.by_reply_id[reply_id] = self._record(reply, sent)
        await response.write_eof()

    def _record(self, reply: Reply, sent: float) -> RequestRecord:
        ended = time.perf_counter() - self._zero if reply.done_at is None else reply.done_at
        turn = Turn(request_idx=len(self.by_reply_id))
        return reply.record(turn=turn, prompt=UNKNOWN, sent=sent, ended=ended, failure=None)


@asynccontextmanager
async def tapping(url: str) -> AsyncIterator[tuple[Tap, str]]:
    """The tap, and the address that a tool is given in the server's place."""
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        tap = Tap(url, session)
        async with serving(tap.app()) as address:
            yield tap, address

"""Reading a request's body: bounded in size and time, every fault a 4xx with a reason."""

from __future__ import annotations

import asyncio

from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from specserve.errors import RequestError
from specserve.server.state import STATE
from specserve.server.wire import Body, parse_body


async def read_body(request: web.Request, kind: type[Body]) -> Body:
    state = request.app[STATE]
    try:
        async with asyncio.timeout(state.settings.body_seconds):
            raw = await request.read()
    except TimeoutError:
        raise RequestError(
            f"the request body did not arrive within {state.settings.body_seconds:g} seconds",
            code="request_timeout",
            status=408,
        ) from None
    except web.HTTPRequestEntityTooLarge:
        raise RequestError(
            f"the request body is larger than {state.settings.max_body_bytes} bytes, the most that "
            "this server reads: shorten the prompt",
            code="request_too_large",
            status=413,
        ) from None
    except (web.RequestPayloadError, ClientPayloadError, HttpProcessingError, ValueError):
        raise RequestError(
            "the request body cannot be read: its length, chunking or compression is damaged",
            code="invalid_body",
        ) from None
    if len(raw) > state.settings.off_loop_body_bytes:
        return await state.engine.run_off_loop(parse_body, raw, kind)
    return parse_body(raw, kind)

"""Around every request: its id, its span, and the promise that every error has one shape."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from contextlib import AbstractContextManager, nullcontext

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler

from specserve.errors import EngineError, RequestError
from specserve.server import errors
from specserve.server.keys import OPEN_ROUTES
from specserve.server.protocol import ServerProtocol
from specserve.server.request_log import log_request
from specserve.server.state import CONTEXT, STATE, RequestContext
from specserve.server.traffic import TRAFFIC_CLASS_HEADER
from specserve_observability import names
from specserve_observability.logs import bound_request, get_logger

REQUEST_ID_PATTERN = "[A-Za-z0-9._:-]{1,128}"
# Their errors have Anthropic's shape.
MESSAGES_ROUTES = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
# What a span says of a client that left; there is no reply to carry it.
CLIENT_CLOSED_REQUEST = 499

_log = get_logger("specserve.server")

ROUTE_NAMES = web.AppKey("route_names", dict[web.AbstractResource, str])


def valid_request_id(value: str) -> bool:
    return re.fullmatch(REQUEST_ID_PATTERN, value) is not None


def _route_name(request: web.Request) -> str:
    """The endpoint as documented: a raw path would make every probe a new name."""
    resource = request.match_info.route.resource
    if resource is None:
        return "unmatched"
    return request.app[ROUTE_NAMES].get(resource, "unmatched")


@web.middleware
async def around(request: web.Request, handler: Handler) -> web.StreamResponse:
    if isinstance(request.protocol, ServerProtocol):
        request.protocol.headers_arrived()
    asked = request.headers.get("x-request-id", "")
    context = RequestContext(
        request_id=asked if valid_request_id(asked) else f"req-{uuid.uuid4().hex}",
        span=request.app[STATE].tracer.start(
            method=request.method,
            route=_route_name(request),
            headers=request.headers,
            scheme=request.scheme,
        ),
    )
    request[CONTEXT] = context
    if context.request_id != asked:  # the caller's own is the caller's text, which no span holds
        context.attributes[names.HTTP_RESPONSE_REQUEST_ID] = [context.request_id]
    started = time.perf_counter()
    status = CLIENT_CLOSED_REQUEST
    with bound_request(context.request_id, context.span.traceparent):
        try:
            response = await _answer(request, handler)
            status = context.failed_status or response.status
            return response
        except (ConnectionError, asyncio.CancelledError):
            context.attributes[names.CLIENT_DISCONNECTED] = True
            raise
        finally:
            context.span.end(status, context.attributes, context.operation)
            route = _route_name(request)
            request.app[STATE].http.add(route, status)
            log_request(
                request.method,
                route,
                status,
                time.perf_counter() - started,
                context.traffic_class,
                context.attributes | context.operation,
            )


async def expected(request: web.Request) -> None:
    """Before the middleware runs: the go-ahead for a body. What else is expected, _answer refuses;
    aiohttp's own refusal would be plain text. So is a caller without a key, before its body."""
    try:
        _key_of(request)
    except RequestError:
        return
    if _expects_continue(request) and request.version == HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the reply itself has not begun


def _expects_continue(request: web.Request) -> bool:
    return request.headers.get("expect", "").lower() == "100-continue"


def _key_of(request: web.Request) -> int | None:
    """None: no key is asked for. RequestError 401. Decided by the route that matched, not by the
    path's text, so that no spelling of a path is an open door."""
    keys = request.app[STATE].settings.keys
    if keys is None or _route_name(request) in OPEN_ROUTES:
        return None
    return keys.identify(request)


def _traffic_class(request: web.Request, key_idx: int | None) -> str:
    """Its key's, which the operator chose, before what the request says of itself."""
    settings = request.app[STATE].settings
    if settings.keys is not None and key_idx is not None:
        own = settings.keys.class_of(key_idx)
        if own is not None:
            return own
    return settings.traffic_classes.named(request.headers.get(TRAFFIC_CLASS_HEADER))


def _slot(request: web.Request, key_idx: int | None) -> AbstractContextManager[None]:
    if key_idx is None or request.method != "POST":  # what is not POST makes no work
        return nullcontext()
    return request.app[STATE].slots.held(key_idx)


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        if "expect" in request.headers and not _expects_continue(request):
            raise errors.unknown_expectation()
        cors = request.app[STATE].settings.cors
        if cors.is_preflight(request):
            return cors.preflight(request)
        key_idx = _key_of(request)
        request[CONTEXT].traffic_class = _traffic_class(request, key_idx)
        with _slot(request, key_idx):
            return await handler(request)
    except (RequestError, EngineError) as error:
        return _refusal(request, errors.public_error(error))
    except web.HTTPException as error:
        if error.status < 400:
            raise
        refusal = errors.from_http_exception(error, method=request.method, path=request.path)
        response = _refusal(request, refusal)
        if isinstance(error, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionError:
        raise
    except Exception:
        _log.exception("request_failed")
        return _refusal(request, errors.internal_error())


def _refusal(request: web.Request, error: RequestError) -> web.Response:
    # By the path where no method matched: then there is no route to be named by.
    if {_route_name(request), re.sub("/+", "/", request.path)} & MESSAGES_ROUTES:
        body = errors.messages_error(error, request[CONTEXT].request_id)
        return errors.error_response(error, body)
    return errors.error_response(error)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """on_response_prepare: streams and errors alike."""
    response.headers["Server"] = "specserve"  # not which libraries, in which versions
    request.app[STATE].settings.cors.add_headers(request, response)
    context = request.get(CONTEXT)
    if context is not None:
        response.headers["x-request-id"] = context.request_id
        if (traceparent := context.span.own_traceparent) is not None:
            response.headers["traceparent"] = traceparent

"""Jaeger's query API over a TraceStore, so that its UI and Grafana's Jaeger source can be pointed
at a trace file.

`/api/v3/*` answers with OTLP JSON, as the spans came; the older `/api/*` with Jaeger's own JSON.
Jaeger dropped its older search after 2.20, Grafana still asks for it: both are here. Lists are
always sent, empty ones too, because clients that validate want them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from .jaeger import Json, jaeger_traces
from .otlp_reading import TraceFileError, read_spans
from .trace_query import QueryError, TraceQuery, query_of_legacy, query_of_v3
from .trace_store import StoredTrace, TraceStore

_HEX_ID = re.compile("[0-9a-fA-F]{1,32}")
_MAX_BASE64_CHARS = 24  # of 16 bytes
_NO_TRACE = "trace not found"

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.Response]]


class ApiError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class JaegerApi:
    def __init__(self, store: TraceStore) -> None:
        self._store = store

    def routes(self) -> list[web.RouteDef]:
        v3: dict[str, Handler] = {
            "/api/v3/services": self._services_v3,
            "/api/v3/operations": self._operations_v3,
            "/api/v3/trace-summaries": self._summaries,
            "/api/v3/traces": self._find_v3,
            "/api/v3/traces/{trace_id}": self._trace_v3,
        }
        older: dict[str, Handler] = {
            "/api/services": self._services,
            "/api/services/{service}/operations": self._operations_of,
            "/api/operations": self._operations,
            "/api/traces": self._find,
            "/api/traces/{trace_id}": self._trace,
            "/api/dependencies": self._dependencies,
        }
        return [
            *(web.get(path, _answering(handler, _error_v3)) for path, handler in v3.items()),
            *(web.get(path, _answering(handler, _error)) for path, handler in older.items()),
            web.post("/api/transform", _answering(self._transform, _error)),
        ]

    # ---- API v3 ------------------------------------------------------------------------------

    async def _services_v3(self, request: web.Request) -> web.Response:
        return _json({"services": self._store.services()})

    async def _operations_v3(self, request: web.Request) -> web.Response:
        asked = request.query
        kind = asked.get("spanKind") or asked.get("span_kind") or ""
        found = self._store.operations(asked.get("service", ""), kind)
        operations = [{"name": name, "spanKind": kind or "internal"} for name, kind in found]
        return _json({"operations": operations})

    async def _summaries(self, request: web.Request) -> web.Response:
        query = query_of_v3(request.query)
        return _json({"summaries": await asyncio.to_thread(self._store.find, query, _summary)})

    async def _find_v3(self, request: web.Request) -> web.Response:
        query = query_of_v3(request.query)
        found = await asyncio.to_thread(self._store.find, query, _resource_spans)
        if not found:
            raise ApiError(404, "No traces found")
        return _otlp([part for parts in found for part in parts])

    async def _trace_v3(self, request: web.Request) -> web.Response:
        return _otlp(self._use(request, _resource_spans))

    # ---- the older API -----------------------------------------------------------------------

    async def _services(self, request: web.Request) -> web.Response:
        services = self._store.services()
        return _structured(services, len(services))

    async def _operations_of(self, request: web.Request) -> web.Response:
        found = self._store.operations(request.match_info["service"])
        names = sorted({name for name, _ in found})
        return _structured(names, len(names))

    async def _operations(self, request: web.Request) -> web.Response:
        service = request.query.get("service")
        if not service:
            raise ApiError(400, "parameter 'service' is required")
        found = self._store.operations(service, request.query.get("spanKind", ""))
        data = [{"name": name, "spanKind": kind} for name, kind in found]
        return _structured(data, len(data))

    async def _find(self, request: web.Request) -> web.Response:
        asked = request.query
        ids = [_trace_id(text) for text in asked.getall("traceID", [])]
        if ids:
            found = [self._store.use(trace_id, _jaeger) for trace_id in ids]
            missing = [one for one, trace in zip(ids, found, strict=True) if trace is None]
            errors = [{"msg": _NO_TRACE, "traceID": trace_id} for trace_id in missing]
            return _structured([trace for trace in found if trace], errors=errors or None)
        query = query_of_legacy(asked, asked.getall("tag", []))
        return _structured(await asyncio.to_thread(self._store.find, query, _jaeger))

    async def _trace(self, request: web.Request) -> web.Response:
        return _structured([self._use(request, _jaeger)])

    async def _dependencies(self, request: web.Request) -> web.Response:
        found = await asyncio.to_thread(
            self._store.find, TraceQuery(limit=self._store.num_traces), _calls_between_services
        )
        counts: Counter[tuple[str, str]] = sum(found, Counter())
        links = [
            {"parent": parent, "child": child, "callCount": count}
            for (parent, child), count in sorted(counts.items())
        ]
        return _structured(links)

    async def _transform(self, request: web.Request) -> web.Response:
        """OTLP JSON to Jaeger's, for the UI's upload; nothing is kept.

        A browser asks no leave before it sends another site's form: that is not worked on.
        """
        if request.headers.get("Sec-Fetch-Site") == "cross-site":
            raise ApiError(403, "Sec-Fetch-Site is cross-site: other sites may not send traces")
        body = await request.read()
        try:
            return _structured(await asyncio.to_thread(lambda: jaeger_traces(read_spans(body))))
        except TraceFileError as error:
            raise ApiError(400, f"cannot unmarshal OTLP : {error}") from error

    def _use(self, request: web.Request, use: Callable[[StoredTrace], T]) -> T:
        made = self._store.use(_trace_id(request.match_info["trace_id"]), use)
        if made is None:
            raise ApiError(404, _NO_TRACE)
        return made


def _answering(handler: Handler, error_body: Callable[[int, str], Json]) -> Handler:
    """Errors in the shape of the API they belong to."""

    async def answer(request: web.Request) -> web.Response:
        try:
            return await handler(request)
        except QueryError as error:
            return _json(error_body(400, str(error)), 400)
        except ApiError as error:
            return _json(error_body(error.status, str(error)), error.status)
        except web.HTTPRequestEntityTooLarge as error:
            return _json(error_body(413, f"the upload is too large: {error.text}"), 413)

    return answer


def _error_v3(status: int, message: str) -> Json:
    return {"error": {"httpCode": status, "message": message}}


def _error(status: int, message: str) -> Json:
    return _structure(None, 0, [{"code": status, "msg": message}])


def _structured(data: object, total: int = 0, errors: object = None) -> web.Response:
    return _json(_structure(data, total, errors))


def _structure(data: object, total: int, errors: object) -> Json:
    return {"data": data, "total": total, "limit": 0, "offset": 0, "errors": errors}


def _otlp(resource_spans: list[msgspec.Raw]) -> web.Response:
    return _json({"result": {"resourceSpans": resource_spans}})


def _json(body: Json, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )


def _trace_id(text: str) -> str:
    """Hex, which may lack zeros in front, or base64. Raises ApiError."""
    if _HEX_ID.fullmatch(text):
        return text.lower().zfill(32)
    if len(text) <= _MAX_BASE64_CHARS:
        padded = text.replace("-", "+").replace("_", "/").rstrip("=")
        try:
            raw = base64.b64decode(padded + "=" * (-len(padded) % 4), validate=True)
        except binascii.Error:
            raw = b""
        if len(raw) == 16:
            return raw.hex()
    raise ApiError(400, f"malformed parameter trace_id: {text[:40]!r} is not a trace id")


def _summary(trace: StoredTrace) -> Json:
    root_service, root_name = trace.root()
    return {
        "traceId": trace.trace_id,
        "rootServiceName": root_service,
        "rootOperationName": root_name,
        "minStartTimeUnixNano": str(trace.start_ns),
        "maxEndTimeUnixNano": str(trace.end_ns),
        "spanCount": trace.num_spans,
        "errorSpanCount": trace.num_errors,
        "orphanSpanCount": trace.num_orphans,
        "services": [
            {"name": name, "spanCount": count.num_spans, "errorSpanCount": count.num_errors}
            for name, count in sorted(trace.services.items())
        ],
    }


def _resource_spans(trace: StoredTrace) -> list[msgspec.Raw]:
    """As the spans came: only put together."""
    return [
        msgspec.Raw(
            b'{"resource":%b,"scopeSpans":[{"scope":%b,"spans":[%b]}]}'
            % (group.raw_resource, group.raw_scope, b",".join(group.raw_spans))
        )
        for group in trace.groups.values()
    ]


def _jaeger(trace: StoredTrace) -> Json:
    (one,) = jaeger_traces(trace.spans())
    return one


def _calls_between_services(trace: StoredTrace) -> Counter[tuple[str, str]]:
    if len(trace.services) < 2:
        return Counter()
    reads = list(trace.spans())
    service_of = {read.span.span_id: read.resource.service for read in reads}
    return Counter(
        (service_of[read.span.parent_span_id], read.resource.service)
        for read in reads
        if service_of.get(read.span.parent_span_id, read.resource.service) != read.resource.service
    )

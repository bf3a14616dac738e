"""A real OTLP/HTTP collector for tests: aiohttp on a loopback port, protobuf decoded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class OtlpReceiver:
    """endpoint: what goes to --otlp-endpoint; messages: every request body, decoded."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.messages: list[ExportTraceServiceRequest] = []

    async def handle(self, request: web.Request) -> web.Response:
        assert request.content_type == "application/x-protobuf"
        message = ExportTraceServiceRequest()
        message.ParseFromString(await request.read())
        self.messages.append(message)
        body = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=body, content_type="application/x-protobuf")

    def spans(self) -> Iterator[tuple[str, Span]]:
        """(service name, span) in order of arrival."""
        for message in self.messages:
            yield from spans_of(message)


def spans_of(message: ExportTraceServiceRequest) -> Iterator[tuple[str, Span]]:
    for group in message.resource_spans:
        service = attributes_of(group.resource.attributes)["service.name"]
        for scope_spans in group.scope_spans:
            for span in scope_spans.spans:
                yield str(service), span


@asynccontextmanager
async def an_otlp_receiver() -> AsyncIterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    app = web.Application()
    app.router.add_post("/v1/traces", receiver.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    receiver.endpoint = f"http://{host}:{port}"
    try:
        yield receiver
    finally:
        await runner.cleanup()


def attributes_of(pairs: Iterator[KeyValue] | list[KeyValue]) -> dict[str, object]:
    return {pair.key: value_of(pair.value) for pair in pairs}


def value_of(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(item) for item in value.array_value.values]
    return getattr(value, kind)

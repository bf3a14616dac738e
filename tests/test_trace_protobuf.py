"""What goes to a collector: bytes as protobuf's own encoder writes them, and another try."""

from __future__ import annotations

import asyncio
import gzip
import math
import ssl
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.trace import SpanContext, TraceFlags, TraceState

from specserve_observability import otlp_delivery
from specserve_observability.export import ExportSettings, Where
from specserve_observability.otlp_delivery import open_delivery
from specserve_observability.otlp_protobuf import encode_request, encode_span
from specserve_observability.spans import SERVER, Event, Origin, Span
from specserve_observability.tracing import open_tracing
from tests.certificates import a_certificate, needs_openssl

ORIGIN = Origin({"service.name": "specserve"}, "specserve", "1.2.3")
CONTEXT = SpanContext(0xABC << 100, 0xDEF, False, TraceFlags(1), TraceState([("a", "1")]))
CALLER = SpanContext(0xABC << 100, 0x123, True, TraceFlags(1))

texts = st.text(st.characters(exclude_categories=["Cs"]))
int64s = st.integers(-(2**63), 2**63 - 1)
plain = st.one_of(st.booleans(), int64s, st.floats(allow_nan=False), texts)
values = st.one_of(plain, st.lists(int64s), st.lists(texts), st.lists(st.floats(allow_nan=False)))
attributes = st.dictionaries(texts, values, max_size=8)
nanoseconds = st.integers(1, 2**63)  # proto3 leaves out what is 0
contexts = st.sampled_from([CONTEXT, CALLER])
events = st.tuples(texts, attributes, nanoseconds).map(lambda given: Event(*given))
spans = st.fixed_dictionaries(
    {
        "name": texts,
        "context": contexts,
        "parent": st.none() | contexts,
        "origin": st.just(ORIGIN),
        "kind": st.sampled_from([1, SERVER]),
        "start_ns": nanoseconds,
        "end_ns": nanoseconds,
        "attributes": attributes,
        "events": st.lists(events, max_size=3),
        "links": st.lists(contexts, max_size=3),
        "error": st.none() | texts,
    }
).map(lambda given: Span(**given))


def a_span(**attributes: object) -> Span:
    return Span("work", CONTEXT, None, ORIGIN, SERVER, 1, 2, attributes)


def decoded(data: bytes) -> ExportTraceServiceRequest:
    return ExportTraceServiceRequest.FromString(data)


# ---- its bytes -----------------------------------------------------------------------------------


@given(st.lists(spans, max_size=3))
def test_bytes_are_those_of_protobufs_own_encoder(given_spans: list[Span]) -> None:
    data = encode_request(ORIGIN, [encode_span(span) for span in given_spans])
    message = ExportTraceServiceRequest()
    group = message.resource_spans.add()
    group.resource.attributes.extend(key_values(ORIGIN.resource))
    scoped = group.scope_spans.add()
    scoped.scope.name, scoped.scope.version = "specserve", "1.2.3"
    for span in given_spans:
        fill(scoped.spans.add(), span)
    assert decoded(data) == message
    assert data == message.SerializeToString(deterministic=True)


def fill(to: object, span: Span) -> None:
    to.trace_id = span.context.trace_id.to_bytes(16)
    to.span_id = span.context.span_id.to_bytes(8)
    to.trace_state = span.context.trace_state.to_header()
    if span.parent is not None:
        to.parent_span_id = span.parent.span_id.to_bytes(8)
    to.flags = 0x101 | (0x200 if span.parent is not None and span.parent.is_remote else 0)
    to.name, to.kind = span.name, span.kind
    to.start_time_unix_nano, to.end_time_unix_nano = span.start_ns, span.end_ns
    to.attributes.extend(key_values(span.attributes))
    for event in span.events:
        told = to.events.add(name=event.name, time_unix_nano=event.time_ns)
        told.attributes.extend(key_values(event.attributes))
    for link in span.links:
        ids = {"trace_id": link.trace_id.to_bytes(16), "span_id": link.span_id.to_bytes(8)}
        to.links.add(**ids, flags=0x301 if link.is_remote else 0x101)
    to.status.SetInParent()
    if span.error is not None:
        to.status.code, to.status.message = 2, span.error


def key_values(attributes: dict[str, object]) -> list[KeyValue]:
    return [KeyValue(key=key, value=any_value(value)) for key, value in attributes.items()]


def any_value(value: object) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case str():
            return AnyValue(string_value=value)
    made = AnyValue()
    made.array_value.SetInParent()
    made.array_value.values.extend(any_value(item) for item in value)
    return made


def test_values_that_are_equal_and_not_the_same_keep_their_kind() -> None:
    for value in (1, 1.0, True, 0, 0.0, -0.0, False, "1"):
        [group] = decoded(encode_request(ORIGIN, [encode_span(a_span(x=value))])).resource_spans
        [pair] = group.scope_spans[0].spans[0].attributes
        found = getattr(pair.value, pair.value.WhichOneof("value"))
        assert (found, type(found)) == (value, type(value))
        assert type(value) is not float or math.copysign(1, found) == math.copysign(1, value)


# ---- its way -------------------------------------------------------------------------------------


class Collector:
    """Answers with the given statuses, one after the other, and the last one for ever."""

    def __init__(
        self, *answers: tuple[int, dict[str, str]], tls: ssl.SSLContext | None = None
    ) -> None:
        self.answers = list(answers)
        self.tls = tls
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.requests.append((dict(request.headers), await request.read()))
        status, headers = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return web.Response(status=status, headers=headers)

    async def __aenter__(self) -> Collector:
        app = web.Application()
        app.router.add_post("/v1/traces", self.handle)
        self.runner = web.AppRunner(app, auto_decompress=False)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0, ssl_context=self.tls).start()
        scheme = "http" if self.tls is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self.runner.addresses[0][1]}/v1/traces"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()


async def deliver(collector: Collector) -> bool:
    delivery = open_delivery(collector.url, "http/protobuf")
    try:
        return await asyncio.to_thread(delivery.deliver, b"data")
    finally:
        delivery.close()


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_collector_that_is_busy_is_asked_again_when_it_says(status: int) -> None:
    async with Collector((status, {"retry-after": "0"}), (200, {})) as collector:
        assert await deliver(collector)
    assert [body for _, body in collector.requests] == [b"data"] * 2


@pytest.mark.parametrize("status", [307, 400, 401, 413, 500])
async def test_a_refusal_is_final(status: int) -> None:
    async with Collector((status, {"location": "/elsewhere"})) as collector:
        assert not await deliver(collector)
    assert len(collector.requests) == 1


async def test_tries_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_delivery, "_FIRST_PAUSE_SECONDS", 0.001)
    async with Collector((503, {})) as collector:
        assert not await deliver(collector)
        assert len(collector.requests) == 6
    async with Collector((503, {"retry-after": "60"})) as collector:
        assert not await deliver(collector)
    assert len(collector.requests) == 1


async def test_variables_set_headers_and_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20no")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "authorization=Bearer%20yes,x-a=1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    async with Collector((200, {})) as collector:
        assert await deliver(collector)
    [(headers, body)] = collector.requests
    asked = {name.lower(): value for name, value in headers.items()}
    assert (asked["authorization"], asked["x-a"]) == ("Bearer yes", "1")
    assert asked["content-type"] == "application/x-protobuf"
    assert (asked["content-encoding"], gzip.decompress(body)) == ("gzip", b"data")


@pytest.mark.parametrize(
    ("variable", "value", "kind"),
    [
        ("COMPRESSION", "brotli", ValueError),
        ("CERTIFICATE", "/absent/brotli.pem", OSError),
        ("CLIENT_CERTIFICATE", "/absent/brotli.pem", OSError),
        ("CLIENT_KEY", "/absent/brotli.pem", OSError),
    ],
)
@pytest.mark.parametrize("exporter", ["process", "thread"])
def test_a_variable_that_cannot_be_followed_is_an_error_at_once(
    variable: str,
    value: str,
    kind: type[Exception],
    exporter: Where,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{variable}", value)
    settings = ExportSettings(otlp_endpoint="https://127.0.0.1:1", exporter=exporter)
    with pytest.raises(kind, match="brotli"):
        open_tracing(settings, service_version="1")


@needs_openssl
async def test_a_collector_over_tls_is_known_by_its_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = a_certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=paths[0])
    context.load_cert_chain(*paths)
    context.verify_mode = ssl.CERT_REQUIRED  # and it knows us by the same one
    async with Collector((200, {}), tls=context) as collector:
        monkeypatch.setattr(otlp_delivery, "_MAX_TRIES", 1)
        assert not await deliver(collector)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", paths[0])
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", paths[0])
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_KEY", paths[1])
        assert await deliver(collector)
    assert len(collector.requests) == 1

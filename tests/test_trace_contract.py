"""Every span name, attribute, event and link is promised: one that goes missing fails here.

A server of its own is asked all that leaves a trace. Its trace file is read back, and a collector
that is not ours (rotel) must have seen the same, over HTTP and over gRPC.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from specserve_observability import names
from tests.rotel_receiver import a_rotel, needs_rotel
from tests.trace_contract import (
    TRACEPARENT,
    Contract,
    Seen,
    contract_of,
    play_everything,
    read_contract,
    seen_in_files,
)


def promised() -> set[str]:
    contract = read_contract()
    found = {*contract.resource, *contract.spans}
    for promise in contract.spans.values():
        found |= {*promise.always, *promise.sometimes, *promise.events, promise.service}
        found |= {key for keys in promise.events.values() for key in keys}
    return found


def test_every_name_that_the_code_has_is_in_the_contract() -> None:
    ours = {value for key, value in vars(names).items() if key.isupper()}
    assert ours - promised() == set()


async def test_a_real_server_keeps_the_contract(tmp_path: Path) -> None:
    spans = seen_in_files(await play_everything(tmp_path, {}))
    check(spans)
    chat = next(span for span in spans if span.name == "chat test")
    assert chat.trace_id == TRACEPARENT.split("-")[1]
    assert chat.attributes["gen_ai.request.choice.count"] == 2
    assert chat.attributes["gen_ai.request.seed"] == 1
    assert chat.attributes["gen_ai.request.top_k"] == 5
    said = [{"role": "user", "parts": [{"type": "text", "content": "say"}]}]
    assert chat.attributes["gen_ai.input.messages"] == _json(said)


@needs_rotel
@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
async def test_a_collector_of_somebody_else_sees_every_name_attribute_and_link(
    tmp_path: Path, protocol: str
) -> None:
    with a_rotel(tmp_path) as rotel:
        endpoint = rotel.grpc if protocol == "grpc" else rotel.http
        where = {"otlp_endpoint": endpoint, "otlp_protocol": protocol}
        filed = seen_in_files(await play_everything(tmp_path, where))
        received = rotel.seen(len(filed))
    check(received)
    assert len(received) == len(filed)
    for ours, theirs in zip(sorted(filed, key=_id), sorted(received, key=_id), strict=True):
        assert theirs._replace(resource=ours.resource) == ours
        # The exporter's own marks are beside ours, and in the file, too.
        assert theirs.resource == ours.resource


def check(spans: list[Seen]) -> None:
    found, wanted = contract_of(spans), read_contract()
    assert found.resource == wanted.resource
    assert list(found.spans) == list(wanted.spans)
    for name, promise in wanted.spans.items():
        assert found.spans[name] == promise, name
    assert found == Contract(wanted.resource, wanted.spans)


def _id(span: Seen) -> tuple[str, str]:
    return span.trace_id, span.span_id


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()

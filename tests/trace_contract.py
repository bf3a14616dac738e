"""What spans promise: names, kinds, parents, attributes, events and links, from whatever saw them.

`python -m tests.trace_contract` plays everything that makes a span and writes the promise anew.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from specserve_observability.export import ExportSettings
from specserve_observability.tracing import open_tracing
from tests.otlp_receiver import attributes_of
from tests.raw_http import ask, connect
from tests.server_process import FAULT, ServerProcess, a_server_process
from tests.trace_reading import read_trace_file
from tests.trace_records import a_request, a_row, a_step

GOLDEN = Path(__file__).parent / "golden" / "trace_contract.json"
TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"
Value: TypeAlias = object  # str, int, float, bool or a list of them


class Seen(NamedTuple):
    """A span as a receiver saw it."""

    resource: dict[str, Value]
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, Value]
    events: list[tuple[str, dict[str, Value]]]
    links: list[tuple[str, str]]
    failed: bool


class Promise(msgspec.Struct):
    """Of all spans of one name. always: attributes of each; sometimes: of some"""

    service: str
    kind: str
    parents: list[str]
    always: list[str]
    sometimes: list[str]
    events: dict[str, list[str]]
    links: list[str]
    may_fail: bool


class Contract(msgspec.Struct):
    resource: list[str]
    spans: dict[str, Promise]


def contract_of(spans: Seq[Seen]) -> Contract:
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    by_name: dict[str, list[Seen]] = defaultdict(list)
    for span in spans:
        by_name[generic(span)].append(span)
    return Contract(
        resource=sorted({key for span in spans for key in span.resource}),
        spans={name: _promise(by_name[name], by_id) for name in sorted(by_name)},
    )


def generic(span: Seen) -> str:
    """Names that hold a route or a model stand for all of their kind."""
    if span.kind == "server":
        return "{method} {route}"
    return "{operation} {model}" if "gen_ai.operation.name" in span.attributes else span.name


def _promise(spans: Seq[Seen], by_id: dict[tuple[str, str], Seen]) -> Promise:
    (service,) = {str(span.resource["service.name"]) for span in spans}
    (kind,) = {span.kind for span in spans}
    keys = [span.attributes.keys() for span in spans]
    always = set.intersection(*map(set, keys))
    events: dict[str, set[str]] = defaultdict(set)
    for name, attributes in (event for span in spans for event in span.events):
        events[name] |= attributes.keys()
    linked = {generic(by_id[link]) for span in spans for link in span.links}
    return Promise(
        service=service,
        kind=kind,
        parents=sorted({_parent(span, by_id) for span in spans}),
        always=sorted(always),
        sometimes=sorted(set.union(*map(set, keys)) - always),
        events={name: sorted(events[name]) for name in sorted(events)},
        links=sorted(linked),
        may_fail=any(span.failed for span in spans),
    )


def _parent(span: Seen, by_id: dict[tuple[str, str], Seen]) -> str:
    if not span.parent_id:
        return "none"
    parent = by_id.get((span.trace_id, span.parent_id))
    return "the caller's" if parent is None else generic(parent)


def read_contract() -> Contract:
    return msgspec.json.decode(GOLDEN.read_bytes(), type=Contract)


# ---- from trace files ----------------------------------------------------------------------------


def seen_in_files(paths: Iterable[Path]) -> list[Seen]:
    return [
        _seen(span, attributes_of(group.resource.attributes))
        for path in paths
        for message in read_trace_file(path)
        for group in message.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def _seen(span: Span, resource: dict[str, Value]) -> Seen:
    return Seen(
        resource=resource,
        name=span.name,
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        attributes=attributes_of(span.attributes),
        events=[(event.name, attributes_of(event.attributes)) for event in span.events],
        links=[(link.trace_id.hex(), link.span_id.hex()) for link in span.links],
        failed=span.status.code == Status.STATUS_CODE_ERROR,
    )


# ---- everything that makes a span ----------------------------------------------------------------


async def play_everything(folder: Path, options: dict[str, object]) -> list[Path]:
    """A server of its own is asked all that leaves a trace, and ends; the trace files.

    options: where else spans go, as ServeOptions and ExportSettings call it
    """
    more = {"trace_steps_per_second": 1e9, "trace_content": True, **options}
    with a_server_process(folder, slow_every=40, fail_every=3, options=more) as server:
        await asyncio.wait_for(_ask_everything(server), 120)
        await server.has_traced()
        server.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.process.wait, 60) == 0, server.log
    apart = folder / "records.jsonl"
    await asyncio.to_thread(_record_the_rest, apart, options)
    return [folder / "trace.jsonl", apart]


async def _ask_everything(server: ServerProcess) -> None:
    headers = {"traceparent": TRACEPARENT, "tracestate": "vendor=1", "user-agent": "contract"}
    headers["host"] = "a.example:81"
    shape = {"structured_outputs": {"regex": "[ab]{3}"}, "seed": 1, "top_k": 5}
    chat = {"messages": [{"role": "user", "content": "say"}], "stream": True, "n": 2, **shape}
    await ask(server.port, "POST", "/v1/chat/completions", chat, headers=headers)
    for drafter in ("oracle", "part", "auto", "none"):
        choice = {"drafter": drafter, **({} if drafter == "none" else {"max_draft_tokens": 8})}
        body = {"prompt": "say:", "temperature": 0, "ignore_eos": True, "speculation": choice}
        await ask(server.port, "POST", "/v1/completions", {**body, "max_tokens": 90})
    await ask(server.port, "POST", "/v1/completions", {"prompt": f"{FAULT}:", "temperature": 0})
    long = {"prompt": "x" * 60 + ":", "ignore_eos": True, "temperature": 0, "max_tokens": 280}
    oracle = {"speculation": {"drafter": "oracle", "max_draft_tokens": 8}}
    crowd = [{**long, "cache_salt": f"{idx}", **oracle} for idx in range(5)]
    # Together they need more KV blocks than there are: some are preempted.
    await asyncio.gather(*(ask(server.port, "POST", "/v1/completions", one) for one in crowd))
    async with connect(server.port) as connection:
        await connection.request("POST", "/v1/completions", {**long, "stream": True})
        await connection.reader.readuntil(b"data: ")
    await server.is_idle()


def _record_the_rest(path: Path, options: dict[str, object]) -> None:
    """What a healthy server never has: a step that fails, more steps than a decode links to. And
    what has no HTTP: a request of Python's API."""
    settings = msgspec.convert(
        {"trace_file": f"{path}", "exporter": "thread", "steps_per_second": 1e9, **options},
        ExportSettings,
    )
    resource = {"specserve.model.target": "test"}
    tracing = open_tracing(settings, service_version="1", resource=resource)
    for idx in range(70):
        tracing.recorder.record_step(a_step(idx, [a_row(), a_row(1, traceparent=None)]))
    tracing.recorder.record_step(a_step(70, [a_row()], error="out of memory"))
    tracing.recorder.record_request(a_request(0, rows=[a_row()] * 70))
    failed = {"finish_reason": "error", "error": "out of memory"}
    tracing.recorder.record_request(a_request(1, traceparent=None, **failed))
    tracing.shutdown(timeout=30)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        paths = asyncio.run(play_everything(Path(folder), {}))
        contract = contract_of(seen_in_files(paths))
    text = msgspec.json.format(msgspec.json.encode(contract), indent=1).decode()
    # A list on one line each: what changes is seen in a diff.
    GOLDEN.write_text(re.sub(r"\[\s+([^\]]*?)\s+\]", _one_line, text) + "\n")
    return 0


def _one_line(found: re.Match[str]) -> str:
    return "[" + re.sub(r",\s+", ", ", found.group(1)) + "]"


if __name__ == "__main__":
    sys.exit(main())

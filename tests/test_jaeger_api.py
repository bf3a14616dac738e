"""Jaeger's query API over a trace file: its shapes, its searches, its errors.

`golden/jaeger_api.json` holds what each path answers for `golden/trace.jsonl`. The shapes are those
of Jaeger 2.20 (`apiv3/http_gateway.go`, `http_handler.go`, `uimodel/model.go`); Jaeger's UI 2.19
was driven over this API by hand.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated
from urllib.parse import quote, urlencode

import msgspec
import pytest

from tests.otlp_lines import BEGIN, a_line, a_span
from tests.trace_viewing import Viewer, a_viewer

pytestmark = pytest.mark.timeout(60)

GOLDEN = Path(__file__).parent / "golden"
API = json.loads((GOLDEN / "jaeger_api.json").read_text())
ENGINE = "specserve-engine"
IN_2027 = "2027-01-15T08:00:0{}Z"  # BEGIN is 08:00:00 of that day


@pytest.fixture
async def golden() -> AsyncIterator[Viewer]:
    async with a_viewer(GOLDEN / "trace.jsonl") as viewer:
        yield viewer


@pytest.fixture
async def searched(tmp_path: Path) -> AsyncIterator[Viewer]:
    """Four traces of one second each, begun a second after the other."""
    path = tmp_path / "t.jsonl"
    lines = [
        a_line(
            a_span(1, "POST /v1/completions", trace=1, kind=2, http__route="/v1/completions"),
            a_span(2, "decode", trace=1, parent=1, seconds=0.25, drafts=4, rate=0.5),
        ),
        a_line(
            a_span(3, "POST /v1/completions", trace=2, start=1, seconds=2, kind=2, error="broken"),
            a_span(4, "decode", trace=2, parent=3, start=1.5, drafts=9, names=["a", "b"]),
            host="h1",
        ),
        a_line(
            a_span(5, "engine.window", trace=3, start=2, early=True), service="specserve-engine"
        ),
        a_line(
            a_span(6, "GET /ready", trace=4, start=3, seconds=0.001, kind=2, Ω='say "hi"'),
        ),
    ]
    path.write_bytes(b"".join(lines))
    async with a_viewer(path) as viewer:
        yield viewer


@pytest.mark.parametrize("path", list(API))
async def test_every_path_answers_as_the_golden_file_says(golden: Viewer, path: str) -> None:
    answer = await golden.get(path)
    assert (answer.status, answer.body) == (API[path]["status"], API[path]["body"])
    assert answer.headers["content-type"] == "application/json"


async def test_an_upload_of_otlp_is_answered_with_jaegers_json(golden: Viewer) -> None:
    lines = [json.loads(line) for line in (GOLDEN / "trace.jsonl").read_text().split("\n") if line]
    merged = {"resourceSpans": [group for line in lines for group in line["resourceSpans"]]}
    answer = await golden.post("/api/transform", json.dumps(merged).encode())
    expected = json.loads((GOLDEN / "jaeger.json").read_text())["data"]
    assert answer.body == {"data": expected, "total": 0, "limit": 0, "offset": 0, "errors": None}
    refused = await golden.post("/api/transform", b'{"data": []}')
    assert refused.status == 400
    assert refused.body["errors"][0]["msg"].startswith("cannot unmarshal OTLP : not OTLP JSON")
    assert golden.store.num_spans == 3  # nothing of it was kept


async def test_otlp_that_comes_with_bare_integers_leaves_with_text(golden: Viewer) -> None:
    """JavaScript would round them; the golden file's second trace has them."""
    [summary] = (
        await golden.get("/api/v3/trace-summaries?query.serviceName=specserve-engine")
    ).body["summaries"]
    assert summary["minStartTimeUnixNano"] == "1800000000000000000"
    body = (await golden.get(f"/api/v3/traces/{summary['traceId']}")).body
    [span] = body["result"]["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert span["startTimeUnixNano"] == "1800000000000000000"


async def test_a_trace_is_found_by_every_spelling_of_its_id(golden: Viewer) -> None:
    trace_id = "5b8efff798038103d269b633813fc60c"
    in_base64 = base64.b64encode(bytes.fromhex(trace_id)).decode()
    safe = in_base64.replace("+", "-").replace("/", "_").rstrip("=")
    for spelling in (trace_id, trace_id.upper(), quote(in_base64, safe=""), safe):
        for path in ("/api/traces/", "/api/v3/traces/"):
            assert (await golden.get(path + spelling)).status == 200, spelling


# ---- searching -------------------------------------------------------------------------------


async def found(viewer: Viewer, **query: str) -> list[int]:
    """The traces that all three searches find, newest first; they must agree."""
    v3 = {f"query.{name}": value for name, value in query.items()}
    summaries = (await viewer.get(f"/api/v3/trace-summaries?{urlencode(v3)}")).body["summaries"]
    traces = await viewer.get(f"/api/v3/traces?{urlencode(v3)}")
    ids = [one["traceId"] for one in summaries]
    groups = traces.body["result"]["resourceSpans"] if traces.status == 200 else []
    spans = [span for group in groups for part in group["scopeSpans"] for span in part["spans"]]
    assert list(dict.fromkeys(span["traceId"] for span in spans)) == ids
    return [int(trace_id, 16) for trace_id in ids]


@pytest.mark.parametrize(
    ("query", "traces"),
    [
        ({}, [4, 3, 2, 1]),
        ({"searchDepth": "2"}, [4, 3]),
        ({"num_traces": "1"}, [4]),
        ({"serviceName": ENGINE}, [3]),
        ({"service_name": "specserve"}, [4, 2, 1]),
        ({"serviceName": "nobody"}, []),
        ({"operationName": "decode"}, [2, 1]),
        ({"operationName": "decode", "durationMin": "500ms"}, [2]),
        ({"operation_name": "decode", "duration_max": "0.5s"}, [1]),
        ({"durationMin": "1500ms"}, [2]),
        ({"durationMax": "10ms"}, [4]),
        ({"durationMin": "1m"}, []),
        ({"attributes": '{"drafts": "4"}'}, [1]),
        ({"attributes": '{"rate": "0.50"}'}, [1]),
        ({"attributes": '{"names": "[\\"a\\", \\"b\\"]"}'}, [2]),
        ({"attributes": '{"early": "true"}'}, [3]),
        ({"attributes": '{"Ω": "say \\"hi\\""}'}, [4]),
        ({"attributes": '{"drafts": "4", "http.route": "/v1/completions"}'}, []),  # two spans
        ({"attributes": '{"error": "true"}'}, [2]),
        ({"attributes": '{"error": "false"}', "operationName": "POST /v1/completions"}, [1]),
        ({"attributes": '{"span.status": "ERROR"}'}, [2]),
        ({"attributes": '{"span.kind": "server"}'}, [4, 2, 1]),
        ({"attributes": '{"host": "h1"}'}, [2]),
        ({"attributes": '{"resource.host": "h1"}'}, [2]),
        ({"attributes": '{"scope.version": "1.2.3"}'}, [4, 3, 2, 1]),
        ({"attributes": '{"scope.name": "other"}'}, []),
        ({"startTimeMin": IN_2027.format(2)}, [4, 3]),
        ({"start_time_max": IN_2027.format("1.2")}, [2, 1]),
        ({"startTimeMin": IN_2027.format(1), "startTimeMax": "2027-01-15T09:00:02+01:00"}, [3, 2]),
    ],
)
async def test_api_v3_finds_traces_with_a_span_that_meets_all(
    searched: Viewer, query: dict[str, str], traces: list[int]
) -> None:
    assert await found(searched, **query) == traces


@pytest.mark.parametrize(
    ("query", "traces"),
    [
        ("service=specserve", [4, 2, 1]),
        ("service=specserve&operation=decode&limit=1", [2]),
        ("service=specserve&minDuration=1.5s", [2]),
        ("service=specserve&maxDuration=900%C2%B5s", []),
        ("service=specserve&maxDuration=1000us", [4]),
        ("service=specserve&tags=%7B%22error%22%3A%22true%22%7D", [2]),
        ("service=specserve&tag=drafts:4", [1]),
        ("tag=http.route:/v1/completions", [1]),
        (f"start={BEGIN // 1000 + 2_000_000}", [4, 3]),
        (f"end={BEGIN // 1000}", [1]),
        ("traceID=3&traceID=1", [3, 1]),
    ],
)
async def test_the_older_search_finds_the_same(
    searched: Viewer, query: str, traces: list[int]
) -> None:
    body = (await searched.get(f"/api/traces?{query}")).body
    assert [int(trace["traceID"], 16) for trace in body["data"]] == traces
    assert body["errors"] is None


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("query.startTimeMin=yesterday", "malformed parameter query.startTimeMin"),
        ("query.startTimeMin=2027-01-15T08:00:00", "has no time zone"),
        (
            "query.startTimeMin=2027-01-16T00:00:00Z&query.startTimeMax=2027-01-15T00:00:00Z",
            "before",
        ),
        ("query.durationMin=5", "malformed parameter query.durationMin: '5' is not a duration"),
        ("query.duration_max=1x", "malformed parameter query.duration_max"),
        ("query.durationMin=2s&query.durationMax=1s", "should be greater than"),
        ("query.searchDepth=0", "search depth must be greater than 0"),
        ("query.searchDepth=many", "'many' is not an integer"),
        ("query.attributes=%7B%22a%22%3A1%7D", "malformed parameter query.attributes"),
        ("query.filter=%7B%7D", "query.filter is not supported"),
    ],
)
async def test_what_cannot_be_searched_is_said(searched: Viewer, query: str, said: str) -> None:
    for path in ("traces", "trace-summaries"):
        answer = await searched.get(f"/api/v3/{path}?{query}")
        assert answer.status == 400
        assert answer.body["error"]["httpCode"] == 400
        assert said in answer.body["error"]["message"]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("start=soon", "unable to parse param 'start'"),
        ("limit=0", "limit is 0"),
        ("limit=99999", "limit is 99999"),
        ("tag=nothing", "expecting key:value"),
        ("tags=oops", "malformed parameter tags"),
        ("traceID=xyz", "'xyz' is not a trace id"),
    ],
)
async def test_what_the_older_search_cannot_read_is_said(
    searched: Viewer, query: str, said: str
) -> None:
    answer = await searched.get(f"/api/traces?{query}")
    assert answer.status == 400
    assert answer.body["data"] is None
    [error] = answer.body["errors"]
    assert error["code"] == 400
    assert said in error["msg"]


async def test_calls_between_services_are_dependencies(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(
        a_line(a_span(1), service="web")
        + a_line(a_span(2, parent=1), a_span(3, parent=1), a_span(4, parent=2), service="db")
    )
    async with a_viewer(path) as viewer:
        body = (await viewer.get("/api/dependencies?endTs=1&lookback=1")).body
    assert body["data"] == [{"parent": "web", "child": "db", "callCount": 2}]


# ---- what clients read it with ---------------------------------------------------------------


def _with_ids(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join("ID" if word == "id" else word.title() for word in rest)


class GrafanaTag(msgspec.Struct, forbid_unknown_fields=True):
    """These are the types that Grafana's Jaeger source decodes with (`pkg/tsdb/jaeger/types`)."""

    key: str
    type: str
    value: str | int | float | bool


class GrafanaLog(msgspec.Struct, forbid_unknown_fields=True):
    timestamp: int
    fields: list[GrafanaTag]


class GrafanaReference(msgspec.Struct, rename=_with_ids, forbid_unknown_fields=True):
    ref_type: str
    span_id: str
    trace_id: str


class GrafanaProcess(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    service_name: str
    tags: list[GrafanaTag]


class GrafanaSpan(msgspec.Struct, rename=_with_ids, forbid_unknown_fields=True):
    trace_id: str
    span_id: str
    process_id: str
    operation_name: str
    start_time: int
    duration: int
    logs: list[GrafanaLog]
    references: list[GrafanaReference]
    tags: list[GrafanaTag]
    warnings: list[str] | None


class GrafanaTrace(msgspec.Struct, rename=_with_ids, forbid_unknown_fields=True):
    processes: dict[str, GrafanaProcess]
    trace_id: str
    warnings: list[str] | None
    spans: list[GrafanaSpan]


class GrafanaReply(msgspec.Struct, forbid_unknown_fields=True):
    data: list[GrafanaTrace]
    errors: None
    limit: int
    offset: int
    total: int


async def test_grafana_decodes_searches_and_traces(searched: Viewer, golden: Viewer) -> None:
    search = await searched.get("/api/traces?service=specserve&limit=20")
    assert len(msgspec.json.decode(search.text, type=GrafanaReply).data) == 3
    one = await golden.get("/api/traces/5b8efff798038103d269b633813fc60c?start=1&end=2")
    [trace] = msgspec.json.decode(one.text, type=GrafanaReply).data
    assert {span.process_id for span in trace.spans} == trace.processes.keys()


HexId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
Nanoseconds = Annotated[str, msgspec.Meta(pattern=r"^\d+$")]
Count = Annotated[int, msgspec.Meta(ge=0)]


class UiService(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    name: str
    span_count: Count
    error_span_count: Count


class UiSummary(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """As strict as the schemas that Jaeger's UI validates with (`api/v3/schemas.ts`)."""

    trace_id: HexId
    root_service_name: str
    root_operation_name: str
    min_start_time_unix_nano: Nanoseconds
    max_end_time_unix_nano: Nanoseconds
    span_count: Count
    error_span_count: Count
    orphan_span_count: Count
    services: list[UiService]


async def test_jaegers_ui_accepts_summaries(searched: Viewer) -> None:
    """With the parameters that it sends."""
    query = urlencode(
        {
            "query.serviceName": "specserve",
            "query.startTimeMin": "2027-01-15T07:00:00.000Z",
            "query.startTimeMax": "2027-01-15T09:00:00.000Z",
            "query.searchDepth": "20",
        }
    )
    reply = await searched.get(f"/api/v3/trace-summaries?{query}")
    found = msgspec.json.decode(reply.text, type=dict[str, list[UiSummary]])["summaries"]
    assert [summary.root_operation_name for summary in found] == [
        *("GET /ready", "POST /v1/completions", "POST /v1/completions")
    ]
    assert [summary.error_span_count for summary in found] == [0, 1, 0]

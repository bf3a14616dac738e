"""What spans say: names, attributes, parents, links, and which steps are kept."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from specserve_observability.export import Batch
from specserve_observability.metrics import Metrics
from specserve_observability.pipeline import SpanPipeline
from specserve_observability.records import QueuePeriod, StepRecord
from specserve_observability.spans import Span
from tests.otlp_receiver import attributes_of
from tests.trace_reading import FileTracing, record_two_requests
from tests.trace_records import (
    START,
    a_request,
    a_row,
    a_step,
    decode_id,
    decode_traceparent,
    server_traceparent,
    trace_id,
)

PHASES = ("plan", "draft", "target_forward", "verify", "commit")


@pytest.fixture
def to_file(tmp_path: Path) -> Iterator[FileTracing]:
    run = FileTracing(tmp_path / "traces.jsonl")
    yield run
    run.tracing.shutdown()


# ---- what a span says ------------------------------------------------------------------------


def test_links_between_requests_and_steps_resolve_both_ways(to_file: FileTracing) -> None:
    record_two_requests(to_file.tracing)
    trace = to_file.finish()
    steps = trace.named("engine.step")
    decodes = trace.named("decode")
    (window,) = trace.named("engine.window")
    assert len(steps) == 3
    assert {span.span_id.hex() for span in decodes} == {decode_id(0), decode_id(1)}
    for decode in decodes:
        assert trace.links_of(decode) == [window, *steps]
    for span in (window, *steps):
        assert trace.links_of(span) == decodes
        assert trace.services[span.span_id.hex()] == "specserve-engine"
    assert {trace.services[span.span_id.hex()] for span in decodes} == {"specserve"}
    assert not window.parent_span_id
    assert all(trace.parent_of(step) is window for step in steps)


def test_a_step_has_its_five_phases_end_to_end(to_file: FileTracing) -> None:
    step = a_step(0, [a_row()])
    to_file.tracing.recorder.record_step(step)
    trace = to_file.finish()
    span = trace.one("engine.step")
    phases = [trace.one(name) for name in PHASES]
    assert all(trace.parent_of(phase) is span for phase in phases)
    assert phases[0].start_time_unix_nano == span.start_time_unix_nano
    assert span.start_time_unix_nano == round(step.plan_start * 1e9)
    assert phases[-1].end_time_unix_nano == span.end_time_unix_nano
    for before, after in itertools.pairwise(phases):
        assert before.end_time_unix_nano == after.start_time_unix_nano


def test_a_step_carries_its_batch_and_one_outcome_per_request(to_file: FileTracing) -> None:
    rows = [
        msgspec.structs.replace(a_row(0, drafted=3, accepted=2), predicted_accepted=1.5),
        msgspec.structs.replace(
            a_row(1, drafter="none", tokens=8, emitted=0), no_draft_reason="prefill"
        ),
    ]
    step = msgspec.structs.replace(
        a_step(7, rows, preempted=1),
        predicted_seconds=0.25,
        speculation_seconds=0.125,
        failed_drafters=("suffix",),
    )
    to_file.tracing.recorder.record_step(step)
    span = to_file.finish().one("engine.step")
    assert attributes_of(span.attributes) == {
        "specserve.step.index": 7,
        "specserve.step.kind": "mixed",
        "specserve.step.sample_reason": "preempted",
        "specserve.batch.requests": 2,
        "specserve.batch.tokens": 12,
        "specserve.batch.prefill_tokens": 8,
        "specserve.batch.decode_tokens": 1,
        "specserve.batch.token_budget": 512,
        "specserve.spec.draft_tokens": 3,
        "specserve.spec.accepted_tokens": 2,
        "specserve.spec.predicted_accepted_tokens": 1.5,
        "specserve.spec.emitted_tokens": 3,
        "specserve.spec.seconds": 0.125,
        "specserve.generated_tokens": 3,
        "specserve.step.seconds": pytest.approx(step.verify_end - step.draft_start),
        "specserve.step.predicted_seconds": 0.25,
        "specserve.requests.running": 2,
        "specserve.requests.waiting": 2,
        "specserve.kv.blocks_free": 100,
        "specserve.kv.blocks_cached": 20,
        "specserve.kv.blocks_live": 8,
        "specserve.preemptions": 1,
    }
    failure, *outcomes = span.events
    assert failure.name == "specserve.drafter_failure"
    assert attributes_of(failure.attributes) == {"specserve.spec.drafter": "suffix"}
    assert [event.name for event in outcomes] == ["specserve.request_outcome"] * 2
    why = attributes_of(outcomes[1].attributes)["specserve.spec.no_draft_reason"]
    assert why == "prefill"
    assert attributes_of(outcomes[0].attributes) == {
        "specserve.request.id": "req-0",
        "specserve.batch.tokens": 1,
        "specserve.spec.drafter": "ngram",
        "specserve.spec.draft_tokens": 3,
        "specserve.spec.accepted_tokens": 2,
        "specserve.spec.predicted_accepted_tokens": 1.5,
        "specserve.generated_tokens": 3,
    }
    assert span.events[0].time_unix_nano == span.end_time_unix_nano
    assert all(not link.attributes for link in span.links)


def test_a_decode_span_sums_up_its_request(to_file: FileTracing) -> None:
    rows = [a_row(0, drafted=3, accepted=2), a_row(0, drafted=1, accepted=1), a_row(0)]
    to_file.tracing.recorder.record_request(a_request(0, rows=rows))
    trace = to_file.finish()
    decode = trace.one("decode")
    said = attributes_of(decode.attributes)
    assert said == {
        "specserve.request.id": "req-0",
        "gen_ai.provider.name": "specserve",
        "gen_ai.request.model": "demo",
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": pytest.approx(0.4),
        "specserve.decode.steps": 3,
        "specserve.preemptions": 0,
        "specserve.spec.drafters": ["ngram"],
        "specserve.spec.steps": 2,
        "specserve.spec.draft_tokens": 4,
        "specserve.spec.accepted_tokens": 3,
        "specserve.spec.emitted_tokens": 5,
        "specserve.spec.drafted_at_position": [2, 1, 1],
        "specserve.spec.accepted_at_position": [2, 1],
        "specserve.spec.acceptance_rate": 0.75,
        "specserve.spec.acceptance_length": 2.5,
        "specserve.latency.queue": pytest.approx(0.2),
        "specserve.latency.prefill": pytest.approx(0.2),
        "specserve.latency.decode": pytest.approx(0.6),
        "specserve.latency.ttft": pytest.approx(0.4),
        "specserve.latency.tpot": pytest.approx(0.12),
        "specserve.latency.prefill_wait": pytest.approx(0),
    }
    chunks = [attributes_of(span.attributes) for span in trace.named("prefill")]
    assert [c["specserve.prefill.chunk"] for c in chunks] == [0, 1]
    assert [c["specserve.prefill.tokens"] for c in chunks] == [6, 2]
    assert [c["specserve.prefill.cached_tokens"] for c in chunks] == [4, 0]


def test_every_stay_in_the_queue_is_a_span_with_its_reason(to_file: FileTracing) -> None:
    request = a_request(0)
    stays = (*request.queue, QueuePeriod(START + 0.5, START + 0.7, "preempted"))
    to_file.tracing.recorder.record_request(msgspec.structs.replace(request, queue=stays))
    spans = to_file.finish().named("queue")
    reasons = [attributes_of(span.attributes)["specserve.queue.reason"] for span in spans]
    assert reasons == ["admission", "preempted"]


def test_failures_are_marked_as_errors(to_file: FileTracing) -> None:
    to_file.tracing.recorder.record_step(a_step(0, [a_row()], error="out of memory"))
    to_file.tracing.recorder.record_request(
        a_request(0, finish_reason="error", error="out of memory")
    )
    trace = to_file.finish()
    for span in (trace.one("engine.step"), trace.one("decode")):
        assert span.status.code == Status.STATUS_CODE_ERROR
        assert span.status.message == "out of memory"
        assert "error.type" in attributes_of(span.attributes)
    assert trace.one("queue").status.code == Status.STATUS_CODE_UNSET


def test_a_request_aborted_in_the_queue_still_has_a_decode_span(to_file: FileTracing) -> None:
    to_file.tracing.recorder.record_request(a_request(0, finish_reason="abort", started=False))
    trace = to_file.finish()
    assert Counter(span.name for span in trace.spans) == {"queue": 1, "decode": 1}
    said = attributes_of(trace.one("decode").attributes)
    assert said["gen_ai.response.finish_reasons"] == ["abort"]
    assert "gen_ai.response.time_to_first_chunk" not in said


def test_a_request_without_a_trace_of_its_own_gets_one(to_file: FileTracing) -> None:
    to_file.tracing.recorder.record_step(a_step(0, [a_row(traceparent=None)]))
    to_file.tracing.recorder.record_request(a_request(0, traceparent=None))
    trace = to_file.finish()
    root = trace.one("request")
    assert not root.parent_span_id
    assert trace.parent_of(trace.one("decode")) is root
    assert not trace.one("engine.step").links
    assert len(trace.one("engine.step").events) == 1


class KeptSpans:
    """A sink that keeps what it is offered."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def offer(self, spans: Sequence[Span]) -> None:
        self.spans.extend(spans)

    def close(self, deadline: float) -> None:
        return


def test_a_drain_between_a_request_and_its_last_step_loses_no_link() -> None:
    sink = KeptSpans()
    pipeline = SpanPipeline([sink], Metrics(), resource={}, version="1")
    pipeline.handle(Batch([], [a_request(0)], [], START))
    pipeline.handle(Batch([a_step(0, [a_row()])], [], [], START + 1, seconds_left=0))
    by_name = {span.name: span for span in sink.spans}
    assert list(by_name["decode"].links) == [
        by_name["engine.window"].context,
        by_name["engine.step"].context,
    ]


# ---- sampling and bounds ---------------------------------------------------------------------


def test_a_trace_its_sender_did_not_sample_leaves_nothing(to_file: FileTracing) -> None:
    unsampled = server_traceparent(0, sampled=False)
    server_tracer = to_file.tracing.server_tracer
    assert server_tracer is not None
    span = server_tracer.start(method="GET", route="/x", headers={"traceparent": unsampled})
    assert span.traceparent is not None
    assert span.traceparent.endswith("-00")
    span.end(200, {})
    row = a_row(0, traceparent=decode_traceparent(0, sampled=False))
    to_file.tracing.recorder.record_step(a_step(0, [row]))
    to_file.tracing.recorder.record_request(a_request(0, traceparent=span.traceparent))
    trace = to_file.finish()
    assert set(trace.services.values()) == {"specserve-engine"}
    assert not trace.one("engine.step").links


def steps_of_ten_seconds(*, odd: dict[int, StepRecord]) -> list[StepRecord]:
    """1,000 steps of 10 ms; `odd` replaces some by index."""
    return [odd.get(idx) or a_step(idx, [a_row()]) for idx in range(1000)]


def test_ordinary_steps_are_thinned_and_every_odd_one_is_kept(to_file: FileTracing) -> None:
    odd = {
        500: a_step(500, [a_row()], seconds=0.05),
        600: a_step(600, [a_row()], preempted=1),
        700: a_step(700, [a_row()], error="boom"),
    }
    for step in steps_of_ten_seconds(odd=odd):
        to_file.tracing.recorder.record_step(step)
    trace = to_file.finish()
    kept = [attributes_of(span.attributes) for span in trace.named("engine.step")]
    reasons = Counter(str(step["specserve.step.sample_reason"]) for step in kept)
    assert {k: reasons[k] for k in ("slow", "preempted", "error")} == {
        "slow": 1,
        "preempted": 1,
        "error": 1,
    }
    assert {500, 600, 700} <= {step["specserve.step.index"] for step in kept}
    assert 200 <= reasons["rate"] <= 100 + 20 * 10 + 1
    windows = [attributes_of(span.attributes) for span in trace.named("engine.window")]
    assert sum(int(str(w["specserve.window.steps"])) for w in windows) == 1000
    assert sum(int(str(w["specserve.window.sampled_steps"])) for w in windows) == len(kept)
    assert to_file.metrics.num_step_spans_sampled_out == 1000 - len(kept)


def test_trouble_without_end_is_bounded_too(to_file: FileTracing) -> None:
    for idx in range(1000):  # four seconds
        step = a_step(idx, [a_row()], start=START + idx * 0.004, seconds=0.003, preempted=1)
        to_file.tracing.recorder.record_step(step)
    at_most = 100 + 100 * 4 + 100 + 20 * 4  # the tail's burst and rate, the ordinary ones' too
    assert 400 <= len(to_file.finish().named("engine.step")) <= at_most + 2


@pytest.mark.parametrize(
    ("step_seconds", "steps_per_window"), [(0.01, [256, 256, 88]), (0.1, [50] * 12)]
)
def test_a_window_ends_after_256_steps_or_5_seconds(
    to_file: FileTracing, step_seconds: float, steps_per_window: list[int]
) -> None:
    for idx in range(600):
        start = START + idx * step_seconds
        to_file.tracing.recorder.record_step(a_step(idx, [a_row()], start=start, seconds=0.001))
    windows = [attributes_of(span.attributes) for span in to_file.finish().named("engine.window")]
    assert [w["specserve.window.steps"] for w in windows] == steps_per_window
    assert [w["specserve.window.index"] for w in windows] == list(range(len(windows)))


def test_more_requests_than_the_sdk_allows_links_are_all_linked(to_file: FileTracing) -> None:
    rows = [a_row(idx) for idx in range(300)]
    to_file.tracing.recorder.record_step(a_step(0, rows))
    for idx in range(300):
        to_file.tracing.recorder.record_request(a_request(idx))
    trace = to_file.finish()
    step = trace.one("engine.step")
    assert len(trace.links_of(step)) == 300
    assert len(step.events) == 300


def test_a_long_request_links_to_a_bounded_number_of_steps(to_file: FileTracing) -> None:
    for idx in range(100):
        to_file.tracing.recorder.record_step(a_step(idx, [a_row()]))
    to_file.tracing.recorder.record_request(a_request(0))
    trace = to_file.finish()
    assert len(trace.named("engine.step")) == 100
    linked = Counter(span.name for span in trace.links_of(trace.one("decode")))
    assert linked == {"engine.window": 1, "engine.step": 64}
    assert attributes_of(trace.one("decode").attributes)["specserve.decode.links_dropped"] == 36


# ---- the server's spans ----------------------------------------------------------------------


def test_a_server_span_continues_the_callers_trace(to_file: FileTracing) -> None:
    server_tracer = to_file.tracing.server_tracer
    assert server_tracer is not None
    headers = {"traceparent": server_traceparent(3), "tracestate": "vendor=1"}
    span = server_tracer.start(method="POST", route="/v1/completions", headers=headers)
    span.end(200, {})
    sent = to_file.finish().one("POST /v1/completions")
    assert sent.trace_id.hex() == trace_id(3)
    assert sent.parent_span_id.hex() == server_traceparent(3).split("-")[2]
    assert sent.trace_state == "vendor=1"
    assert span.traceparent == f"00-{trace_id(3)}-{sent.span_id.hex()}-01"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "garbage",
        "00-" + "0" * 32 + "-" + "1" * 16 + "-01",
        "ff-" + "1" * 32 + "-" + "1" * 16 + "-01",
    ],
)
def test_a_header_that_is_no_traceparent_begins_a_new_trace(
    to_file: FileTracing, header: str
) -> None:
    server_tracer = to_file.tracing.server_tracer
    assert server_tracer is not None
    span = server_tracer.start(method="POST", route="/x", headers={"traceparent": header})
    span.end(200, {})
    sent = to_file.finish().one("POST /x")
    assert not sent.parent_span_id
    assert span.traceparent == f"00-{sent.trace_id.hex()}-{sent.span_id.hex()}-01"


@pytest.mark.parametrize(
    ("status", "is_error"), [(200, False), (429, False), (499, False), (500, True)]
)
def test_only_a_servers_own_failure_is_an_error(
    to_file: FileTracing, status: int, is_error: bool
) -> None:
    server_tracer = to_file.tracing.server_tracer
    assert server_tracer is not None
    server_tracer.start(method="GET", route="/x", headers={"host": "[::1"}).end(status, {})
    span = to_file.finish().one("GET /x")
    assert (span.status.code == Status.STATUS_CODE_ERROR) == is_error
    assert ("error.type" in attributes_of(span.attributes)) == is_error


def test_ending_a_server_span_twice_sends_it_once(to_file: FileTracing) -> None:
    server_tracer = to_file.tracing.server_tracer
    assert server_tracer is not None
    span = server_tracer.start(method="GET", route="/x", headers={})
    span.end(200, {})
    span.end(500, {})
    assert (
        attributes_of(to_file.finish().one("GET /x").attributes)["http.response.status_code"] == 200
    )

"""What /metrics says: valid Prometheus text, counters that only grow, sums that agree."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve_observability.exposition import expose
from specserve_observability.metrics import Gauges, Metrics
from specserve_observability.recorder import Recorder
from specserve_observability.records import QueuePeriod, RequestRecord, StepRecord
from tests.prometheus_text import PrometheusText, no_load, scrape
from tests.trace_records import START, Row, a_request, a_row, a_step, play


def record_all(
    recorder: Recorder, steps: Sequence[StepRecord], requests: Sequence[RequestRecord]
) -> None:
    for step in steps:
        recorder.record_step(step)
    for request in requests:
        recorder.record_request(request)


COUNTERS = {
    *("generated_tokens", "preemptions", "steps", "decode_step_seconds"),
    *("decode_step_plain_seconds", "spans_dropped", "step_records_dropped"),
    *("step_spans_sampled_out", "spec_steps", "spec_draft_tokens", "spec_accepted_tokens"),
    *("spec_wasted_tokens", "spec_emitted_tokens", "spec_predicted_accepted_tokens"),
    *("spec_drafted_at_position", "spec_accepted_at_position", "drafter_failures"),
    *("requests_finished", "prompt_tokens", "prefix_cached_tokens", "http_requests"),
}
GAUGES = {"engine_up", "requests_running", "requests_waiting", "kv_blocks", "net_gain_ratio"}
HISTOGRAMS = {
    *("time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("inter_chunk_latency_seconds", "time_per_output_token_seconds"),
    *("request_duration_seconds", "queue_seconds", "prefill_seconds", "decode_seconds"),
    "inference_seconds",
    *("request_prompt_tokens", "request_output_tokens", "request_acceptance_ratio"),
    *("spec_emitted_per_step", "row_draft_tokens", "step_phase_seconds", "step_rows"),
}


def test_every_series_exists_at_zero_before_the_first_request() -> None:
    text = scrape(Metrics(drafters=["none", "ngram", "draft_model"], max_draft_tokens=3))
    assert text.types == {
        **{f"specserve_{name}_total": "counter" for name in COUNTERS},
        **{f"specserve_{name}": "gauge" for name in GAUGES},
        **{f"specserve_{name}": "histogram" for name in HISTOGRAMS},
    }
    assert set(text.monotonic().values()) == {0.0}
    at = "specserve_spec_accepted_at_position_total"
    for drafter in ("ngram", "draft_model", "other"):
        for position in ("0", "1", "2"):
            assert text.get(at, drafter=drafter, position=position) == 0
    for reason in ("stop", "length", "abort", "error"):
        finished = "specserve_requests_finished_total"
        assert text.get(finished, reason=reason, traffic_class="default") == 0
    assert text.get("specserve_net_gain_ratio") == 1


def test_the_readmes_table_names_every_metric_and_no_other() -> None:
    readme = (Path(__file__).parent.parent / "README.md").read_text()
    section = readme.split("\n## Metrics\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| `")]
    named = {name for line in table for name in re.findall(r"`([a-z_]+)(?:\{[a-z,]+\})?`", line)}
    labels = {"traffic_class", "drafter", "position"}
    assert named - labels == {f"{name}_total" for name in COUNTERS} | GAUGES | HISTOGRAMS


def test_gauges_say_what_the_engine_says() -> None:
    gauges = Gauges(
        num_running=3,
        waiting={"admission": 1, "kv_capacity": 4, "preempted": 0},
        blocks_free=10,
        blocks_cached=20,
        blocks_live=30,
        engine_up=False,
    )
    text = scrape(Metrics(), gauges)
    assert text.get("specserve_requests_running") == 3
    assert text.get("specserve_requests_waiting", reason="admission") == 1
    assert text.get("specserve_requests_waiting", reason="kv_capacity") == 4
    assert text.get("specserve_requests_waiting", reason="preempted") == 0
    assert text.get("specserve_engine_up") == 0
    assert text.get("specserve_kv_blocks", state="free") == 10
    assert text.get("specserve_kv_blocks", state="cached") == 20
    assert text.get("specserve_kv_blocks", state="live") == 30


def test_one_step_and_one_request_by_hand() -> None:
    recorder = Recorder(Metrics(drafters=["ngram"], max_draft_tokens=4))
    rows = [
        a_row(0, drafted=4, accepted=2),
        a_row(1, drafted=1, accepted=1),
        a_row(2),
        a_row(3, tokens=7, emitted=0),
    ]
    recorder.record_step(a_step(0, rows, preempted=2))
    recorder.record_request(
        a_request(0, rows=rows[:1], prompt=12, cached=4, finish_reason="length")
    )
    text = scrape(recorder.metrics)
    assert text.get("specserve_steps_total") == 1
    assert text.get("specserve_preemptions_total") == 2
    assert text.get("specserve_generated_tokens_total") == 3 + 2 + 1
    assert text.get("specserve_spec_steps_total", drafter="ngram") == 2
    assert text.get("specserve_spec_draft_tokens_total", drafter="ngram") == 5
    assert text.get("specserve_spec_accepted_tokens_total", drafter="ngram") == 3
    assert text.get("specserve_spec_emitted_tokens_total", drafter="ngram") == 5
    at = [
        (
            text.get("specserve_spec_drafted_at_position_total", drafter="ngram", position=str(i)),
            text.get("specserve_spec_accepted_at_position_total", drafter="ngram", position=str(i)),
        )
        for i in range(4)
    ]
    assert at == [(2, 2), (1, 1), (1, 0), (1, 0)]
    assert text.get("specserve_spec_wasted_tokens_total", drafter="ngram") == 2
    emitted = "specserve_spec_emitted_per_step"
    assert text.get(f"{emitted}_sum", drafter="ngram") == 5
    by_length = [text.get(f"{emitted}_bucket", drafter="ngram", le=f"{n}.0") for n in range(6)]
    assert by_length == [0, 0, 1, 2, 2, 2]
    by_k = [text.get("specserve_row_draft_tokens_bucket", le=f"{k}.0") for k in range(5)]
    assert by_k == [1, 2, 2, 2, 3]  # the prompt's row has no K
    assert text.get("specserve_step_rows_sum") == 4
    forward = text.get("specserve_step_phase_seconds_sum", phase="target_forward")
    assert forward == pytest.approx(0.005, rel=1e-3)

    mine = {"traffic_class": "default"}
    assert text.get("specserve_prompt_tokens_total", **mine) == 12
    assert text.get("specserve_prefix_cached_tokens_total", **mine) == 4
    assert text.get("specserve_requests_finished_total", reason="length", **mine) == 1
    for name, total in (
        ("time_to_first_token_seconds", 0.4),
        ("queue_seconds", 0.2),
        ("prefill_seconds", 0.2),
        ("decode_seconds", 0.6),
        ("inference_seconds", 0.8),
        ("request_duration_seconds", 1.0),
        ("time_per_output_token_seconds", 0.3),
        ("request_prompt_tokens", 12),
        ("request_output_tokens", 3),
        ("request_acceptance_ratio", 0.5),
        ("inter_chunk_latency_seconds", 0.04),
    ):
        assert text.get(f"specserve_{name}_sum", **mine) == pytest.approx(total)
        assert text.get(f"specserve_{name}_count", **mine) == 1
    gaps = "specserve_inter_token_latency_seconds"
    assert text.get(f"{gaps}_count", **mine) == 2
    assert text.get(f"{gaps}_bucket", le="0.01", **mine) == 0
    assert text.get(f"{gaps}_bucket", le="0.025", **mine) == 2


def test_a_drafter_with_parameters_and_an_unannounced_one_make_no_new_labels() -> None:
    recorder = Recorder(Metrics(drafters=["synthetic:0.8,0.6"], max_draft_tokens=2))
    recorder.record_step(
        a_step(
            0,
            [
                a_row(0, drafter="synthetic:0.8,0.6", drafted=2, accepted=1),
                a_row(1, drafter='evil"}\n', drafted=9, accepted=9),
            ],
        )
    )
    text = scrape(recorder.metrics)
    assert text.get("specserve_spec_draft_tokens_total", drafter="synthetic") == 2
    assert text.get("specserve_spec_draft_tokens_total", drafter="other") == 9
    labels = {dict(key[1]).get("drafter") for key in text.samples} - {None}
    positions = {dict(key[1]).get("position") for key in text.samples} - {None}
    assert labels == {"synthetic", "other"}
    assert positions == {"0", "1"}


def test_label_values_are_escaped() -> None:
    odd = 'a"b\\c\nd'
    body = expose(Metrics(drafters=[odd], max_draft_tokens=1), no_load()).text
    PrometheusText(body)
    assert r'{drafter="a\"b\\c\nd"}' in body


def test_a_clock_set_back_never_lowers_a_sum() -> None:
    recorder = Recorder()
    recorder.record_step(a_step(0, [a_row()]))
    before = scrape(recorder.metrics).monotonic()
    recorder.record_step(a_step(1, [a_row()], seconds=-5.0))
    past = msgspec.structs.replace(
        a_request(0),
        first_token=START - 9,
        finished=START - 9,
        queue=(QueuePeriod(START, START - 9, "admission"),),
        inter_token_seconds=(-1.0, 0.5),
    )
    recorder.record_request(past)
    after = scrape(recorder.metrics)
    assert all(after.monotonic()[key] >= value for key, value in before.items())
    assert after.total("specserve_inter_token_latency_seconds_sum") == 0.5
    assert after.total("specserve_inter_token_latency_seconds_count") == 2


def test_records_that_find_the_queue_full_are_counted_and_still_measured() -> None:
    recorder = Recorder(has_sink=True, capacity=4)
    record_all(recorder, [a_step(i) for i in range(6)], [a_request(i) for i in range(5)])
    text = scrape(recorder.metrics)
    assert text.get("specserve_step_records_dropped_total") == 3
    assert text.get("specserve_steps_total") == 6
    assert text.total("specserve_requests_finished_total", reason="stop") == 5


def test_without_a_sink_nothing_is_queued() -> None:
    recorder = Recorder(capacity=2)
    record_all(recorder, [a_step(i) for i in range(9)], [a_request(i) for i in range(9)])
    assert len(recorder.steps) == 0
    assert len(recorder.requests) == 0
    assert scrape(recorder.metrics).get("specserve_step_records_dropped_total") == 0


@st.composite
def scripts(draw: st.DrawFn) -> list[list[Row]]:
    """Up to 12 steps, each with some of 5 requests, guesses bounded by K = 6."""
    script = []
    for _ in range(draw(st.integers(1, 12))):
        step = []
        for request_idx in sorted(draw(st.sets(st.integers(0, 4), max_size=5))):
            drafter = draw(st.sampled_from(["ngram", "draft_model", "unknown"]))
            drafted = draw(st.integers(0, 6))
            step.append(Row(request_idx, drafter, drafted, draw(st.integers(0, drafted))))
        script.append(step)
    return script


@settings(max_examples=25)  # each scrapes after every step
@given(scripts())
def test_counters_never_go_down(script: list[list[Row]]) -> None:
    steps, requests = play(script)
    recorder = Recorder(Metrics(drafters=["ngram", "draft_model"], max_draft_tokens=6))
    last = scrape(recorder.metrics).monotonic()
    for step in steps:
        recorder.record_step(step)
        now = scrape(recorder.metrics).monotonic()
        assert now.keys() == last.keys()
        assert all(now[key] >= value for key, value in last.items())
        last = now
    for request in requests:
        recorder.record_request(request)
        now = scrape(recorder.metrics).monotonic()
        assert all(now[key] >= value for key, value in last.items())
        last = now


@given(scripts())
def test_sums_over_requests_equal_sums_over_steps(script: list[list[Row]]) -> None:
    steps, requests = play(script)
    recorder = Recorder(Metrics(drafters=["ngram", "draft_model"], max_draft_tokens=6))
    record_all(recorder, steps, requests)
    text = scrape(recorder.metrics)

    def requested(field: str) -> int:
        return sum(getattr(request, field) for request in requests)

    assert text.total("specserve_generated_tokens_total") == requested("num_output_tokens")
    assert text.total("specserve_spec_steps_total") == requested("num_spec_steps")
    assert text.total("specserve_spec_draft_tokens_total") == requested("num_draft_tokens")
    assert text.total("specserve_spec_accepted_tokens_total") == requested(
        "num_accepted_draft_tokens"
    )
    assert text.total("specserve_spec_emitted_tokens_total") == requested("num_spec_emitted_tokens")
    assert text.total("specserve_spec_wasted_tokens_total") == requested(
        "num_draft_tokens"
    ) - requested("num_accepted_draft_tokens")
    assert text.total("specserve_spec_emitted_per_step_sum") == requested("num_spec_emitted_tokens")
    assert text.total("specserve_row_draft_tokens_sum") == requested("num_draft_tokens")
    assert text.total("specserve_request_output_tokens_sum") == requested("num_output_tokens")
    for position in range(6):
        for family, field in (
            ("drafted_at_position", "drafted_per_position"),
            ("accepted_at_position", "accepted_per_position"),
        ):
            counted = text.total(f"specserve_spec_{family}_total", position=str(position))
            per_request = (getattr(request, field) for request in requests)
            assert counted == sum(c[position] if position < len(c) else 0 for c in per_request)
    gaps = sum(len(request.inter_token_seconds) for request in requests)
    assert text.total("specserve_inter_token_latency_seconds_count") == gaps


@given(st.lists(st.floats(0, 20), max_size=50))
def test_histogram_buckets_hold_what_lies_at_or_below_their_bound(gaps: list[float]) -> None:
    recorder = Recorder()
    request = msgspec.structs.replace(a_request(0), inter_token_seconds=tuple(gaps))
    recorder.record_request(request)
    text = scrape(recorder.metrics)
    name = "specserve_inter_token_latency_seconds"
    for (found, labels), value in text.samples.items():
        if found == f"{name}_bucket":
            bound = float(dict(labels)["le"])
            assert value == sum(gap <= bound for gap in gaps)
    assert text.total(f"{name}_count") == len(gaps)
    assert text.total(f"{name}_sum") == pytest.approx(sum(gaps))

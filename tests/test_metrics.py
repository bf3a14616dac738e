"""What /metrics says: valid Prometheus text, counters that only grow, sums that agree."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve_observability.metrics import Gauges, Metrics, render
from specserve_observability.recorder import Recorder
from specserve_observability.records import QueuePeriod, RequestRecord, StepRecord
from tests.trace_records import START, Row, a_request, a_row, a_step, play

NO_LOAD = Gauges(
    num_running=0, num_waiting=0, blocks_free=0, blocks_cached=0, blocks_live=0, engine_up=True
)
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

_NAME = r"[a-zA-Z_][a-zA-Z0-9_]*"  # stricter than the format: no colons
_SAMPLE = re.compile(rf"({_NAME})(?:\{{(.*)\}})? (\S+)")
_LABEL = re.compile(rf'({_NAME})="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')


class PrometheusText:
    """A strict parse of text format 0.0.4: anything odd is an AssertionError."""

    def __init__(self, text: str) -> None:
        assert text.endswith("\n")
        self.types: dict[str, str] = {}
        self.samples: Samples = {}
        family = ""
        for line in text.removesuffix("\n").split("\n"):
            if line.startswith("# HELP "):
                family = line.split(" ")[2]
                assert family not in self.types, f"{family} appears twice"
                assert re.fullmatch(_NAME, family)
                assert len(line.split(" ", 3)[3]) > 3
            elif line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ")
                assert name == family
                assert kind in ("counter", "gauge", "histogram")
                self.types[name] = kind
            else:
                self._sample(line, family)

    def _sample(self, line: str, family: str) -> None:
        match = _SAMPLE.fullmatch(line)
        assert match, line
        name, label_text, value = match.groups()
        suffix = name.removeprefix(family)
        allowed = {"_bucket", "_sum", "_count"} if self.types[family] == "histogram" else {""}
        assert suffix in allowed, line
        labels = _LABEL.findall(label_text or "")
        assert "".join(f'{k}="{v}",' for k, v in labels).rstrip(",") == (label_text or "")
        key = (name, frozenset(labels))
        assert key not in self.samples, f"{line} appears twice"
        self.samples[key] = float(value)

    def get(self, name: str, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]

    def total(self, name: str) -> float:
        return sum(value for (found, _), value in self.samples.items() if found == name)

    def monotonic(self) -> Samples:
        """Every sample that may never go down."""
        gauges = {name for name, kind in self.types.items() if kind == "gauge"}
        return {key: value for key, value in self.samples.items() if key[0] not in gauges}


def scrape(metrics: Metrics, gauges: Gauges = NO_LOAD) -> PrometheusText:
    return PrometheusText(render(metrics, gauges))


def record_all(
    recorder: Recorder, steps: Sequence[StepRecord], requests: Sequence[RequestRecord]
) -> None:
    for step in steps:
        recorder.record_step(step)
    for request in requests:
        recorder.record_request(request)


def test_every_series_exists_at_zero_before_the_first_request() -> None:
    text = scrape(Metrics(drafters=["none", "ngram", "draft_model"], max_draft_tokens=3))
    assert text.types == {
        "specserve_engine_up": "gauge",
        "specserve_requests_running": "gauge",
        "specserve_requests_waiting": "gauge",
        "specserve_kv_blocks": "gauge",
        "specserve_requests_finished_total": "counter",
        "specserve_prompt_tokens_total": "counter",
        "specserve_prefix_cached_tokens_total": "counter",
        "specserve_generated_tokens_total": "counter",
        "specserve_preemptions_total": "counter",
        "specserve_steps_total": "counter",
        "specserve_spans_dropped_total": "counter",
        "specserve_step_records_dropped_total": "counter",
        "specserve_step_spans_sampled_out_total": "counter",
        "specserve_spec_steps_total": "counter",
        "specserve_spec_draft_tokens_total": "counter",
        "specserve_spec_accepted_tokens_total": "counter",
        "specserve_spec_emitted_tokens_total": "counter",
        "specserve_spec_predicted_accepted_tokens_total": "counter",
        "specserve_drafter_failures_total": "counter",
        "specserve_spec_drafted_at_position_total": "counter",
        "specserve_spec_accepted_at_position_total": "counter",
        "specserve_time_to_first_token_seconds": "histogram",
        "specserve_inter_token_latency_seconds": "histogram",
        "specserve_request_duration_seconds": "histogram",
        "specserve_queue_seconds": "histogram",
        "specserve_step_phase_seconds": "histogram",
    }
    assert set(text.monotonic().values()) == {0.0}
    for drafter in ("ngram", "draft_model", "other"):
        for position in ("0", "1", "2"):
            assert (
                text.get(
                    "specserve_spec_accepted_at_position_total", drafter=drafter, position=position
                )
                == 0
            )
    for reason in ("stop", "length", "abort", "error"):
        assert text.get("specserve_requests_finished_total", reason=reason) == 0


def test_gauges_say_what_the_engine_says() -> None:
    gauges = Gauges(
        num_running=3,
        num_waiting=2,
        blocks_free=10,
        blocks_cached=20,
        blocks_live=30,
        engine_up=False,
    )
    text = scrape(Metrics(), gauges)
    assert text.get("specserve_requests_running") == 3
    assert text.get("specserve_requests_waiting") == 2
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
    assert text.get("specserve_prompt_tokens_total") == 12
    assert text.get("specserve_prefix_cached_tokens_total") == 4
    assert text.get("specserve_requests_finished_total", reason="length") == 1
    assert text.get("specserve_time_to_first_token_seconds_sum") == pytest.approx(0.4)
    assert text.get("specserve_queue_seconds_sum") == pytest.approx(0.2)
    assert text.get("specserve_request_duration_seconds_count") == 1
    assert text.get("specserve_inter_token_latency_seconds_count") == 2
    assert text.get("specserve_inter_token_latency_seconds_bucket", le="0.01") == 0
    assert text.get("specserve_inter_token_latency_seconds_bucket", le="0.025") == 2
    forward = text.get("specserve_step_phase_seconds_sum", phase="target_forward")
    assert forward == pytest.approx(0.005, rel=1e-3)


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
    body = render(Metrics(drafters=[odd], max_draft_tokens=1), NO_LOAD)
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
    assert after.get("specserve_inter_token_latency_seconds_sum") == 0.5
    assert after.get("specserve_inter_token_latency_seconds_count") == 2


def test_records_that_find_the_queue_full_are_counted_and_still_measured() -> None:
    recorder = Recorder(has_sink=True, capacity=4)
    record_all(recorder, [a_step(i) for i in range(6)], [a_request(i) for i in range(5)])
    text = scrape(recorder.metrics)
    assert text.get("specserve_step_records_dropped_total") == 3
    assert text.get("specserve_steps_total") == 6
    assert text.get("specserve_requests_finished_total", reason="stop") == 5


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
    for position in range(6):
        for family, field in (
            ("drafted_at_position", "drafted_per_position"),
            ("accepted_at_position", "accepted_per_position"),
        ):
            counted = sum(
                value
                for (name, labels), value in text.samples.items()
                if name == f"specserve_spec_{family}_total"
                and ("position", str(position)) in labels
            )
            per_request = (getattr(request, field) for request in requests)
            assert counted == sum(c[position] if position < len(c) else 0 for c in per_request)
    gaps = sum(len(request.inter_token_seconds) for request in requests)
    assert text.get("specserve_inter_token_latency_seconds_count") == gaps


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
    assert text.get(f"{name}_count") == len(gaps)
    assert text.get(f"{name}_sum") == pytest.approx(sum(gaps))

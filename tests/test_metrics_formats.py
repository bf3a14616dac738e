"""One truth, three spellings: Prometheus text, OpenMetrics with exemplars, and vLLM's names."""

from __future__ import annotations

import msgspec
import pytest

from specserve_observability.exposition import (
    OPENMETRICS,
    TEXT,
    expose,
    prefers_openmetrics,
)
from specserve_observability.metrics import Metrics
from specserve_observability.recorder import Recorder
from specserve_observability.vllm_families import VllmNames
from tests.prometheus_text import (
    PrometheusText,
    no_load,
    scrape,
    scrape_openmetrics,
    scrape_vllm,
)
from tests.trace_records import START, a_request, a_row, a_step, server_traceparent, trace_id

PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


def a_busy_recorder() -> Recorder:
    """Two drafters, two traffic classes, three requests, one of them cut short."""
    metrics = Metrics(
        drafters=["ngram", "suffix"], max_draft_tokens=4, traffic_classes=["batch", "chat"]
    )
    recorder = Recorder(metrics)
    rows = [a_row(0, drafted=4, accepted=2), a_row(1, drafter="suffix", drafted=1, accepted=1)]
    recorder.record_step(a_step(0, rows, preempted=1))
    recorder.record_step(a_step(1, [a_row(0), a_row(1)]))
    recorder.record_request(a_request(0, rows=rows[:1], traffic_class="batch"))
    recorder.record_request(a_request(1, rows=rows[1:], traffic_class="chat", cached=8))
    recorder.record_request(a_request(2, finish_reason="abort", started=False))
    return recorder


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (PROMETHEUS_2, True),
        (PROMETHEUS_3, True),
        ("application/openmetrics-text", True),
        ('Application/OpenMetrics-Text; version="1.0.0"', True),
        ("application/openmetrics-text;version=1.0.0;q=0.2,text/plain;q=0.9", False),
        ("application/openmetrics-text;version=2.0.0", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=high", False),
        ("text/plain", False),
        ("*/*", False),
        ("", False),
        (";;,;=,q=", False),
    ],
)
def test_openmetrics_is_for_those_who_ask_for_it(accept: str, wanted: bool) -> None:
    assert prefers_openmetrics(accept) == wanted
    page = expose(Metrics(), no_load(), accept=accept)
    assert page.content_type == (OPENMETRICS if wanted else TEXT)


def test_both_formats_hold_the_same_series_and_values() -> None:
    metrics = a_busy_recorder().metrics
    text, openmetrics = scrape(metrics), scrape_openmetrics(metrics)
    assert text.samples == openmetrics.samples
    assert {name.removesuffix("_total") for name in text.types} == openmetrics.types.keys()
    assert {f"{name}_total" for name, kind in openmetrics.types.items() if kind == "counter"} < set(
        text.types
    )


def test_a_bucket_names_the_newest_trace_that_fell_into_it() -> None:
    recorder = Recorder()
    for idx in range(3):
        recorder.record_request(a_request(idx, rows=[a_row(idx, accepted=2, drafted=2)]))
    exemplars = scrape_openmetrics(recorder.metrics).exemplars
    duration = "specserve_request_duration_seconds_bucket"
    labels = frozenset({"traffic_class": "default", "le": "1.28"}.items())
    assert exemplars[duration, labels] == (trace_id(2), 1.0, START + 1.0)
    named = {name.removeprefix("specserve_").removesuffix("_bucket") for name, _ in exemplars}
    assert named == {
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "inter_chunk_latency_seconds",
        "time_per_output_token_seconds",
        "request_duration_seconds",
        "queue_seconds",
    }
    # An exemplar lies in its own bucket.
    for (_, labels), (_, value, _) in exemplars.items():
        assert value <= float(dict(labels)["le"])


@pytest.mark.parametrize("traceparent", [None, server_traceparent(0, sampled=False), "garbage"])
def test_a_trace_that_nobody_can_look_up_is_no_exemplar(traceparent: str | None) -> None:
    recorder = Recorder()
    recorder.record_request(a_request(0, traceparent=traceparent, rows=[a_row(0)]))
    assert not scrape_openmetrics(recorder.metrics).exemplars


def test_vllms_names_say_the_same_numbers_added_up() -> None:
    gauges = no_load(num_running=3, waiting={"admission": 1, "kv_capacity": 1}, blocks_live=30)
    gauges = msgspec.structs.replace(gauges, blocks_free=60, blocks_cached=30)
    text = scrape_vllm(a_busy_recorder().metrics, gauges)
    base = {"engine": "0", "model_name": "demo"}
    for name, value in (
        ("num_requests_running", 3),
        ("num_requests_waiting", 2),
        ("kv_cache_usage_perc", 0.25),
        ("gpu_cache_usage_perc", 0.25),
        ("prompt_tokens_total", 36),
        ("generation_tokens_total", 7),
        ("prefix_cache_queries_total", 36),
        ("prefix_cache_hits_total", 16),
        ("prompt_tokens_cached_total", 16),
        ("num_preemptions_total", 1),
        ("spec_decode_num_drafts_total", 2),
        ("spec_decode_num_draft_tokens_total", 5),
        ("spec_decode_num_accepted_tokens_total", 3),
        ("time_to_first_token_seconds_count", 2),
        ("e2e_request_latency_seconds_count", 3),
        ("request_queue_time_seconds_count", 3),
        ("request_prefill_time_seconds_count", 2),
        ("request_decode_time_seconds_count", 2),
        ("request_inference_time_seconds_count", 2),
        ("request_max_num_generation_tokens_sum", 5),
        ("inter_token_latency_seconds_count", 3),
        ("time_per_output_token_seconds_count", 3),
        ("request_time_per_output_token_seconds_count", 2),
        ("request_prompt_tokens_sum", 36),
        ("request_generation_tokens_sum", 5),
    ):
        assert text.get(f"vllm:{name}", **base) == value, name
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    at = [text.get(per_position, position=str(i), **base) for i in range(4)]
    assert at == [2, 1, 0, 0]
    assert text.get("vllm:request_success_total", finished_reason="stop", **base) == 2
    assert text.get("vllm:request_success_total", finished_reason="abort", **base) == 1
    waiting = "vllm:num_requests_waiting_by_reason"
    assert text.get(waiting, reason="capacity", **base) == 2
    sizes = {"block_size": "16", "num_gpu_blocks": "120", "engine": "0"}
    assert text.get("vllm:cache_config_info", **sizes) == 1


def test_with_vllms_names_the_reply_is_plain_text_and_keeps_ours() -> None:
    metrics = a_busy_recorder().metrics
    text = scrape_vllm(metrics)  # which asserts that no name appears twice
    own = scrape(metrics)
    assert own.samples.items() <= text.samples.items()
    assert all(name.startswith("vllm:") for name in text.types.keys() - own.types.keys())


def test_a_model_name_with_quotes_stays_one_label() -> None:

    page = expose(Metrics(), no_load(), accept=PROMETHEUS_2, vllm=VllmNames('a"b\\\n', 16))
    assert page.content_type == TEXT
    PrometheusText(page.text, colons=True)
    assert r'model_name="a\"b\\\n"' in page.text

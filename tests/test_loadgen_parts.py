"""The load generator's parts that need no server: statistics, arrivals, prompts, options."""

from __future__ import annotations

import time
from itertools import islice, pairwise, takewhile
from math import isclose

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from specserve_loadgen import latency
from specserve_loadgen.arrivals import arrival_times
from specserve_loadgen.crosscheck import COUNTERS, counter_deltas, parse_counters
from specserve_loadgen.pacing import drive
from specserve_loadgen.progress import Progress
from specserve_loadgen.prompts import load_prompts
from specserve_loadgen.records import Chunk, Failure, RequestRecord
from specserve_loadgen.report import make_report
from specserve_loadgen.run import RunResult
from specserve_loadgen.settings import OpenLoop, Settings
from specserve_loadgen.stats import add_by_position, distribution, percentile
from specserve_observability.exposition import expose
from specserve_observability.metrics import Metrics
from tests.prometheus_text import no_load

FLOATS = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


# ---- statistics --------------------------------------------------------------------------------


@given(FLOATS, st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], q: float) -> None:
    got, want = percentile(sorted(values), q), float(np.quantile(values, q))
    assert isclose(got, want, rel_tol=1e-9, abs_tol=1e-9)


@given(FLOATS)
def test_a_distribution_is_numpys(values: list[float]) -> None:
    got = distribution(values)
    assert got is not None
    assert (got.count, got.min, got.max) == (len(values), min(values), max(values))
    assert isclose(got.mean, float(np.mean(values)), rel_tol=1e-9, abs_tol=1e-9)
    assert got.min <= got.p50 <= got.p90 <= got.p99 <= got.max


def test_nothing_measured_is_absent_and_not_zero() -> None:
    assert distribution([]) is None


def test_vectors_of_unequal_length_add_up_by_position() -> None:
    assert add_by_position([[3, 1], [], [2, 2, 1]]) == (5, 3, 1)


def test_poisson_arrivals_have_exponential_gaps_and_repeat_with_their_seed() -> None:
    times = list(islice(arrival_times(OpenLoop(50.0), seed=3), 4000))
    assert times == list(islice(arrival_times(OpenLoop(50.0), seed=3), 4000))
    assert times != list(islice(arrival_times(OpenLoop(50.0), seed=4), 4000))
    gaps = [after - before for before, after in pairwise([0.0, *times])]
    assert scipy_stats.kstest(gaps, "expon", args=(0, 1 / 50)).pvalue > 0.001


async def test_an_open_loop_of_a_duration_starts_exactly_the_arrivals_before_its_end() -> None:
    started: list[tuple[int, float | None]] = []

    async def send(request_idx: int, scheduled: float | None) -> None:
        started.append((request_idx, scheduled))

    settings = Settings(url="http://x", load=OpenLoop(500.0), duration=0.1, seed=9)
    zero = time.perf_counter()
    await drive(settings, load_prompts(None), send, lambda: time.perf_counter() - zero)
    due = list(takewhile(lambda seconds: seconds < 0.1, arrival_times(OpenLoop(500.0), seed=9)))
    assert started == list(enumerate(due))


# ---- measures of one record --------------------------------------------------------------------


def a_record(
    *chunks: tuple[float, int], sent: float = 0.0, scheduled: float | None = None
) -> RequestRecord:
    """A succeeded request with chunks of (seconds, number of tokens)."""
    return RequestRecord(
        request_idx=0,
        prompt_id="1",
        category="chat",
        scheduled=scheduled,
        sent=sent,
        ended=chunks[-1][0],
        first_text=chunks[0][0],
        chunks=tuple(Chunk(seconds, num_tokens) for seconds, num_tokens in chunks),
        counted_by="token_ids",
        num_output_tokens=sum(num_tokens for _, num_tokens in chunks),
        num_prompt_tokens=3,
        num_cached_tokens=None,
        finish_reason="length",
        speculative=None,
        specserve=None,
    )


def test_text_held_back_until_later_moves_no_tokens_latency() -> None:
    record = a_record((1.0, 1), (1.2, 2), (1.3, 0), (1.5, 1))
    assert latency.itl_per_token(record) == pytest.approx([0.1, 0.1, 0.3])
    assert latency.chunk_gaps(record) == pytest.approx([0.2, 0.1, 0.2])
    assert latency.tpot(record) == pytest.approx(0.5 / 3)


def test_one_chunk_has_no_time_between_tokens() -> None:
    record = a_record((1.0, 4))
    assert latency.tpot(record) is None
    assert latency.itl_per_token(record) == []


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 8)), min_size=2, max_size=40))
def test_a_requests_tpot_is_the_mean_of_its_token_latencies(
    gaps: list[tuple[float, int]],
) -> None:
    seconds = np.cumsum([gap for gap, _ in gaps])
    record = a_record(*((float(s), n) for s, (_, n) in zip(seconds, gaps, strict=True)))
    tpot = latency.tpot(record)
    assert tpot is not None
    assert isclose(tpot, float(np.mean(latency.itl_per_token(record))), abs_tol=1e-9)


def a_result(*records: RequestRecord, loop_lags: tuple[float, ...] = ()) -> RunResult:
    return RunResult(
        model="m",
        server_version=None,
        started_at=0.0,
        records=records,
        server_deltas={},
        loop_lags=loop_lags,
        num_failed_warmups=0,
        interrupted=False,
    )


def test_latency_counts_from_the_schedule_when_the_client_itself_is_late_and_it_says_so() -> None:
    records = [a_record((1.0 + i, 1), sent=0.5 + i, scheduled=0.1 + i) for i in range(3)]
    settings = Settings(url="http://x", load=OpenLoop(1.0))
    report = make_report(settings, a_result(*records))
    assert report.latency.ttft is not None
    assert report.latency.ttft_from_schedule is not None
    assert report.latency.ttft.mean == pytest.approx(0.5)
    assert report.latency.ttft_from_schedule.mean == pytest.approx(0.9)
    assert report.throughput.seconds == pytest.approx(2.9)
    (warning,) = report.warnings
    assert "3 of 3 requests late, 400.0 ms on average" in warning


def test_a_punctual_client_is_not_warned_about() -> None:
    record = a_record((1.0, 1), sent=0.1005, scheduled=0.1)
    settings = Settings(url="http://x", load=OpenLoop(1.0))
    assert make_report(settings, a_result(record, loop_lags=(0.001,))).warnings == ()


def test_a_busy_event_loop_is_warned_about() -> None:
    result = a_result(a_record((0.5, 1)), loop_lags=(0.02, 0.04))
    (warning,) = make_report(Settings(url="http://x"), result).warnings
    assert "event loop was 30.0 ms late" in warning


def test_the_progress_bar_shows_requests_and_failures(capsys: pytest.CaptureFixture[str]) -> None:
    failed = msgspec.structs.replace(
        a_record((1.0, 1)), failure=Failure(kind="timeout", message="late")
    )
    with Progress(total=2, enabled=True) as progress:
        progress.on_record(a_record((1.0, 4)))
        progress.on_record(failed)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "1 failed" in shown
    with Progress(total=2, enabled=False) as progress:
        progress.on_record(failed)
    assert capsys.readouterr().err == ""


# ---- counters ----------------------------------------------------------------------------------


def test_counters_are_summed_over_their_labels_and_vllms_names_are_known() -> None:
    text = (
        "# HELP vllm:spec_decode_num_drafts_total drafts\n"
        'vllm:spec_decode_num_drafts_total{engine="0",model_name="a b}"} 3.0\n'
        'vllm:spec_decode_num_drafts_total{engine="1",model_name="x"} 4.0 1700000000\n'
        "specserve_generated_tokens_total 1e3\n"
        "nonsense\n"
        "specserve_generated_tokens_total not-a-number\n"
    )
    assert parse_counters(text) == {"steps with drafts": 7.0, "output tokens": 1000.0}


def test_every_counter_compared_exists_on_our_own_server() -> None:
    text = expose(Metrics(drafters=("ngram", "draft_model")), no_load()).text
    assert parse_counters(text) == dict.fromkeys(COUNTERS, 0.0)


def test_a_delta_needs_both_scrapes() -> None:
    text = "specserve_generated_tokens_total 5\n"
    assert counter_deltas(text, "specserve_generated_tokens_total 9\n") == {"output tokens": 4}
    assert counter_deltas(None, text) == counter_deltas(text, None) == {}

"""The report: one value computed from a run. `render` prints it; `to_json` is its file.

The schema's number rises when a field changes its meaning or goes; new fields do not raise it.
Times in seconds. A number that nothing was measured for is null, never 0.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from importlib import metadata

import msgspec

from specserve_loadgen import latency
from specserve_loadgen.acceptance import Acceptance, acceptance
from specserve_loadgen.crosscheck import CrossCheck, cross_check
from specserve_loadgen.engines import UNKNOWN
from specserve_loadgen.goodput import Goodput, goodput
from specserve_loadgen.latency_intervals import LatencyIntervals, latency_intervals
from specserve_loadgen.records import RequestRecord
from specserve_loadgen.run import RunResult
from specserve_loadgen.settings import Settings
from specserve_loadgen.stats import Distribution, distribution, ratio
from specserve_loadgen.studies.summary import Summary, summarise

SCHEMA = "specserve.loadgen/1"
LATE_SHARE = 0.01  # of mean TTFT: the share that the client's own delay may have
LATE_FLOOR = 0.002  # seconds: timers are no finer than a millisecond or two


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Over succeeded requests; each field's meaning is in `latency`."""

    ttft: Distribution | None
    ttft_from_schedule: Distribution | None
    itl_per_token: Distribution | None
    inter_chunk: Distribution | None
    tpot: Distribution | None
    e2e: Distribution | None
    e2e_from_schedule: Distribution | None


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """From the first send (or scheduled send) to the last end; tokens of succeeded requests."""

    seconds: float
    requests_per_second: float | None
    output_tokens_per_second: float | None
    num_output_tokens: int
    num_prompt_tokens: int | None
    num_cached_prompt_tokens: int | None
    num_lost_output_tokens: int  # received by requests that then failed or were stopped
    tokens_per_chunk: float | None


class ErrorCount(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    count: int
    first_message: str
    retry_after: str | None  # the first one's header


class CategoryReport(msgspec.Struct, frozen=True, kw_only=True):
    category: str
    num_succeeded: int
    ttft: Distribution | None
    itl_per_token: Distribution | None
    acceptance: Acceptance


class Generator(msgspec.Struct, frozen=True, kw_only=True):
    """This client's own lateness, which is in the numbers above."""

    dispatch_delay: Distribution | None  # open loop: sent - scheduled
    num_late: int  # sent more than LATE_FLOOR after their scheduled time
    loop_lag: Distribution | None


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    loadgen_version: str | None
    python: str
    platform: str
    num_cpus: int | None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    schema: str
    started_at: float  # time.time()
    settings: Settings
    environment: Environment
    model: str
    server_version: str | None
    engine: str = UNKNOWN
    interrupted: bool
    num_requests: int
    num_succeeded: int
    num_failed: int  # without the ones that this client stopped
    num_stopped: int
    latency: Latencies
    intervals: LatencyIntervals | None = None  # None: a report of an earlier version
    throughput: Throughput
    goodput: Goodput | None = None  # None: no limits were set
    errors: tuple[ErrorCount, ...]
    acceptance: Acceptance
    speculation: Summary | None = None  # the same and more, with intervals
    categories: tuple[CategoryReport, ...]
    cross_check: CrossCheck
    generator: Generator
    warnings: tuple[str, ...]
    requests: tuple[RequestRecord, ...]


def make_report(settings: Settings, result: RunResult) -> Report:
    records = result.records
    succeeded = [r for r in records if r.succeeded]
    num_stopped = sum(r.failure is not None and r.failure.kind == "cancelled" for r in records)
    latencies = _latencies(succeeded)
    delays = _known(latency.dispatch_delay(r) for r in records)
    generator = Generator(
        dispatch_delay=distribution(delays),
        num_late=sum(delay > LATE_FLOOR for delay in delays),
        loop_lag=distribution(result.loop_lags),
    )
    throughput = _throughput(records)
    return Report(
        schema=SCHEMA,
        started_at=result.started_at,
        settings=settings,
        environment=environment(),
        model=result.model,
        server_version=result.server_version,
        engine=result.engine,
        interrupted=result.interrupted,
        num_requests=len(records),
        num_succeeded=len(succeeded),
        num_failed=len(records) - len(succeeded) - num_stopped,
        num_stopped=num_stopped,
        latency=latencies,
        intervals=latency_intervals(succeeded),
        throughput=throughput,
        goodput=goodput(records, settings.slo, throughput.seconds) if settings.slo else None,
        errors=_errors(records),
        acceptance=acceptance(records),
        speculation=summarise(records),
        categories=_categories(records),
        cross_check=cross_check(records, result.server_deltas, result.engine),
        generator=generator,
        warnings=(*_warnings(result, succeeded), *_lateness(generator, latencies)),
        requests=records,
    )


def to_json(report: Report) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=1)


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _latencies(succeeded: Sequence[RequestRecord]) -> Latencies:
    return Latencies(
        ttft=distribution(_known(latency.ttft(r) for r in succeeded)),
        ttft_from_schedule=distribution(_known(latency.ttft_from_schedule(r) for r in succeeded)),
        itl_per_token=distribution(v for r in succeeded for v in latency.itl_per_token(r)),
        inter_chunk=distribution(v for r in succeeded for v in latency.chunk_gaps(r)),
        tpot=distribution(_known(latency.tpot(r) for r in succeeded)),
        e2e=distribution(latency.e2e(r) for r in succeeded),
        e2e_from_schedule=distribution(_known(latency.e2e_from_schedule(r) for r in succeeded)),
    )


def _throughput(records: Sequence[RequestRecord]) -> Throughput:
    succeeded = [r for r in records if r.succeeded]
    starts = [r.sent if r.scheduled is None else r.scheduled for r in records]
    seconds = max(r.ended for r in records) - min(starts) if records else 0.0
    num_output_tokens = sum(r.num_output_tokens for r in succeeded)
    prompt = [r.num_prompt_tokens for r in succeeded if r.num_prompt_tokens is not None]
    cached = [r.num_cached_tokens for r in succeeded if r.num_cached_tokens is not None]
    num_chunks = sum(1 for r in succeeded for chunk in r.chunks if chunk.num_tokens)
    return Throughput(
        seconds=seconds,
        requests_per_second=ratio(len(succeeded), seconds),
        output_tokens_per_second=ratio(num_output_tokens, seconds),
        num_output_tokens=num_output_tokens,
        num_prompt_tokens=sum(prompt) if prompt else None,
        num_cached_prompt_tokens=sum(cached) if cached else None,
        num_lost_output_tokens=sum(r.num_output_tokens for r in records if not r.succeeded),
        tokens_per_chunk=ratio(sum(r.num_chunk_tokens for r in succeeded), num_chunks),
    )


def _errors(records: Sequence[RequestRecord]) -> tuple[ErrorCount, ...]:
    """Most frequent first."""
    failures = [r.failure for r in records if r.failure is not None]
    kinds = list(dict.fromkeys(failure.kind for failure in failures))
    counts = []
    for kind in kinds:
        alike = [failure for failure in failures if failure.kind == kind]
        counts.append(
            ErrorCount(
                kind=kind,
                count=len(alike),
                first_message=alike[0].message,
                retry_after=alike[0].retry_after,
            )
        )
    return tuple(sorted(counts, key=lambda error: -error.count))


def _categories(records: Sequence[RequestRecord]) -> tuple[CategoryReport, ...]:
    reports = []
    for category in dict.fromkeys(record.category for record in records):
        alike = [r for r in records if r.category == category and r.succeeded]
        reports.append(
            CategoryReport(
                category=category,
                num_succeeded=len(alike),
                ttft=distribution(_known(latency.ttft(r) for r in alike)),
                itl_per_token=distribution(v for r in alike for v in latency.itl_per_token(r)),
                acceptance=acceptance(alike),
            )
        )
    return tuple(reports)


def _warnings(result: RunResult, succeeded: Sequence[RequestRecord]) -> list[str]:
    warnings = []
    if result.num_failed_warmups:
        warnings.append(f"{result.num_failed_warmups} warm-up requests failed")
    if num_silent := sum(r.first_text is None for r in succeeded):
        warnings.append(f"{num_silent} replies held no text: they have no TTFT")
    return warnings


def _lateness(generator: Generator, latencies: Latencies) -> list[str]:
    """A client that is late measures itself."""
    ttft = latencies.ttft_from_schedule or latencies.ttft
    limit = max(LATE_FLOOR, LATE_SHARE * ttft.mean if ttft else 0.0)
    warnings = []
    delay, lag = generator.dispatch_delay, generator.loop_lag
    if delay is not None and delay.mean > limit:
        warnings.append(
            f"this client sent {generator.num_late} of {delay.count} requests late, "
            f"{delay.mean * 1e3:.1f} ms on average (worst {delay.max * 1e3:.0f} ms): "
            "it cannot keep up; latencies from the schedule include it"
        )
    if lag is not None and lag.mean > limit:
        warnings.append(
            f"this client's event loop was {lag.mean * 1e3:.1f} ms late on average (worst "
            f"{lag.max * 1e3:.0f} ms): its machine is too busy to measure this load"
        )
    return warnings


def environment() -> Environment:
    try:
        version: str | None = metadata.version("specserve")
    except metadata.PackageNotFoundError:
        version = None
    return Environment(
        loadgen_version=version,
        python=platform.python_version(),
        platform=platform.platform(),
        num_cpus=os.cpu_count(),
    )

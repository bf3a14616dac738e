"""How sure the means and medians of latency are: 95 % intervals by bootstrap over requests.

A request's tokens are alike, so ITL is a ratio of sums with the request as the unit that is drawn
again. None where there are no such values; bounds of None where there are too few requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from specserve_loadgen import latency
from specserve_loadgen.intervals import (
    Interval,
    mean_interval,
    quantile_interval,
    ratio_interval,
)
from specserve_loadgen.records import RequestRecord

Measure = Callable[[RequestRecord], float | None]


class LatencyInterval(msgspec.Struct, frozen=True, kw_only=True):
    """In seconds. Quantiles are over requests, and not there for values of single tokens."""

    mean: Interval | None
    p50: Interval | None = None
    p99: Interval | None = None


class LatencyIntervals(msgspec.Struct, frozen=True, kw_only=True):
    """Over succeeded requests, by the names of `report.Latencies`."""

    ttft: LatencyInterval
    ttft_from_schedule: LatencyInterval
    itl_per_token: LatencyInterval
    inter_chunk: LatencyInterval
    tpot: LatencyInterval
    e2e: LatencyInterval
    e2e_from_schedule: LatencyInterval


def latency_intervals(succeeded: Sequence[RequestRecord]) -> LatencyIntervals:
    return LatencyIntervals(
        ttft=_of_requests(latency.ttft, succeeded),
        ttft_from_schedule=_of_requests(latency.ttft_from_schedule, succeeded),
        itl_per_token=_of_gaps(latency.itl_per_token, succeeded),
        inter_chunk=_of_gaps(latency.chunk_gaps, succeeded),
        tpot=_of_requests(latency.tpot, succeeded),
        e2e=_of_requests(latency.e2e, succeeded),
        e2e_from_schedule=_of_requests(latency.e2e_from_schedule, succeeded),
    )


def _of_requests(measure: Measure, records: Sequence[RequestRecord]) -> LatencyInterval:
    values = [value for record in records if (value := measure(record)) is not None]
    return LatencyInterval(
        mean=mean_interval(values),
        p50=quantile_interval(values, 0.5),
        p99=quantile_interval(values, 0.99),
    )


def _of_gaps(
    measure: Callable[[RequestRecord], list[float]], records: Sequence[RequestRecord]
) -> LatencyInterval:
    gaps = [measure(record) for record in records]
    return LatencyInterval(
        mean=ratio_interval([sum(row) for row in gaps], [len(row) for row in gaps])
    )

"""Goodput: the requests that keep every limit that was set, of all that were sent.

A failed request is not a good one. What has no such number (a reply of one token has no TPOT)
breaks no limit.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from specserve_loadgen import latency
from specserve_loadgen.records import RequestRecord
from specserve_loadgen.settings import Slo


class Goodput(msgspec.Struct, frozen=True, kw_only=True):
    """Over the requests that ended by themselves; those that this client stopped are not judged."""

    num_judged: int
    num_good: int
    share: float | None
    requests_per_second: float | None
    broken: dict[str, int]  # requests over each limit; `failed`: without a result


def goodput(records: Sequence[RequestRecord], slo: Slo, seconds: float) -> Goodput:
    """seconds: of the run, as its throughput counts them"""
    judged = [r for r in records if r.failure is None or r.failure.kind != "cancelled"]
    verdicts = [broken_limits(record, slo) for record in judged]
    names = (*Slo.__struct_fields__, "failed")
    num_good = sum(not verdict for verdict in verdicts)
    return Goodput(
        num_judged=len(judged),
        num_good=num_good,
        share=num_good / len(judged) if judged else None,
        requests_per_second=num_good / seconds if seconds else None,
        broken={
            name: count for name in names if (count := sum(name in verdict for verdict in verdicts))
        },
    )


def broken_limits(record: RequestRecord, slo: Slo) -> set[str]:
    """Which limits one request is over; {"failed"} where it has no result."""
    if not record.succeeded:
        return {"failed"}
    from_schedule = record.scheduled is not None
    measured = {
        "ttft": latency.ttft_from_schedule(record) if from_schedule else latency.ttft(record),
        "tpot": latency.tpot(record),
        "e2e": latency.e2e_from_schedule(record) if from_schedule else latency.e2e(record),
    }
    limits = {"ttft": slo.ttft, "tpot": slo.tpot, "e2e": slo.e2e}
    return {
        name
        for name, limit in limits.items()
        if limit is not None and (value := measured[name]) is not None and value > limit
    }

"""Speed under load, counted while every user is busy."""

from __future__ import annotations

from collections.abc import Sequence

from specserve_loadgen.records import RequestRecord


def busy_rate(records: Sequence[RequestRecord]) -> float:
    """Output tokens per second that arrived while every user of a closed loop was busy: from the
    first request sent to the last one sent. With one request per user, until the first one ended.

    Behind that the slowest request runs alone, and with few requests its tail would be a good part
    of the time: the longer, the less alike the speeds of texts are, as guessing makes them.
    """
    began = min(r.sent for r in records)
    end = max(max(r.sent for r in records), min(r.ended for r in records))
    arrived = sum(c.num_tokens for r in records for c in r.chunks if c.seconds <= end)
    return arrived / (end - began)

"""The same spans of time as the client saw them and as the server says, added up over requests.

prompt  queueing and prefill: the client's TTFT, which has the way there and back in it
decode  first token to last: the client's chunks against the server's clock

Replies that say nothing of it, and those of one chunk, are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from specserve_loadgen import latency
from specserve_loadgen.records import RequestRecord


class TimeCheck(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    num_requests: int
    client_seconds: float
    server_seconds: float


def time_checks(records: Sequence[RequestRecord]) -> tuple[TimeCheck, ...]:
    """() where no reply holds a server's times."""
    prompt: list[tuple[float, float]] = []
    decode: list[tuple[float, float]] = []
    for record in records:
        told = _server_seconds(record) if record.succeeded else None
        chunks = [chunk.seconds for chunk in record.chunks if chunk.num_tokens]
        if told is None or len(chunks) < 2:
            continue
        decode.append((chunks[-1] - chunks[0], told[1]))
        if (waited := latency.ttft(record)) is not None:
            prompt.append((waited, told[0]))
    return tuple(
        TimeCheck(
            name=name,
            num_requests=len(pairs),
            client_seconds=sum(client for client, _ in pairs),
            server_seconds=sum(server for _, server in pairs),
        )
        for name, pairs in (("prompt", prompt), ("decode", decode))
        if pairs
    )


def _server_seconds(record: RequestRecord) -> tuple[float, float] | None:
    """(prompt, decode)"""
    if (timings := record.timings) is not None:
        return timings.prompt_ms / 1e3, timings.predicted_ms / 1e3
    own = record.specserve
    if own is None or own.prefill_seconds is None or own.decode_seconds is None:
        return None
    return (own.queue_seconds or 0.0) + own.prefill_seconds, own.decode_seconds

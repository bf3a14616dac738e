"""Latencies of one request, each with one meaning; all in seconds.

TTFT       send to the first chunk with text; from the schedule too in an open loop
E2E        send to [DONE]
ITL        per token: a chunk's distance to the previous chunk with tokens, shared evenly by its
           tokens. One value per token after the first chunk: speculation moves it.
gap        between chunks that a reader sees: one value per chunk, whatever is in it
TPOT       one value per request: first to last token chunk, per token after the first chunk
           (the mean of its ITLs); where chunks tell no tokens, by the final usage
"""

from __future__ import annotations

from itertools import pairwise

from specserve_loadgen.records import RequestRecord


def ttft(record: RequestRecord) -> float | None:
    return None if record.first_text is None else record.first_text - record.sent


def ttft_from_schedule(record: RequestRecord) -> float | None:
    if record.first_text is None or record.scheduled is None:
        return None
    return record.first_text - record.scheduled


def e2e(record: RequestRecord) -> float:
    return record.ended - record.sent


def e2e_from_schedule(record: RequestRecord) -> float | None:
    return None if record.scheduled is None else record.ended - record.scheduled


def dispatch_delay(record: RequestRecord) -> float | None:
    """How late this client itself was."""
    return None if record.scheduled is None else record.sent - record.scheduled


def itl_per_token(record: RequestRecord) -> list[float]:
    chunks = [chunk for chunk in record.chunks if chunk.num_tokens]
    values: list[float] = []
    for before, chunk in pairwise(chunks):
        gap = chunk.seconds - before.seconds
        values.extend([gap / chunk.num_tokens] * chunk.num_tokens)
    return values


def chunk_gaps(record: RequestRecord) -> list[float]:
    chunks = record.chunks
    return [chunk.seconds - before.seconds for before, chunk in pairwise(chunks)]


def tpot(record: RequestRecord) -> float | None:
    chunks = [chunk for chunk in record.chunks if chunk.num_tokens]
    if len(chunks) < 2:
        return None
    num_later_tokens = sum(chunk.num_tokens for chunk in chunks[1:])
    if record.counted_by == "chunks":  # the final usage knows better, but for the first chunk
        num_later_tokens = max(num_later_tokens, record.num_output_tokens - 1)
    return (chunks[-1].seconds - chunks[0].seconds) / num_later_tokens

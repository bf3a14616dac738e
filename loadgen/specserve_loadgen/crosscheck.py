"""The same counts from three independent places: the replies, /metrics, and the chunks received.

Replies count only this run; /metrics counts the whole server, so a difference means other
traffic, failed requests, or a server that counts in two ways; chunk sizes need no server's word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from specserve_loadgen.acceptance import acceptance, contradictions
from specserve_loadgen.engines import UNKNOWN, not_learnt
from specserve_loadgen.records import RequestRecord
from specserve_loadgen.server_times import TimeCheck, time_checks

SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{.*\})?[ \t]+(\S+)")
CHUNK_TOLERANCE = 0.02  # of tokens per step: chunks may coalesce now and then

# Ours, vLLM's, SGLang's, llama.cpp's; names arrive with colons or, escaped, with underscores.
COUNTERS = {
    "output tokens": (
        "specserve_generated_tokens_total",
        "vllm:generation_tokens_total",
        "vllm_generation_tokens_total",
        "sglang:generation_tokens_total",
        "sglang_generation_tokens_total",
        "llamacpp:tokens_predicted_total",
    ),
    "steps with drafts": (
        "specserve_spec_steps_total",
        "vllm:spec_decode_num_drafts_total",
        "vllm_spec_decode_num_drafts_total",
        "sglang:spec_verify_calls_total",
        "sglang_spec_verify_calls_total",
        "llamacpp:spec_decode_num_drafts_total",
    ),
    "draft tokens": (
        "specserve_spec_draft_tokens_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm_spec_decode_num_draft_tokens_total",
        "llamacpp:spec_decode_num_draft_tokens_total",
    ),
    "accepted draft tokens": (
        "specserve_spec_accepted_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "vllm_spec_decode_num_accepted_tokens_total",
        "llamacpp:spec_decode_num_accepted_tokens_total",
    ),
    "tokens of steps with drafts": ("specserve_spec_emitted_tokens_total",),
}


class Count(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity over the measured requests. None: this source does not tell."""

    name: str
    replies: int | None
    server: int | None
    chunks: int | None


class CrossCheck(msgspec.Struct, frozen=True, kw_only=True):
    counts: tuple[Count, ...]
    disagreements: tuple[str, ...]
    times: tuple[TimeCheck, ...] = ()
    notes: tuple[str, ...]  # why something could not be compared


def parse_counters(text: str) -> dict[str, float]:
    """Sum of each of COUNTERS over its labels in Prometheus text; absent ones are left out."""
    totals: dict[str, float] = {}
    for line in text.split("\n"):
        if (match := SAMPLE.match(line)) is None:
            continue
        try:
            totals[match[1]] = totals.get(match[1], 0.0) + float(match[2])
        except ValueError:
            continue  # not a sample after all; whoever scrapes must survive it
    return {
        name: totals[found]
        for name, spellings in COUNTERS.items()
        if (found := next((s for s in spellings if s in totals), None)) is not None
    }


def counter_deltas(before: str | None, after: str | None) -> dict[str, int]:
    """How far each counter moved between two scrapes; {} when either is missing."""
    if before is None or after is None:
        return {}
    start, end = parse_counters(before), parse_counters(after)
    return {name: round(end[name] - start[name]) for name in end if name in start}


def reply_counts(records: Sequence[RequestRecord]) -> dict[str, int]:
    """The counts that the replies of the succeeded requests claim, by the names of COUNTERS."""
    succeeded = [r for r in records if r.succeeded]
    counts = {"output tokens": sum(r.num_output_tokens for r in succeeded)}
    pooled = acceptance(records)
    if pooled.num_requests:
        counts["steps with drafts"] = pooled.num_spec_steps
        counts["draft tokens"] = pooled.num_draft_tokens
        counts["accepted draft tokens"] = pooled.num_accepted_draft_tokens
        counts["tokens of steps with drafts"] = pooled.num_spec_emitted_tokens
        counts["target steps"] = pooled.num_steps
    if succeeded and all(r.timings is not None for r in succeeded):
        # As llama.cpp counts: what a text's end cuts off was accepted, too.
        counts["accepted draft tokens"] = sum(
            r.timings.draft_n_accepted for r in succeeded if r.timings is not None
        )
    return counts


def cross_check(
    records: Sequence[RequestRecord], deltas: dict[str, int], engine: str = UNKNOWN
) -> CrossCheck:
    """Compare the three sources over the measured requests.

    deltas: movement of the server's counters, by the names of COUNTERS; {} if it has none
    """
    succeeded = [r for r in records if r.succeeded]
    replies = reply_counts(records)
    chunks: dict[str, int] = {}
    if succeeded and all(r.counted_by != "chunks" for r in succeeded):
        chunks["output tokens"] = sum(r.num_chunk_tokens for r in succeeded)
        if all(r.timings is None for r in succeeded):  # llama.cpp sends a chunk per token
            chunks["target steps"] = sum(1 for r in succeeded for c in r.chunks if c.num_tokens)
    counts = tuple(
        Count(name=n, replies=replies.get(n), server=deltas.get(n), chunks=chunks.get(n))
        for n in (*COUNTERS, "target steps")
    )
    disagreements, notes = [], []
    num_failed = len(records) - len(succeeded)
    for count in counts:
        disagreements += _against_server(count, num_failed)
        disagreements += _against_chunks(count)
    disagreements += _reply_contradictions(succeeded)
    if deltas and num_failed:
        notes.append(f"/metrics also counts {num_failed} requests that failed or were stopped")
    if succeeded:
        notes += [f"not learnt: {text}" for text in not_learnt(engine, _known(records, deltas))]
    return CrossCheck(
        counts=counts,
        disagreements=tuple(disagreements),
        times=time_checks(records),
        notes=tuple(notes),
    )


def _known(records: Sequence[RequestRecord], deltas: dict[str, int]) -> list[str]:
    """What could be learnt, by the names of `not_learnt`."""
    succeeded = [r for r in records if r.succeeded]
    spec = [r.speculative for r in succeeded if r.speculative is not None]
    facts = {
        "speculation": bool(spec),
        "steps": not spec or any(s.acceptance_histogram or not s.num_spec_steps for s in spec),
        "server": bool(deltas),
        "tokens": all(r.counted_by != "chunks" for r in succeeded),
    }
    return [name for name, known in facts.items() if known]


def _against_server(count: Count, num_failed: int) -> list[str]:
    if count.replies is None or count.server is None or count.replies == count.server:
        return []
    if num_failed and count.server > count.replies:
        return []  # the server worked on the failed ones too
    cause = "other traffic?" if count.server > count.replies else "the server lost some"
    return [f"{count.name}: the replies say {count.replies}, /metrics {count.server} ({cause})"]


def _against_chunks(count: Count) -> list[str]:
    if count.replies is None or count.chunks is None or count.replies == count.chunks:
        return []
    if count.name == "output tokens":
        return [f"output tokens: usage says {count.replies}, the chunks held {count.chunks}"]
    if count.chunks > count.replies:
        return [
            f"{count.replies} target steps arrived as {count.chunks} chunks: more than one each"
        ]
    if count.replies - count.chunks > CHUNK_TOLERANCE * count.replies:
        return [
            f"{count.replies} target steps arrived as {count.chunks} chunks: steps were merged, "
            "so inter-chunk gaps are longer than steps"
        ]
    return []


def _reply_contradictions(records: Sequence[RequestRecord]) -> list[str]:
    """Each kind of contradiction once, with how many replies show it and one of them."""
    seen: dict[str, list[int]] = {}
    for record in records:
        for message in contradictions(record):
            seen.setdefault(message, []).append(record.request_idx)
    return [
        f"{len(idxs)} replies contradict themselves: {message} (request {idxs[0]})"
        for message, idxs in seen.items()
    ]

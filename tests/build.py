"""Words to build things with, for tests of the pure part of the engine."""

from __future__ import annotations

from specserve.config import EngineConfig
from specserve.scheduler import Scheduler
from specserve.sequence import Sequence
from specserve.types import Request, RowPlan, SamplingParams


def a_config(
    *,
    blocks: int = 64,
    block_size: int = 4,
    budget: int = 64,
    max_num_seqs: int = 16,
    chunk: int = 64,
    prefix_cache: bool = True,
    max_model_len: int = 256,
) -> EngineConfig:
    return EngineConfig(
        num_blocks=blocks,
        block_size=block_size,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        max_prefill_chunk=chunk,
        enable_prefix_caching=prefix_cache,
        max_model_len=max_model_len,
    )


def a_request(
    prompt: int | list[int] = 5,
    *,
    name: str = "r",
    max_tokens: int = 8,
    drafter: str = "none",
    draft_tokens: int = 0,
    priority: int = 0,
    salt: str = "",
    first_token: int = 1,
) -> Request:
    """prompt: token ids, or how many (first_token, first_token + 1, ...)."""
    ids = list(range(first_token, first_token + prompt)) if isinstance(prompt, int) else prompt
    return Request(
        request_id=name,
        prompt_ids=tuple(ids),
        params=SamplingParams(max_tokens=max_tokens),
        seed=0,
        drafter=drafter,
        max_draft_tokens=draft_tokens,
        verify="replay",
        priority=priority,
        cache_salt=salt,
    )


def run_step(scheduler: Scheduler, token: int = 7, accepted: int = 0) -> dict[str, RowPlan]:
    """One plan and a commit in which every sampling row emits `accepted` guesses and one more."""
    rows = {}
    for row in scheduler.plan().rows:
        rows[row.request.request_id] = row
        emitted = [token] * (1 + min(accepted, row.max_draft_tokens)) if row.samples else []
        seq = scheduler.get(row.seq_id)
        assert seq is not None
        emitted = emitted[: seq.num_remaining_tokens]
        scheduler.commit_row(row, emitted, {})
        if seq.num_remaining_tokens == 0:
            scheduler.finish(seq)
    scheduler.check()
    return rows


def run_until_done(scheduler: Scheduler, *sequences: Sequence, limit: int = 1000) -> int:
    """Steps taken until nothing is left."""
    for steps in range(limit):
        if not scheduler.has_work:
            return steps
        run_step(scheduler)
    raise AssertionError(f"still working after {limit} steps")

"""Words to build rows of logits and the requests behind them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from specserve.sampler import LogitsRow
from specserve.types import Request, SamplingParams, VerifyRule


def a_sampling_request(
    prompt: Seq[int] = (1, 2, 3),
    *,
    seed: int = 0,
    drafter: str = "none",
    verify: VerifyRule = "replay",
    stop_ids: Seq[int] = (),
    eos_ids: Seq[int] = (),
    bad_word_ids: tuple[tuple[int, ...], ...] = (),
    **params: Any,  # fields of SamplingParams
) -> Request:
    return Request(
        request_id=f"r{seed}",
        prompt_ids=tuple(prompt),
        params=SamplingParams(**params),
        seed=seed,
        drafter=drafter,
        max_draft_tokens=15,
        verify=verify,
        stop_ids=frozenset(stop_ids),
        eos_ids=frozenset(eos_ids),
        bad_word_ids=bad_word_ids,
    )


def a_row(
    history: Seq[int] = (1, 2, 3), *, draft_prefix: tuple[int, ...] = (), **request: Any
) -> LogitsRow:
    """A row after `history`, all of it prompt unless `prompt` says how much is."""
    prompt = request.pop("prompt", history)
    return LogitsRow(a_sampling_request(prompt, **request), history, draft_prefix)


def random_logits(num_rows: int, vocab_size: int, *, seed: int = 0, spread: float = 3.0) -> Tensor:
    """[L, V] fp32, coarse enough to hold many exactly equal values."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(num_rows, vocab_size, generator=generator) * spread
    return (values * 8).round() / 8

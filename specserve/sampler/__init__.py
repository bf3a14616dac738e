"""Rows of logits in, tokens out: one pipeline for plain decoding and every draft position."""

from specserve.sampler.choose import (
    Proposal,
    choose,
    choose_row,
    choose_row_in_numpy,
    draft_choice,
    logprobs,
    prompt_logprobs,
)
from specserve.sampler.pipeline import process_logits, process_row
from specserve.sampler.rows import (
    LogitsRow,
    RowError,
    UnfollowableError,
    as_rows,
    edited,
    needs_edits,
    penalise_in_numpy,
)

__all__ = [
    "LogitsRow",
    "Proposal",
    "RowError",
    "UnfollowableError",
    "as_rows",
    "choose",
    "choose_row",
    "choose_row_in_numpy",
    "draft_choice",
    "edited",
    "logprobs",
    "needs_edits",
    "penalise_in_numpy",
    "process_logits",
    "process_row",
    "prompt_logprobs",
]

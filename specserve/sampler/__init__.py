"""Rows of logits in, tokens out: one pipeline for plain decoding and every draft position."""

from specserve.sampler.choose import Proposal, choose, choose_row, draft_choice, logprobs
from specserve.sampler.pipeline import process_logits, process_row
from specserve.sampler.rows import LogitsRow, RowError, as_rows

__all__ = [
    "LogitsRow",
    "Proposal",
    "RowError",
    "as_rows",
    "choose",
    "choose_row",
    "draft_choice",
    "logprobs",
    "process_logits",
    "process_row",
]

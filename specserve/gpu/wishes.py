"""What requests want of rows of logits beyond plain sampling: edits, masks, logits for the host."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specserve.drafting import Draft
from specserve.gpu.by_test import is_tested
from specserve.sampler import LogitsRow, RowError, needs_edits
from specserve.types import RowPlan
from specserve.verifier import node_rows
from specserve_kernels.triton_kernels.rows import Edit

Mask = NDArray[np.int32]


@dataclass
class Wishes:
    """Of a step's L rows of logits.

    edit_starts: [L+1]; edits: of row l the entries edit_starts[l] .. edit_starts[l+1]-1
    masks: [R] of ceil(V/32) words, a bit per token that may come; mask_rows: [L], -1: no mask
    errors: of rows (l) that cannot choose, whatever the logits say
    judged_apart: sequences (b) whose guesses are verified by a rule with a test
    judged_on_host: those of them that the host verifies
    kept: rows (l) whose logits the host wants to see as the model left them, ascending; those of
          scored prompt tokens are the last ones
    """

    edit_starts: list[int] = field(default_factory=lambda: [0])
    edits: list[Edit] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    mask_rows: list[int] = field(default_factory=list)
    errors: dict[int, RowError] = field(default_factory=dict)
    judged_apart: set[int] = field(default_factory=set)
    judged_on_host: set[int] = field(default_factory=set)
    kept: list[int] = field(default_factory=list)


def wishes_of(
    rows: Seq[RowPlan], drafts: Seq[Draft], num_logits: Seq[int], vocab_size: int
) -> Wishes:
    wishes = Wishes()
    first = 0
    for idx, (row, draft, count) in enumerate(zip(rows, drafts, num_logits, strict=True)):
        if not count:
            continue
        judged_apart = row.request.verify != "replay" and count > 1
        judged_on_host = judged_apart and not is_tested(row, draft)
        if judged_apart:
            wishes.judged_apart.add(idx)
        if judged_on_host:
            wishes.judged_on_host.add(idx)
        if judged_on_host or row.request.params.logprobs is not None:
            wishes.kept += range(first, first + count)
        if _is_plain(row):
            wishes.edit_starts += [len(wishes.edits)] * count
            wishes.mask_rows += [-1] * count
        else:
            for place in node_rows(row.request, row.history, draft):
                _add(wishes, place, vocab_size)
        first += count
    wishes.kept += range(first, first + sum(row.num_scored for row in rows))
    return wishes


def _is_plain(row: RowPlan) -> bool:
    """Later places of a draft want no more than the first: min_tokens only ever runs out."""
    place = LogitsRow(row.request, row.history)
    return not needs_edits(place) and row.request.constraint is None


def _add(wishes: Wishes, place: LogitsRow, vocab_size: int) -> None:
    wishes.edits += edits_of(place, vocab_size)
    wishes.edit_starts.append(len(wishes.edits))
    mask: Mask | None
    try:
        mask = mask_of(place, vocab_size)
    except RowError as error:
        wishes.errors[len(wishes.mask_rows)] = error
        mask = np.zeros(-(-vocab_size // 32), np.int32)  # so the row has nothing to choose
    wishes.mask_rows.append(-1 if mask is None else len(wishes.masks))
    if mask is not None:
        wishes.masks.append(mask)


def edits_of(place: LogitsRow, vocab_size: int) -> list[Edit]:
    """The tokens that penalties, biases, bad words and min_tokens touch; each once."""
    request, params = place.request, place.request.params
    seen: set[int] = set()
    times: Counter[int] = Counter()
    if params.repetition_penalty != 1:
        seen = {*place.history, *place.draft_prefix}
    if params.presence_penalty or params.frequency_penalty:
        times.update(place.history[len(request.prompt_ids) :])
        times.update(place.draft_prefix)
    banned = set(place.banned)
    if place.num_output < params.min_tokens:
        banned |= request.eos_ids | request.stop_ids
    touched = {*seen, *times, *params.logit_bias, *banned}
    return [
        Edit(
            token_id,
            token_id in seen,
            times[token_id],
            -math.inf if token_id in banned else params.logit_bias.get(token_id, 0.0),
        )
        for token_id in touched
        if 0 <= token_id < vocab_size
    ]


def mask_of(place: LogitsRow, vocab_size: int) -> Mask | None:
    """What constraint and allowed_token_ids leave, [ceil(V/32)] words; None: anything.

    Raises RowError where the constraint cannot be followed.
    """
    num_bytes = 4 * -(-vocab_size // 32)
    bits: NDArray[np.uint8] | None = None
    if (mask := place.mask) is not None:
        bits = np.zeros(num_bytes, np.uint8)
        given = np.frombuffer(mask, np.uint8)[:num_bytes]
        bits[: len(given)] = given
    allowed = place.request.params.allowed_token_ids
    if allowed is not None:
        may = np.zeros(8 * num_bytes, np.bool_)
        may[[token_id for token_id in allowed if token_id < vocab_size]] = True
        packed = np.packbits(may, bitorder="little")
        bits = packed if bits is None else bits & packed
    return None if bits is None else bits.view(np.int32)

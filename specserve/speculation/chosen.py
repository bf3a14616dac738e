"""What goes from the speculator to the runner and back, and how a plan's rows look to a drafter."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Final

import msgspec

from specserve.drafting import NO_DRAFT, Draft, DraftRow, Outcome, is_chain
from specserve.types import RowPlan


class ChosenDraft(msgspec.Struct, frozen=True, kw_only=True):
    """What one row verifies in this step.

    drafter:  whose guesses they are; "none" where nobody was to guess
    expected: guesses that will be right, on average
    reason:   why there is no guess, in a word; empty where there are some or none were asked for
    kv_lens:  by drafter, its valid KV if no guess is accepted, a prefix of history
    num_fed:  leading guesses whose KV their drafter has written behind kv_lens[drafter]
    """

    draft: Draft = NO_DRAFT
    drafter: str = "none"
    expected: float = 0.0
    reason: str = ""
    kv_lens: Mapping[str, int] = {}
    num_fed: int = 0


class StepDrafts(msgspec.Struct, frozen=True, kw_only=True):
    """rows: one per row of the plan; seconds: what the step is expected to take, from draft() to
    the last verdict"""

    rows: list[ChosenDraft]
    seconds: float


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a step, rows that failed left out.

    outcomes:    of the rows that `Speculator.awaited` names; hidden, where there is one, holds the
                 layers of `Speculator.hidden_layers`
    num_emitted: tokens of all rows
    """

    outcomes: tuple[Outcome, ...]
    num_emitted: int
    forward_seconds: float
    verify_seconds: float


def kv_lens_after(chosen: ChosenDraft, num_accepted: int) -> Mapping[str, int]:
    """Each drafter's valid KV once guesses are accepted."""
    fed = min(num_accepted, chosen.num_fed)
    if not fed or chosen.drafter not in chosen.kv_lens:
        return chosen.kv_lens
    return {**chosen.kv_lens, chosen.drafter: chosen.kv_lens[chosen.drafter] + fed}


def num_fed(row: RowPlan, draft: Draft) -> int:
    """A caught-up drafter reads its own guesses, but not the last; a tree's lie elsewhere."""
    if draft.kv_len < row.start + row.num_tokens or not is_chain(draft):
        return 0
    return max(0, len(draft.token_ids) - 1)


class StepFacts(msgspec.Struct):
    """What a step does: prompts, decode rows, and the guesses chosen so far."""

    num_tokens: int
    num_logits: int
    emitted: float  # expected tokens
    attended: float  # keys that all queries attend to
    context: float  # keys that one guess attends to


# Nearly every row of every step is one of these: they are made once.
_PLAIN: Final = {
    reason: ChosenDraft(reason=reason)
    for reason in ("", "prefill", "no_room", "no_proposal", "not_worth_it")
}


def no_draft(row: RowPlan) -> ChosenDraft:
    name, reason = row.request.drafter, ""
    if name != "none" and row.request.max_draft_tokens:
        reason = "prefill" if row.is_prefill else "" if row.max_draft_tokens else "no_room"
    if row.draft_kv_lens or name not in ("auto", "none"):
        name = "none" if name == "auto" else name
        return ChosenDraft(drafter=name, kv_lens=row.draft_kv_lens, reason=reason)
    return _PLAIN[reason]


def without_guess(chosen: ChosenDraft, reason: str) -> ChosenDraft:
    """The same row, once it is known why it has no guess."""
    if chosen.kv_lens:
        return msgspec.structs.replace(chosen, reason=reason)
    return _PLAIN[reason]


def facts_of(rows: Seq[RowPlan]) -> StepFacts:
    num_tokens = num_sampled = context = 0
    attended = 0.0
    for row in rows:
        start, count = row.start, row.num_tokens
        num_tokens += count
        num_sampled += row.samples
        context += start
        attended += count * (start + 0.5 * count)
    return StepFacts(
        num_tokens, num_sampled, float(num_sampled), attended, context / max(1, len(rows))
    )


def draft_row(row: RowPlan, name: str, max_tokens: int, width: int, beta: float) -> DraftRow:
    return DraftRow(
        seq_id=row.seq_id,
        request=row.request,
        history=row.history,
        num_known=row.start + row.num_tokens,
        max_tokens=max_tokens,
        kv_len=row.draft_kv_lens.get(name, 0),
        block_table=row.block_table,
        width=width,
        sharpness=beta,
    )

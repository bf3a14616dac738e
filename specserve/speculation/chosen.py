"""What goes from the speculator to the runner and back, and how a plan's rows look to a drafter."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

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

    outcomes: hidden, where there is one, holds the layers of `Speculator.hidden_layers`
    """

    outcomes: tuple[Outcome, ...]
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


def no_draft(row: RowPlan) -> ChosenDraft:
    reason = ""
    if row.request.max_draft_tokens and row.request.drafter != "none":
        reason = "prefill" if row.is_prefill else "" if row.max_draft_tokens else "no_room"
    name = "none" if row.request.drafter == "auto" else row.request.drafter
    return ChosenDraft(drafter=name, kv_lens=row.draft_kv_lens, reason=reason)


def facts_of(rows: Seq[RowPlan]) -> StepFacts:
    num_tokens = sum(row.num_tokens for row in rows)
    num_sampled = sum(row.samples for row in rows)
    attended = sum(row.num_tokens * (row.start + 0.5 * row.num_tokens) for row in rows)
    context = sum(row.start for row in rows) / max(1, len(rows))
    return StepFacts(num_tokens, num_sampled, float(num_sampled), attended, context)


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

"""Asks drafters for guesses inside the step, and tells them what became of them.

Owns the drafters and the bench. The runner packs, forwards and verifies whatever comes from here.
A drafter may fail in any way (raise, return nonsense, return too much): its rows then have K = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Final

import msgspec

from specserve.drafting import (
    NO_DRAFT,
    Draft,
    Drafter,
    DraftRow,
    Outcome,
    fault_of,
    first_chain,
    is_chain,
    leading,
)
from specserve.speculation.bench import Bench
from specserve.types import RowPlan
from specserve_observability.logs import get_logger

# Rules that accept chains only; of a tree they get the path of first children.
CHAIN_RULES: Final = frozenset({"rejection", "block"})


class ChosenDraft(msgspec.Struct, frozen=True, kw_only=True):
    """What one row verifies in this step.

    drafter: whose guesses they are; "none" where nobody was to guess
    kv_lens: by drafter, its valid KV if no guess is accepted, a prefix of history
    num_fed: leading guesses whose KV their drafter has written behind kv_lens[drafter]
    """

    draft: Draft = NO_DRAFT
    drafter: str = "none"
    kv_lens: Mapping[str, int] = {}
    num_fed: int = 0


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a step, rows that failed left out.

    outcomes: hidden, where there is one, holds the layers of `Speculator.hidden_layers`
    paths:    per outcome, the accepted nodes of its draft, each the parent of the next
    """

    outcomes: tuple[Outcome, ...]
    paths: tuple[tuple[int, ...], ...]
    forward_seconds: float
    verify_seconds: float


class Speculator:
    """draft() and learn() alternate, once per step, on the worker thread."""

    def __init__(self, drafters: Mapping[str, Drafter], *, vocab_size: int) -> None:
        """vocab_size: a guess beyond it (a drafter's padding) ends its draft."""
        self._drafters = dict(drafters)
        self._vocab_size = vocab_size
        self._bench = Bench(self._drafters)
        self._step_idx = 0
        self._log = get_logger("specserve.speculation")

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Every layer whose incoming residual stream some drafter wants to see, ascending."""
        wanted = {layer for drafter in self._drafters.values() for layer in drafter.hidden_layers}
        return tuple(sorted(wanted))

    # ---- draft ---------------------------------------------------------------------------

    def draft(self, rows: Seq[RowPlan]) -> list[ChosenDraft]:
        """One per row, in order."""
        self._step_idx += 1
        chosen = [
            ChosenDraft(drafter=row.request.drafter, kv_lens=row.draft_kv_lens) for row in rows
        ]
        for name, drafter in self._drafters.items():
            asked = [
                idx
                for idx, row in enumerate(rows)
                if row.request.drafter == name
                and row.request.max_draft_tokens > 0  # K = 0 for good: nothing to keep up for
                and (row.max_draft_tokens or drafter.keeps_kv)
            ]
            if not asked or not self._bench.may_play(name, self._step_idx):
                continue
            drafts = self._propose(name, [_draft_row(rows[idx], name) for idx in asked])
            for idx, draft in zip(asked, drafts, strict=True):
                kv_lens = rows[idx].draft_kv_lens
                if drafter.keeps_kv:
                    kv_lens = {**kv_lens, name: draft.kv_len}
                num_fed = _num_fed(rows[idx], draft)
                if rows[idx].request.verify in CHAIN_RULES and not is_chain(draft):
                    draft = first_chain(draft)
                chosen[idx] = ChosenDraft(
                    draft=self._known_guesses(draft), drafter=name, kv_lens=kv_lens, num_fed=num_fed
                )
        return chosen

    def _propose(self, name: str, rows: Seq[DraftRow]) -> list[Draft]:
        """One draft per row; none for anybody if the drafter fails."""
        proposals: list[Draft] = []

        def propose() -> None:
            proposals.extend(self._drafters[name].propose(rows))
            if len(proposals) != len(rows):
                raise ValueError(f"{len(proposals)} drafts for {len(rows)} rows")
            for draft, row in zip(proposals, rows, strict=True):
                if fault := fault_of(draft):
                    raise ValueError(fault)
                if len(draft.token_ids) > row.max_tokens:
                    raise ValueError(f"{len(draft.token_ids)} guesses where K is {row.max_tokens}")

        if not self._guarded(name, propose):
            return [Draft(kv_len=row.kv_len) for row in rows]
        self._bench.worked(name)
        return proposals

    def _guarded(self, name: str, call: Callable[[], None]) -> bool:
        """A guesser may fail in any way; the text must not notice. False: it failed."""
        try:
            call()
        except Exception:
            num_steps = self._bench.failed(name, self._step_idx)
            self._log.exception("drafter_failed", drafter=name, benched_steps=num_steps)
            return False
        return True

    def _known_guesses(self, draft: Draft) -> Draft:
        """The leading guesses that exist in the target's vocabulary."""
        for at, token_id in enumerate(draft.token_ids):
            if not 0 <= token_id < self._vocab_size:
                return leading(draft, at)
        return draft

    # ---- learn ---------------------------------------------------------------------------

    def learn(self, learned: Learned) -> None:
        layers = self.hidden_layers
        for name, drafter in self._drafters.items():
            if self._bench.may_play(name, self._step_idx):
                outcomes = _with_own_layers(learned.outcomes, drafter.hidden_layers, layers)
                self._guarded(name, partial(drafter.observe, outcomes))

    def forget(self, seq_ids: Seq[int]) -> None:
        """These sequences ended or were preempted."""
        for seq_id in seq_ids:
            for name, drafter in self._drafters.items():
                self._guarded(name, partial(drafter.forget, seq_id))


def kv_lens_after(chosen: ChosenDraft, num_accepted: int) -> Mapping[str, int]:
    """Each drafter's valid KV once guesses are accepted."""
    fed = min(num_accepted, chosen.num_fed)
    if not fed:
        return chosen.kv_lens
    return {**chosen.kv_lens, chosen.drafter: chosen.kv_lens[chosen.drafter] + fed}


def _num_fed(row: RowPlan, draft: Draft) -> int:
    """A caught-up drafter reads its own guesses, but not the last; a tree's lie elsewhere."""
    if draft.kv_len < row.start + row.num_tokens or not is_chain(draft):
        return 0
    return max(0, len(draft.token_ids) - 1)


def _draft_row(row: RowPlan, name: str) -> DraftRow:
    return DraftRow(
        seq_id=row.seq_id,
        request=row.request,
        history=row.history,
        num_known=row.start + row.num_tokens,
        max_tokens=row.max_draft_tokens,
        kv_len=row.draft_kv_lens.get(name, 0),
        block_table=row.block_table,
    )


def _with_own_layers(
    outcomes: Seq[Outcome], own: Seq[int], captured: Seq[int]
) -> tuple[Outcome, ...]:
    """Outcomes whose hidden states are those of a drafter's own layers, in its order."""
    columns = [captured.index(layer) for layer in own]
    if not columns and not captured:
        return tuple(outcomes)
    return tuple(
        msgspec.structs.replace(
            outcome,
            hidden=outcome.hidden[:, columns] if columns and outcome.hidden is not None else None,
        )
        for outcome in outcomes
    )

"""BatchPlan -> tensors -> StepResult, on the one worker thread that owns every tensor.

draft (inside the step: guesses never outlive it) -> one packed target forward over prefill chunks
and [last token + guesses] rows -> one row-wise logits pipeline -> verify. Who guesses, and how
much, is the Speculator's business; forward and verdicts are the Target's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq

import msgspec
import torch
from torch import Tensor

from specserve.drafting import Draft, Outcome
from specserve.packing import pack
from specserve.speculation.chosen import ChosenDraft, Learned, kv_lens_after
from specserve.speculation.speculator import Speculator
from specserve.target import Judged, Target
from specserve.types import BatchPlan, Guesses, RowPlan, RowResult, StepResult, StepTimings
from specserve.verifier import Verdict


class ModelRunner:
    """Joins guessers and target. Only execute() is called, from one thread."""

    def __init__(self, target: Target, speculator: Speculator) -> None:
        self._target = target
        self._speculator = speculator

    @torch.inference_mode()
    def execute(
        self, plan: BatchPlan, forward_begins: Callable[[], None] = lambda: None
    ) -> StepResult:
        """forward_begins: called, on this thread, once all is ready for the forward."""
        draft_start = time.time()
        self._speculator.forget(plan.released, plan.ended)
        drafts = self._speculator.draft(plan.rows)
        chosen = drafts.rows
        forward_start = time.time()
        target, guesses = self._target, [one.draft for one in chosen]
        packed = pack(plan.rows, guesses, target.block_size, vocab_size=target.vocab_size)
        layers = self._speculator.hidden_layers
        ran = target.run(plan.rows, guesses, packed, layers, forward_begins)
        verified = [
            _verified(row, one, judged)
            for row, one, judged in zip(plan.rows, chosen, ran.judged, strict=True)
        ]
        end = time.time()
        outcomes = _outcomes(
            plan.rows,
            verified,
            packed.batch.query_start_loc,
            ran.states,
            awaited=self._speculator.awaited,
        )
        self._speculator.learn(
            Learned(
                outcomes=outcomes,
                num_emitted=sum(len(one.result.token_ids) for one in verified),
                forward_seconds=ran.forward_end - forward_start,
                verify_seconds=end - ran.forward_end,
            )
        )
        return StepResult(
            rows=tuple(one.result for one in verified),
            timings=StepTimings(
                draft_start=draft_start,
                forward_start=forward_start,
                verify_start=ran.forward_end,
                end=end,
            ),
            predicted_seconds=drafts.seconds,
            failed_drafters=self._speculator.failed,
            speculation_seconds=self._speculator.extra_seconds,
        )


class _Verified(msgspec.Struct, frozen=True):
    """path: the accepted nodes of the row's draft."""

    result: RowResult
    path: tuple[int, ...] = ()


def _verified(row: RowPlan, chosen: ChosenDraft, judged: Judged) -> _Verified:
    if judged.error is not None:
        return _Verified(
            RowResult(seq_id=row.seq_id, error=judged.error, unfollowable=judged.unfollowable)
        )
    verdict = judged.verdict
    if verdict is None:
        return _Verified(
            RowResult(
                seq_id=row.seq_id,
                draft_kv_lens=kv_lens_after(chosen, 0),
                drafter=chosen.drafter,
                no_draft_reason=chosen.reason,
                prompt_logprobs=judged.prompt_logprobs,
            )
        )
    result = RowResult(
        seq_id=row.seq_id,
        token_ids=verdict.token_ids,
        num_draft_tokens=len(chosen.draft.token_ids),
        num_accepted=len(verdict.path),
        draft_kv_lens=kv_lens_after(chosen, len(verdict.path)),
        logprobs=judged.logprobs,
        drafter=chosen.drafter,
        predicted_accepted=chosen.expected,
        no_draft_reason=chosen.reason,
        guesses=_guesses(row, chosen.draft, verdict),
        prompt_logprobs=judged.prompt_logprobs,
    )
    return _Verified(result, verdict.path)


def _guesses(row: RowPlan, draft: Draft, verdict: Verdict) -> Guesses | None:
    if not row.request.with_steps:
        return None
    return Guesses(draft.token_ids, draft.parents, draft.scores, verdict.path)


def _outcomes(
    rows: Seq[RowPlan],
    verified: Seq[_Verified],
    starts: Seq[int],
    states: Tensor | None,
    *,
    awaited: Collection[int] | None,
) -> tuple[Outcome, ...]:
    """What the step made known, rows that failed left out.

    starts:  [B+1] where each row begins in the packed step
    states:  [T, A, D] or None
    awaited: sequences that somebody wants to hear of; None: all
    """
    if awaited is not None and not awaited:
        return ()
    outcomes = []
    for row, one, start in zip(rows, verified, starts[:-1], strict=True):
        result = one.result
        if result.error is not None or (awaited is not None and row.seq_id not in awaited):
            continue
        known = row.history[row.start : row.start + row.num_tokens]
        outcomes.append(
            Outcome(
                seq_id=row.seq_id,
                request=row.request,
                start=row.start,
                token_ids=(*known, *result.token_ids),
                num_computed=row.num_tokens + result.num_accepted,
                drafter=result.drafter if result.num_draft_tokens else "none",
                num_drafted=result.num_draft_tokens,
                num_accepted=result.num_accepted,
                hidden=None if states is None else _states_of(states, start, row, one.path),
            )
        )
    return tuple(outcomes)


def _states_of(states: Tensor, start: int, row: RowPlan, path: Seq[int]) -> Tensor:
    """[num_tokens + len(path), A, D]: the known tokens of a row, then its accepted guesses."""
    end = start + row.num_tokens
    if all(node == at for at, node in enumerate(path)):  # a chain: they stand in order already
        return states[start : end + len(path)]
    return states[[*range(start, end), *(end + node for node in path)]]

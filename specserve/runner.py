"""BatchPlan -> tensors -> StepResult, on the one worker thread that owns every tensor.

draft (inside the step: guesses never outlive it) -> one packed target forward over prefill chunks
and [last token + guesses] rows -> one row-wise logits pipeline -> verify. Who guesses, and how
much, is the Speculator's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from functools import partial
from itertools import accumulate

import msgspec
import torch
from torch import Tensor

from specserve.drafting import NO_DRAFT, Draft, Outcome, is_chain
from specserve.kv_cache import KVCache
from specserve.models.interface import Capture, CausalLM
from specserve.noise import Noise
from specserve.sampler import LogitsRow, RowError, choose, logprobs, prompt_logprobs
from specserve.speculation.chosen import ChosenDraft, Learned, kv_lens_after
from specserve.speculation.speculator import Speculator
from specserve.types import (
    BatchPlan,
    Guesses,
    RowPlan,
    RowResult,
    StepResult,
    StepTimings,
    TokenLogprobs,
)
from specserve.verifier import Verdict, verify, verify_replay
from specserve_kernels.interface import PagedBatch


class PackedStep(msgspec.Struct, frozen=True):
    """The host side of one forward: T packed tokens of B rows, L rows of logits."""

    input_ids: list[int]  # [T]
    positions: list[int]  # [T]
    batch: PagedBatch
    logits_indices: list[int]  # [L]: per sampling row the last known token, then its guesses
    scored_indices: list[int]  # of prompts' tokens whose law is wanted, too: L more
    num_logits: list[int]  # [B]: how many of the L belong to each row


def pack(rows: Seq[RowPlan], drafts: Seq[Draft], block_size: int, *, vocab_size: int) -> PackedStep:
    """Lay rows and their guesses end to end.

    vocab_size: a guess beyond it is padding that was drawn: it is rejected whatever stands here
    """
    input_ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    parents: list[tuple[int, ...] | None] = []
    logits_indices: list[int] = []
    scored_indices: list[int] = []
    num_logits: list[int] = []
    for row, draft in zip(rows, drafts, strict=True):
        known_end = row.start + row.num_tokens
        first = len(input_ids)
        input_ids += row.history[row.start : known_end]
        positions += range(row.start, known_end)
        depths = node_depths(draft)
        input_ids += [guess if 0 <= guess < vocab_size else 0 for guess in draft.token_ids]
        positions += [known_end - 1 + depth for depth in depths]
        parents.append(None if is_chain(draft) else _segment_parents(row.num_tokens, draft))
        if row.samples:
            logits_indices += range(first + row.num_tokens - 1, len(input_ids))
        scored_indices += range(first, first + row.num_scored)
        num_logits.append(1 + len(draft.token_ids) if row.samples else 0)
        starts.append(len(input_ids))
    batch = PagedBatch(
        query_start_loc=tuple(starts),
        context_lens=tuple(row.start for row in rows),
        block_tables=tuple(row.block_table for row in rows),
        parents=tuple(parents),
        block_size=block_size,
    )
    return PackedStep(input_ids, positions, batch, logits_indices, scored_indices, num_logits)


def node_depths(draft: Draft) -> list[int]:
    """1 for a guess that follows the last known token, 2 for its children, and so on."""
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def _segment_parents(num_known: int, draft: Draft) -> tuple[int, ...]:
    known = range(-1, num_known - 1)
    return (*known, *(num_known + parent for parent in draft.parents))


class ModelRunner:
    """Target model and its KV. Only execute() is called, from one thread."""

    def __init__(
        self,
        model: CausalLM,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        speculator: Speculator,
        hidden_size: int = 0,
    ) -> None:
        """vocab_size: ids the tokenizer knows; logits beyond it are padding and never win

        hidden_size: D, where a drafter wants to see hidden states
        """
        self._model = model
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._speculator = speculator
        self._hidden_layers = speculator.hidden_layers
        self._hidden_size = hidden_size
        self._noise = Noise()  # scratch space of the worker thread
        self._kv_cache: KVCache = model.new_kv_cache(num_blocks, block_size)

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
        packed = pack(
            plan.rows,
            [one.draft for one in chosen],
            self._block_size,
            vocab_size=self._vocab_size,
        )
        states = self._new_states(len(packed.input_ids))
        forward_begins()
        logits = self._forward(packed, states)
        verify_start = time.time()
        verified = self._verify(plan.rows, chosen, packed.num_logits, logits)
        end = time.time()
        outcomes = _outcomes(
            plan.rows,
            verified,
            packed.batch.query_start_loc,
            states,
            awaited=self._speculator.awaited,
        )
        self._speculator.learn(
            Learned(
                outcomes=outcomes,
                num_emitted=sum(len(one.result.token_ids) for one in verified),
                forward_seconds=verify_start - forward_start,
                verify_seconds=end - verify_start,
            )
        )
        return StepResult(
            rows=tuple(one.result for one in verified),
            timings=StepTimings(
                draft_start=draft_start,
                forward_start=forward_start,
                verify_start=verify_start,
                end=end,
            ),
            predicted_seconds=drafts.seconds,
            failed_drafters=self._speculator.failed,
        )

    def _new_states(self, num_tokens: int) -> Tensor | None:
        """[T, A, D] room for the hidden states that drafters want to see; None if none does."""
        if not self._hidden_layers or not num_tokens:
            return None
        dtype = torch.float64 if self._model.dtype == torch.float64 else torch.float32
        return torch.empty(num_tokens, len(self._hidden_layers), self._hidden_size, dtype=dtype)

    def _forward(self, packed: PackedStep, states: Tensor | None) -> Tensor:
        """[L, V] logits of the sampling rows, then of the scored tokens.

        Writes all rows' KV, and `states` [T, A, D].
        """
        if not packed.input_ids:
            return torch.empty(0, self._model.vocab_size)
        run = self._model.forward
        if states is not None:
            run = partial(run, capture=Capture(self._hidden_layers, states))
        return run(
            torch.tensor(packed.input_ids, dtype=torch.int64),
            torch.tensor(packed.positions, dtype=torch.int64),
            packed.batch,
            self._kv_cache,
            packed.logits_indices + packed.scored_indices,
        )

    # ---- verify --------------------------------------------------------------------------

    def _verify(
        self, rows: Seq[RowPlan], chosen: Seq[ChosenDraft], num_logits: Seq[int], logits: Tensor
    ) -> list[_Verified]:
        verified = []
        lone = self._choose_lone(rows, num_logits, logits)
        offset, scored = 0, sum(num_logits)
        for idx, (row, one, count) in enumerate(zip(rows, chosen, num_logits, strict=True)):
            mine = slice(offset, offset + count)
            offset += count
            read = logits[scored : scored + row.num_scored]
            scored += row.num_scored
            try:
                done = self._verify_row(row, one, logits, mine, lone.get(idx))
                verified.append(self._with_prompt(row, done, read) if row.num_scored else done)
            except RowError as error:  # this row's own fault: its request fails alone
                verified.append(_Verified(RowResult(seq_id=row.seq_id, error=str(error))))
        return verified

    def _choose_lone(
        self, rows: Seq[RowPlan], num_logits: Seq[int], logits: Tensor
    ) -> dict[int, int | RowError]:
        """The choices of rows that sample and verify nothing, in one call: by every rule the same
        draw. Keys are indices into rows."""
        ends = accumulate(num_logits)
        lone = {
            idx: end - 1
            for idx, (end, count) in enumerate(zip(ends, num_logits, strict=True))
            if count == 1
        }
        places = [LogitsRow(rows[idx].request, rows[idx].history) for idx in lone]
        choices = choose(logits, places, vocab_size=self._vocab_size, at=list(lone.values()))
        return dict(zip(lone, choices, strict=True))

    def _verify_row(
        self,
        row: RowPlan,
        chosen: ChosenDraft,
        logits: Tensor,
        mine: slice,
        lone: int | RowError | None,
    ) -> _Verified:
        """logits: [L, V] of all rows

        mine: this row's: 1 + len(draft), or 0 of a chunk that does not sample
        lone: what it chooses, if there are no guesses
        """
        if not row.samples:
            return _Verified(
                RowResult(
                    seq_id=row.seq_id,
                    draft_kv_lens=kv_lens_after(chosen, 0),
                    drafter=chosen.drafter,
                    no_draft_reason=chosen.reason,
                )
            )
        if lone is not None:
            verdict = verify_replay([lone], NO_DRAFT)
        else:
            verdict = verify(
                row.request,
                row.history,
                chosen.draft,
                logits[mine],
                vocab_size=self._vocab_size,
                noise=self._noise,
            )
        self._compact(row, verdict.path)
        result = RowResult(
            seq_id=row.seq_id,
            token_ids=verdict.token_ids,
            num_draft_tokens=len(chosen.draft.token_ids),
            num_accepted=len(verdict.path),
            draft_kv_lens=kv_lens_after(chosen, len(verdict.path)),
            logprobs=self._logprobs(row, verdict, logits, mine),
            drafter=chosen.drafter,
            predicted_accepted=chosen.expected,
            no_draft_reason=chosen.reason,
            guesses=_guesses(row, chosen.draft, verdict),
        )
        return _Verified(result, verdict.path)

    def _with_prompt(self, row: RowPlan, verified: _Verified, logits: Tensor) -> _Verified:
        """logits: [num_scored, V]. Raises RowError."""
        num_top = row.request.params.prompt_logprobs
        assert num_top is not None
        first = row.start + 1
        known = row.history[first : first + row.num_scored]
        found = prompt_logprobs(logits, known, num_top, vocab_size=self._vocab_size, first=first)
        result = msgspec.structs.replace(verified.result, prompt_logprobs=tuple(found))
        return _Verified(result, verified.path)

    def _logprobs(
        self, row: RowPlan, verdict: Verdict, logits: Tensor, mine: slice
    ) -> tuple[TokenLogprobs, ...]:
        wanted = row.request.params.logprobs
        if wanted is None:
            return ()
        chose = logits[mine][[0, *(node + 1 for node in verdict.path)]]
        places = [
            LogitsRow(row.request, row.history, verdict.token_ids[:at])
            for at in range(len(verdict.token_ids))
        ]
        size = self._vocab_size
        return tuple(logprobs(chose, verdict.token_ids, wanted, vocab_size=size, places=places))

    def _compact(self, row: RowPlan, path: Seq[int]) -> None:
        """Move the accepted path's KV to where a chain would have it."""
        base = row.start + row.num_tokens
        moves = [(base + node, base + at) for at, node in enumerate(path) if node != at]
        if moves:
            self._kv_cache.move(
                [self._slot(row, source) for source, _ in moves],
                [self._slot(row, target) for _, target in moves],
            )

    def _slot(self, row: RowPlan, index: int) -> int:
        block_id = row.block_table[index // self._block_size]
        return block_id * self._block_size + index % self._block_size


def _guesses(row: RowPlan, draft: Draft, verdict: Verdict) -> Guesses | None:
    if not row.request.with_steps:
        return None
    return Guesses(draft.token_ids, draft.parents, draft.scores, verdict.path)


class _Verified(msgspec.Struct, frozen=True):
    """path: the accepted nodes of the row's draft."""

    result: RowResult
    path: tuple[int, ...] = ()


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

"""BatchPlan -> tensors -> StepResult, on the one worker thread that owns every tensor.

draft (inside the step: guesses never outlive it) -> one packed target forward over prefill chunks
and [last token + guesses] rows -> one row-wise logits pipeline -> verify. A drafter that raises
costs its guesses, never the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial

import msgspec
import torch
from torch import Tensor

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
from specserve.kv_cache import KVCache
from specserve.models.interface import CausalLM
from specserve.noise import Noise
from specserve.sampler import RowError, logprobs
from specserve.types import BatchPlan, RowPlan, RowResult, StepResult, StepTimings, TokenLogprobs
from specserve.verifier import verify
from specserve_kernels.interface import PagedBatch
from specserve_observability.logs import get_logger


class PackedStep(msgspec.Struct, frozen=True):
    """The host side of one forward: T packed tokens of B rows, L rows of logits."""

    input_ids: list[int]  # [T]
    positions: list[int]  # [T]
    batch: PagedBatch
    logits_indices: list[int]  # [L]: per sampling row the last known token, then its guesses
    num_logits: list[int]  # [B]: how many of the L belong to each row


def pack(rows: Seq[RowPlan], drafts: Seq[Draft], block_size: int) -> PackedStep:
    """Lay rows and their guesses end to end."""
    input_ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    parents: list[tuple[int, ...] | None] = []
    logits_indices: list[int] = []
    num_logits: list[int] = []
    for row, draft in zip(rows, drafts, strict=True):
        known_end = row.start + row.num_tokens
        first = len(input_ids)
        input_ids += row.history[row.start : known_end]
        positions += range(row.start, known_end)
        depths = node_depths(draft)
        input_ids += draft.token_ids
        positions += [known_end - 1 + depth for depth in depths]
        parents.append(None if is_chain(draft) else _segment_parents(row.num_tokens, draft))
        if row.samples:
            logits_indices += range(first + row.num_tokens - 1, len(input_ids))
        num_logits.append(1 + len(draft.token_ids) if row.samples else 0)
        starts.append(len(input_ids))
    batch = PagedBatch(
        query_start_loc=tuple(starts),
        context_lens=tuple(row.start for row in rows),
        block_tables=tuple(row.block_table for row in rows),
        parents=tuple(parents),
        block_size=block_size,
    )
    return PackedStep(input_ids, positions, batch, logits_indices, num_logits)


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
    """Target model, its KV, and the drafters. Only execute() is called, from one thread."""

    def __init__(
        self,
        model: CausalLM,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        drafters: Mapping[str, Drafter],
    ) -> None:
        """vocab_size: ids the tokenizer knows; logits beyond it are padding and never win."""
        self._model = model
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._drafters = dict(drafters)
        self._kv_cache: KVCache = model.new_kv_cache(num_blocks, block_size)
        self._log = get_logger("specserve.runner")

    @torch.inference_mode()
    def execute(self, plan: BatchPlan) -> StepResult:
        draft_start = time.time()
        for seq_id in plan.released:
            for drafter in self._drafters.values():
                self._guarded(drafter, partial(drafter.forget, seq_id))
        drafts = self._draft(plan.rows)
        forward_start = time.time()
        packed = pack(plan.rows, drafts, self._block_size)
        logits = self._forward(packed)
        verify_start = time.time()
        results = self._verify(plan.rows, drafts, packed.num_logits, logits)
        self._observe(plan.rows, results)
        return StepResult(
            rows=tuple(results),
            timings=StepTimings(
                draft_start=draft_start,
                forward_start=forward_start,
                verify_start=verify_start,
                end=time.time(),
            ),
        )

    def _forward(self, packed: PackedStep) -> Tensor:
        """[L, V] logits of the sampling rows; writes all rows' KV."""
        if not packed.input_ids:
            return torch.empty(0, self._model.vocab_size)
        return self._model.forward(
            torch.tensor(packed.input_ids, dtype=torch.int64),
            torch.tensor(packed.positions, dtype=torch.int64),
            packed.batch,
            self._kv_cache,
            packed.logits_indices,
        )

    # ---- draft ---------------------------------------------------------------------------

    def _draft(self, rows: Seq[RowPlan]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(rows)
        for name, drafter in self._drafters.items():
            asked = [
                idx
                for idx, row in enumerate(rows)
                if row.request.drafter == name
                and row.request.max_draft_tokens > 0  # K = 0 for good: nothing to keep up for
                and (row.max_draft_tokens or drafter.keeps_kv)
            ]
            if not asked:
                continue
            for idx, draft in zip(asked, self._propose(drafter, rows, asked), strict=True):
                if rows[idx].request.verify == "rejection" and not is_chain(draft):
                    draft = first_chain(draft)
                drafts[idx] = self._clip(draft, rows[idx].max_draft_tokens)
        return drafts

    def _propose(self, drafter: Drafter, rows: Seq[RowPlan], asked: Seq[int]) -> list[Draft]:
        proposals: list[Draft] = []

        def propose() -> None:
            proposals.extend(drafter.propose([_draft_row(rows[idx]) for idx in asked]))
            if len(proposals) != len(asked):
                raise ValueError(f"{len(proposals)} drafts for {len(asked)} rows")
            for draft in proposals:
                if fault := fault_of(draft):
                    raise ValueError(fault)

        if not self._guarded(drafter, propose):
            return [NO_DRAFT] * len(asked)
        return proposals

    def _guarded(self, drafter: Drafter, call: Callable[[], None]) -> bool:
        """A guesser may fail in any way; the text must not notice. False: it failed."""
        try:
            call()
        except Exception:
            self._log.exception("drafter_failed", drafter=drafter.name)
            return False
        return True

    def _clip(self, draft: Draft, max_tokens: int) -> Draft:
        """The leading guesses that fit K and exist in the target's vocabulary."""
        count = min(len(draft.token_ids), max_tokens)
        for at, token_id in enumerate(draft.token_ids[:count]):
            if not 0 <= token_id < self._vocab_size:
                count = at
                break
        return leading(draft, count)

    # ---- verify --------------------------------------------------------------------------

    def _verify(
        self, rows: Seq[RowPlan], drafts: Seq[Draft], num_logits: Seq[int], logits: Tensor
    ) -> list[RowResult]:
        results = []
        noise = Noise()  # scratch space, shared by the step's rows
        offset = 0
        for row, draft, count in zip(rows, drafts, num_logits, strict=True):
            mine = logits[offset : offset + count]
            offset += count
            try:
                results.append(self._row_result(row, draft, mine, noise))
            except RowError as error:  # this row's own fault: its request fails alone
                results.append(RowResult(seq_id=row.seq_id, error=str(error)))
        return results

    def _row_result(self, row: RowPlan, draft: Draft, logits: Tensor, noise: Noise) -> RowResult:
        """logits: [1 + len(draft), V] of this row, or [0, V] of a chunk that does not sample."""
        drafter_name = row.request.drafter
        if not row.samples:
            return RowResult(seq_id=row.seq_id, draft_kv_len=draft.kv_len, drafter=drafter_name)
        verdict = verify(
            row.request,
            row.history,
            draft,
            logits,
            vocab_size=self._vocab_size,
            noise=noise,
        )
        num_accepted = len(verdict.path)
        self._compact(row, verdict.path)
        wanted = row.request.params.logprobs
        told: list[TokenLogprobs] = []
        if wanted is not None:
            chose = logits[[0, *(node + 1 for node in verdict.path)]]
            told = logprobs(chose, verdict.token_ids, wanted, vocab_size=self._vocab_size)
        return RowResult(
            seq_id=row.seq_id,
            token_ids=verdict.token_ids,
            num_draft_tokens=len(draft.token_ids),
            num_accepted=num_accepted,
            draft_kv_len=_draft_kv_after(row, draft, num_accepted),
            logprobs=tuple(told),
            drafter=drafter_name,
        )

    def _observe(self, rows: Seq[RowPlan], results: Seq[RowResult]) -> None:
        outcomes = [
            _outcome(row, result)
            for row, result in zip(rows, results, strict=True)
            if result.error is None
        ]
        for drafter in self._drafters.values():
            self._guarded(drafter, partial(drafter.observe, outcomes))

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


def _outcome(row: RowPlan, result: RowResult) -> Outcome:
    known = row.history[row.start : row.start + row.num_tokens]
    return Outcome(
        seq_id=row.seq_id,
        request=row.request,
        start=row.start,
        token_ids=(*known, *result.token_ids),
        num_computed=row.num_tokens + result.num_accepted,
        drafter=result.drafter if result.num_draft_tokens else "none",
        num_drafted=result.num_draft_tokens,
        num_accepted=result.num_accepted,
    )


def _draft_row(row: RowPlan) -> DraftRow:
    return DraftRow(
        seq_id=row.seq_id,
        request=row.request,
        history=row.history,
        num_known=row.start + row.num_tokens,
        max_tokens=row.max_draft_tokens,
        kv_len=row.draft_kv_len,
        block_table=row.block_table,
    )


def _draft_kv_after(row: RowPlan, draft: Draft, num_accepted: int) -> int:
    """The drafter's valid KV once guesses are accepted.

    A chain's guesses but the last were fed to the drafter, so accepted ones stay; a tree's were
    written elsewhere, so only history counts.
    """
    if draft.kv_len < row.start + row.num_tokens or not is_chain(draft):
        return draft.kv_len
    return draft.kv_len + min(num_accepted, max(0, len(draft.token_ids) - 1))

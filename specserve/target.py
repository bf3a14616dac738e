"""The target model in a step: one forward over packed rows, then a verdict on every row's guesses.

`HostTarget` is the readable one, for models that run on CPUs: logits are numbers in main memory and
rows are verified one by one. `specserve.gpu` has one whose steps never leave the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from itertools import accumulate
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from specserve.drafting import NO_DRAFT, Draft
from specserve.kv_cache import KVCache
from specserve.models.interface import Capture, CausalLM
from specserve.noise import Noise
from specserve.packing import PackedStep
from specserve.sampler import (
    LogitsRow,
    RowError,
    UnfollowableError,
    choose,
    logprobs,
    prompt_logprobs,
)
from specserve.types import PromptLogprobs, RowPlan, TokenLogprobs
from specserve.verifier import Verdict, verify, verify_replay


class Judged(msgspec.Struct, frozen=True):
    """What became of one row. verdict: None where the row does not sample, or failed: `error`

    prompt_logprobs: of its num_scored tokens
    """

    verdict: Verdict | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    unfollowable: bool = False  # the error is what was asked for
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


def failed(error: RowError) -> Judged:
    return Judged(error=str(error), unfollowable=isinstance(error, UnfollowableError))


class TargetResult(msgspec.Struct, frozen=True):
    """judged: [B]; states: [T, A, D] on the CPU, where some were wanted; forward_end: time.time()
    when the logits were there"""

    judged: list[Judged]
    states: Tensor | None
    forward_end: float


class Target(Protocol):
    """Owns the target's KV. Called from one thread.

    block_size: S; vocab_size: ids the tokenizer knows: logits beyond it are padding and never win
    """

    block_size: int
    vocab_size: int

    def run(
        self,
        rows: Seq[RowPlan],
        drafts: Seq[Draft],
        packed: PackedStep,
        hidden_layers: tuple[int, ...],  # whose incoming residual stream is wanted, ascending
        forward_begins: Callable[[], None],  # called once all is ready for the forward
    ) -> TargetResult:
        """Writes all rows' KV; an accepted path's KV is where a chain would have it."""
        ...


class HostTarget:
    """Implements Target with a CausalLM whose logits are tensors of the CPU."""

    def __init__(
        self,
        model: CausalLM,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        hidden_size: int = 0,
    ) -> None:
        """hidden_size: D, where a drafter wants to see hidden states"""
        self.block_size = block_size
        self.vocab_size = vocab_size
        self._model = model
        self._hidden_size = hidden_size
        self._noise = Noise()  # scratch space of the worker thread
        self._kv_cache: KVCache = model.new_kv_cache(num_blocks, block_size)

    def run(
        self,
        rows: Seq[RowPlan],
        drafts: Seq[Draft],
        packed: PackedStep,
        hidden_layers: tuple[int, ...],
        forward_begins: Callable[[], None],
    ) -> TargetResult:
        states = self._new_states(len(packed.input_ids), len(hidden_layers))
        forward_begins()
        logits = self._forward(packed, hidden_layers, states)
        forward_end = time.time()
        lone = self._choose_lone(rows, packed.num_logits, logits)
        judged = []
        offset, scored = 0, len(packed.logits_indices)
        for idx, (row, draft, count) in enumerate(
            zip(rows, drafts, packed.num_logits, strict=True)
        ):
            mine = logits[offset : offset + count]
            offset += count
            read = logits[scored : scored + row.num_scored]
            scored += row.num_scored
            try:
                found = self._judge(row, draft, mine, lone.get(idx))
                judged.append(with_prompt(row, found, read, vocab_size=self.vocab_size))
            except RowError as error:  # this row's own fault: its request fails alone
                judged.append(failed(error))
        return TargetResult(judged, states, forward_end)

    def _new_states(self, num_tokens: int, num_layers: int) -> Tensor | None:
        """[T, A, D] room for the hidden states that drafters want to see; None if none does."""
        if not num_layers or not num_tokens:
            return None
        dtype = torch.float64 if self._model.dtype == torch.float64 else torch.float32
        return torch.empty(num_tokens, num_layers, self._hidden_size, dtype=dtype)

    def _forward(
        self, packed: PackedStep, hidden_layers: tuple[int, ...], states: Tensor | None
    ) -> Tensor:
        """[L, V] logits of the sampling rows, then of the scored tokens.

        Writes all rows' KV, and `states` [T, A, D].
        """
        if not packed.input_ids:
            return torch.empty(0, self._model.vocab_size)
        run = self._model.forward
        if states is not None:
            run = partial(run, capture=Capture(hidden_layers, states))
        return run(
            torch.tensor(packed.input_ids, dtype=torch.int64),
            torch.tensor(packed.positions, dtype=torch.int64),
            packed.batch,
            self._kv_cache,
            packed.logits_indices + packed.scored_indices,
        )

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
        choices = choose(logits, places, vocab_size=self.vocab_size, at=list(lone.values()))
        return dict(zip(lone, choices, strict=True))

    def _judge(
        self, row: RowPlan, draft: Draft, logits: Tensor, lone: int | RowError | None
    ) -> Judged:
        """logits: [1 + len(draft), V], or none of a chunk that does not sample

        lone: what it chooses, if there are no guesses
        """
        if not row.samples:
            return Judged()
        if lone is not None:
            verdict = verify_replay([lone], NO_DRAFT)
        else:
            verdict = verify(
                row.request,
                row.history,
                draft,
                logits,
                vocab_size=self.vocab_size,
                noise=self._noise,
            )
        self._compact(row, verdict.path)
        return Judged(verdict, verdict_logprobs(row, verdict, logits, vocab_size=self.vocab_size))

    def _compact(self, row: RowPlan, path: Seq[int]) -> None:
        """Move the accepted path's KV to where a chain would have it."""
        moves = path_moves(row, path, self.block_size)
        if moves:
            self._kv_cache.move([source for source, _ in moves], [target for _, target in moves])


def path_moves(row: RowPlan, path: Seq[int], block_size: int) -> list[tuple[int, int]]:
    """(source, target) slots that bring an accepted path's KV to where a chain would have it."""
    base = row.start + row.num_tokens

    def slot(index: int) -> int:
        return row.block_table[index // block_size] * block_size + index % block_size

    return [(slot(base + node), slot(base + at)) for at, node in enumerate(path) if node != at]


def with_prompt(row: RowPlan, judged: Judged, logits: Tensor, *, vocab_size: int) -> Judged:
    """logits: [num_scored, V] of the row's scored tokens. Raises RowError."""
    num_top = row.request.params.prompt_logprobs
    if not row.num_scored or num_top is None:
        return judged
    first = row.start + 1
    known = row.history[first : first + row.num_scored]
    found = prompt_logprobs(logits, known, num_top, vocab_size=vocab_size, first=first)
    return msgspec.structs.replace(judged, prompt_logprobs=tuple(found))


def verdict_logprobs(
    row: RowPlan, verdict: Verdict, logits: Tensor, *, vocab_size: int
) -> tuple[TokenLogprobs, ...]:
    """What the request wants to know of each emitted token; logits: [1 + guesses, V] of the row."""
    wanted = row.request.params.logprobs
    if wanted is None:
        return ()
    chose = logits[[0, *(node + 1 for node in verdict.path)]]
    places = [
        LogitsRow(row.request, row.history, verdict.token_ids[:at])
        for at in range(len(verdict.token_ids))
    ]
    return tuple(logprobs(chose, verdict.token_ids, wanted, vocab_size=vocab_size, places=places))

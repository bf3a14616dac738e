"""Who computes what in the next step. Pure Python; runs on the event loop in microseconds.

One token budget, no prefill and decode modes: decode rows first, then prefill chunks, then guesses
to verify. While prompts want more than there is, half of what decode rows leave is for guesses.
Slots are reserved only for tokens this step may write, for guesses last of all: lookahead never
takes a block that a token needs, preempts nobody, and evicts no reusable prefix.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Final

import msgspec

from specserve.block_pool import BlockPool
from specserve.config import EngineConfig
from specserve.sequence import Sequence, Status
from specserve.types import BatchPlan, Ended, Request, RowPlan

# Prompt tokens of one step whose logits are kept: 25 MB where V is 49,152. Every prompt that is
# begun gets one of them at least, so that none stands in the way of others.
MAX_SCORED_TOKENS: Final = 128


class _Row(msgspec.Struct):
    """A row while the plan is being made."""

    seq: Sequence
    num_tokens: int
    num_wanted: int = 0  # guesses, if there is room
    num_draft_tokens: int = 0

    @property
    def num_scored(self) -> int:
        return min(self.num_tokens, self.seq.num_unscored_tokens)


class Scheduler:
    """Owns sequences, the two queues and the pool. plan() and commit_row() alternate."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.running: list[Sequence] = []  # in order of Sequence.order
        self.num_waiting = 0
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []  # heap; aborted ones linger
        self._sequences: dict[int, Sequence] = {}
        self._next_id = 0
        self._step_idx = 0
        self._released: list[int] = []
        self._ended: list[Ended] = []
        self._recent_guesses = 0.0  # verified per step for rows that choose K themselves, lately
        self.num_preempted_last = 0
        self.blocked_by = "admission"  # what kept those who wait out of the last plan

    # ---- queue ---------------------------------------------------------------------------

    def add(self, request: Request) -> Sequence:
        seq = Sequence(self._next_id, request, arrival_idx=self._next_id)
        self._next_id += 1
        self._sequences[seq.seq_id] = seq
        self._enqueue(seq)
        return seq

    def get(self, seq_id: int) -> Sequence | None:
        return self._sequences.get(seq_id)

    def finish(self, seq: Sequence) -> None:
        """Ends a sequence wherever it is (done, aborted, failed); finishing twice is fine."""
        if seq.status is Status.FINISHED:
            return
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self._release_blocks(seq)
        else:
            self.num_waiting -= 1
        seq.status = Status.FINISHED
        if seq.num_output_tokens:
            output_ids = tuple(seq.token_ids[seq.num_prompt_tokens :])
            self._ended.append(Ended(seq.request, output_ids))
        del self._sequences[seq.seq_id]
        if len(self._waiting) > 2 * self.num_waiting + 16:
            # Aborted ones lie in the heap below a head that cannot be admitted: let them go.
            self._waiting = [
                entry for entry in self._waiting if entry[1].status is not Status.FINISHED
            ]
            heapq.heapify(self._waiting)

    def waiting_by_reason(self) -> dict[str, int]:
        """Sequences in the queue by what they wait for; a reason that nobody has is missing."""
        waiting = (seq for _, seq in self._waiting if seq.status is not Status.FINISHED)
        return dict(Counter(self.wait_reason(seq) for seq in waiting))

    def wait_reason(self, seq: Sequence) -> str:
        """Nobody is overtaken, so all wait for what the first one waits for."""
        return "preempted" if seq.num_preemptions else self.blocked_by

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self.num_waiting > 0

    def check(self) -> None:
        """Raise AssertionError where the invariants do not hold (tests, idle engine)."""
        self.pool.check(seq.block_table for seq in self.running)

    # ---- plan ----------------------------------------------------------------------------

    def plan(self) -> BatchPlan:
        """Choose the next step's rows and reserve their slots."""
        self.num_preempted_last = 0
        rows: dict[int, _Row] = {}
        budget = self.config.max_num_batched_tokens
        budget -= self._plan_decode(rows)
        for_prompts = budget - min(self._drafts_wanted(rows), budget // 2)
        used = self._plan_prefill(rows, for_prompts)
        self.blocked_by = "kv_capacity"
        if self.num_preempted_last == 0:
            used += self._admit(rows, for_prompts - used)
        self._plan_drafts(rows, budget - used)
        released, self._released = tuple(self._released), []
        ended, self._ended = tuple(self._ended), []
        self._step_idx += 1
        return BatchPlan(
            step_idx=self._step_idx,
            rows=tuple(self._freeze(row) for row in rows.values()),
            released=released,
            ended=ended,
        )

    def _plan_decode(self, rows: dict[int, _Row]) -> int:
        for seq in list(self.running):
            due = seq.status is Status.RUNNING and seq.num_uncomputed_tokens == 1
            if due and self._make_room(seq, 1, rows):
                rows[seq.seq_id] = _Row(seq, 1, self._wanted_guesses(seq))
        return len(rows)

    def _wanted_guesses(self, seq: Sequence) -> int:
        if not seq.is_decoding or seq.request.drafter == "none":
            return 0
        # The step emits one token more than it accepts guesses.
        return max(0, min(seq.request.max_draft_tokens, seq.num_remaining_tokens - 1))

    def _drafts_wanted(self, rows: dict[int, _Row]) -> int:
        """Guesses to keep budget for. Where K is chosen in the step, K is only the most: then twice
        what was verified lately, so that prompts need not wait for guesses that nobody makes."""
        by_name = by_choice = num_rows = 0
        for row in rows.values():
            if row.seq.request.drafter == "auto":
                by_choice += row.num_wanted
                num_rows += row.num_wanted > 0
            else:
                by_name += row.num_wanted
        return by_name + min(by_choice, max(num_rows, int(2 * self._recent_guesses)))

    def note_guesses(self, num_verified: int) -> None:
        """How many guesses a step verified for rows that chose K themselves."""
        self._recent_guesses = max(float(num_verified), 0.9 * self._recent_guesses)

    def _plan_drafts(self, rows: dict[int, _Row], budget: int) -> None:
        guessing = [row for row in rows.values() if row.num_wanted]
        for num_before, row in enumerate(guessing):
            # An even share of what is left: what one row does not want the others may have.
            share = -(-budget // (len(guessing) - num_before))
            room = min(share, self._free_slots_after(row.seq, row.num_tokens))
            wanted = min(row.num_wanted, room)
            if wanted > 0:
                self._extend(row.seq, row.num_tokens + wanted)
                row.num_draft_tokens = wanted
                budget -= wanted

    def _plan_prefill(self, rows: dict[int, _Row], budget: int) -> int:
        used = 0
        for seq in list(self.running):
            if seq.status is not Status.RUNNING or seq.num_uncomputed_tokens <= 1:
                continue
            chunk = self._chunk_of(seq, budget - used, rows)
            if chunk <= 0:
                break
            if self._make_room(seq, chunk, rows):
                rows[seq.seq_id] = _Row(seq, chunk)
                used += chunk
        return used

    def _chunk_of(self, seq: Sequence, budget: int, rows: Mapping[int, _Row]) -> int:
        """How many tokens of a prompt the step computes; 0 where there is no budget."""
        chunk = min(seq.num_uncomputed_tokens, budget, self.config.max_prefill_chunk)
        if seq.num_unscored_tokens:
            num_scored = sum(row.num_scored for row in rows.values())
            chunk = min(chunk, max(1, MAX_SCORED_TOKENS - num_scored))
        return chunk

    def _admit(self, rows: dict[int, _Row], budget: int) -> int:
        used = 0
        while len(self.running) < self.config.max_num_seqs:
            if used >= budget:
                self.blocked_by = "token_budget"
                return used
            seq = self._peek_waiting()
            if seq is None:
                break
            hits = self._prefix_hits(seq)
            if not self._fits(seq, hits):
                self.blocked_by = "kv_capacity"
                return used  # no overtaking: the next one would starve it
            heapq.heappop(self._waiting)
            self.num_waiting -= 1
            self._start(seq, hits)
            chunk = self._chunk_of(seq, budget - used, rows)
            self._extend(seq, chunk)
            rows[seq.seq_id] = _Row(seq, chunk)
            used += chunk
        self.blocked_by = "admission"
        return used

    def _freeze(self, row: _Row) -> RowPlan:
        seq = row.seq
        return RowPlan(
            seq_id=seq.seq_id,
            request=seq.request,
            history=seq.token_ids,
            start=seq.num_computed_tokens,
            num_tokens=row.num_tokens,
            max_draft_tokens=row.num_draft_tokens,
            samples=seq.num_computed_tokens + row.num_tokens == seq.num_tokens,
            num_scored=row.num_scored,
            is_prefill=not seq.is_decoding,
            block_table=tuple(seq.block_table),
            draft_kv_lens=seq.draft_kv_lens,  # replaced in commit, never written into
        )

    # ---- commit --------------------------------------------------------------------------

    def commit_row(
        self, row: RowPlan, token_ids: Seq[int], draft_kv_lens: Mapping[str, int]
    ) -> None:
        """Append what survived the stop conditions, and keep exactly the KV that is valid.

        token_ids: emitted and kept; all but the last have KV (they were accepted guesses).
        """
        seq = self._sequences.get(row.seq_id)
        if seq is None or seq.status is not Status.RUNNING:
            return
        seq.token_ids.extend(token_ids)
        seq.num_computed_tokens = row.start + row.num_tokens + max(0, len(token_ids) - 1)
        filled_before = seq.draft_kv_lens
        seq.draft_kv_lens = {
            name: min(kv_len, seq.num_computed_tokens) for name, kv_len in draft_kv_lens.items()
        }
        self._trim(seq)
        if self.config.enable_prefix_caching:
            self._register(seq, row.start, filled_before)

    def _trim(self, seq: Sequence) -> None:
        """Return the blocks that only rejected guesses used."""
        keep = self.pool.blocks_for(seq.num_computed_tokens)
        if keep == len(seq.block_table):
            return
        surplus = seq.block_table[keep:]
        del seq.block_table[keep:]
        self.pool.release(surplus)

    def _register(
        self, seq: Sequence, computed_before: int, filled_before: Mapping[str, int]
    ) -> None:
        size = self.config.block_size
        first, num_full = computed_before // size, seq.num_computed_tokens // size
        if first < num_full:
            hashes = seq.block_hashes(num_full, size)
            for at in range(first, num_full):
                self.pool.register(seq.block_table[at], hashes[at])
        for name, kv_len in seq.draft_kv_lens.items():
            first = filled_before.get(name, 0) // size
            self.pool.mark_filled(seq.block_table[first : kv_len // size], name)

    # ---- blocks --------------------------------------------------------------------------

    def _blocks_missing(self, seq: Sequence, num_new: int) -> int:
        needed = self.pool.blocks_for(seq.num_computed_tokens + num_new)
        return max(0, needed - len(seq.block_table))

    def _extend(self, seq: Sequence, num_new: int) -> None:
        seq.block_table += self.pool.allocate(self._blocks_missing(seq, num_new))

    def _free_slots_after(self, seq: Sequence, num_new: int) -> int:
        """Slots for guesses beyond num_new tokens, using only blocks that hold nothing."""
        owned = len(seq.block_table) + self.pool.num_free
        return owned * self.config.block_size - seq.num_computed_tokens - num_new

    def _make_room(self, seq: Sequence, num_new: int, rows: dict[int, _Row]) -> bool:
        """Reserve slots, preempting the lowest-priority newest others; False: seq must wait."""
        while self._blocks_missing(seq, num_new) > self.pool.num_available:
            victim = self.running[-1]
            if victim is seq:
                if len(self.running) > 1 and seq.num_uncomputed_tokens > 1:
                    return False  # a prompt waits for others to finish, keeping what it has
                self._preempt(seq, rows)
                return False
            self._preempt(victim, rows)
        self._extend(seq, num_new)
        return True

    def _preempt(self, seq: Sequence, rows: dict[int, _Row]) -> None:
        rows.pop(seq.seq_id, None)
        self.running.remove(seq)
        self._release_blocks(seq)
        seq.num_computed_tokens = 0
        seq.draft_kv_lens = {}
        seq.num_preemptions += 1
        self.num_preempted_last += 1
        self._enqueue(seq)

    def _release_blocks(self, seq: Sequence) -> None:
        self.pool.release(seq.block_table)
        seq.block_table = []
        self._released.append(seq.seq_id)

    # ---- admission -----------------------------------------------------------------------

    def _enqueue(self, seq: Sequence) -> None:
        seq.status = Status.WAITING
        self.num_waiting += 1
        heapq.heappush(self._waiting, (seq.order, seq))

    def _peek_waiting(self) -> Sequence | None:
        while self._waiting and self._waiting[0][1].status is Status.FINISHED:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _prefix_hits(self, seq: Sequence) -> list[int]:
        if not self.config.enable_prefix_caching or seq.num_unscored_tokens:
            return []  # cached blocks have no logits
        # At least one token must be computed: its logits choose the next token.
        num_full = (seq.num_tokens - 1) // self.config.block_size
        return self.pool.find(seq.block_hashes(num_full, self.config.block_size))

    def _fits(self, seq: Sequence, hits: list[int]) -> bool:
        """Whether the whole of seq fits beside what running prompts still need."""
        if not self.running:
            return True  # admission.py has checked that any one sequence fits the pool
        num_tokens = seq.num_tokens + 1
        if seq.num_preemptions:
            # It would only be thrown out again: wait until its longest form fits.
            num_tokens = seq.num_prompt_tokens + seq.request.max_tokens
        promised = sum(
            self._blocks_missing(other, other.num_uncomputed_tokens) for other in self.running
        )
        available = self.pool.num_available - self.pool.num_evictable(hits) - promised
        return self.pool.blocks_for(num_tokens) - len(hits) <= available

    def _start(self, seq: Sequence, hits: list[int]) -> None:
        size = self.config.block_size
        self.pool.acquire_cached(hits)
        seq.block_table = list(hits)
        seq.num_computed_tokens = len(hits) * size
        seq.draft_kv_lens = {
            name: count * size for name, count in self.pool.num_filled(hits).items()
        }
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = seq.num_computed_tokens
        seq.status = Status.RUNNING
        self.running.append(seq)
        self.running.sort(key=lambda other: other.order)

"""The invariants of the design, checked after every random step of pool and scheduler."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from specserve.scheduler import Scheduler
from specserve.sequence import Sequence, Status
from specserve.types import BatchPlan
from tests.build import a_config, a_request

BLOCK = 4
POOL = 12


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts and steps at random; a step's results are random too."""

    @initialize(budget=st.integers(4, 24), chunk=st.integers(1, 24), cache=st.booleans())
    def start(self, budget: int, chunk: int, cache: bool) -> None:
        self.config = a_config(
            blocks=POOL,
            block_size=BLOCK,
            budget=budget,
            chunk=chunk,
            max_num_seqs=4,
            prefix_cache=cache,
        )
        self.scheduler = Scheduler(self.config)
        self.sequences: list[Sequence] = []
        self.plan: BatchPlan | None = None

    @rule(
        prompt=st.integers(1, 30),
        max_tokens=st.integers(1, 12),
        draft_tokens=st.integers(0, 7),
        priority=st.integers(-1, 1),
        first_token=st.sampled_from([1, 2, 100]),
        salt=st.sampled_from(["", "a"]),
        drafter=st.sampled_from(["none", "ngram", "small"]),
    )
    def add(
        self,
        prompt: int,
        max_tokens: int,
        draft_tokens: int,
        priority: int,
        first_token: int,
        salt: str,
        drafter: str,
    ) -> None:
        request = a_request(
            prompt,
            max_tokens=max_tokens,
            drafter=drafter,
            draft_tokens=draft_tokens,
            priority=priority,
            first_token=first_token,
            salt=salt,
        )
        self.sequences.append(self.scheduler.add(request))

    @precondition(lambda self: self.plan is None)
    @rule()
    def make_plan(self) -> None:
        plan = self.scheduler.plan()
        self.plan = plan
        size = self.config.block_size
        charged = sum(row.num_tokens + row.max_draft_tokens for row in plan.rows)
        assert charged <= self.config.max_num_batched_tokens
        assert len(plan.rows) <= self.config.max_num_seqs
        written: list[tuple[int, int]] = []
        for row in plan.rows:
            seq = self.scheduler.get(row.seq_id)
            assert seq is not None
            assert row.start == seq.num_computed_tokens
            assert 1 <= row.num_tokens <= seq.num_uncomputed_tokens
            assert row.num_tokens <= self.config.max_prefill_chunk
            assert row.samples == (row.num_tokens == seq.num_uncomputed_tokens)
            assert all(kv_len <= row.start for kv_len in row.draft_kv_lens.values())
            end = row.start + row.num_tokens + row.max_draft_tokens
            assert end <= len(row.block_table) * size
            assert row.max_draft_tokens < max(2, seq.num_remaining_tokens)
            written += [(row.block_table[at // size], at % size) for at in range(row.start, end)]
        assert len(set(written)) == len(written), "two rows write one slot"
        if self.scheduler.running:
            assert plan.rows or self.scheduler.num_preempted_last, "running but nothing planned"

    @precondition(lambda self: self.plan is not None)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        assert self.plan is not None
        for row in self.plan.rows:
            seq = self.scheduler.get(row.seq_id)
            if seq is None:
                continue  # aborted while the step ran
            emitted: list[int] = []
            if row.samples:
                accepted = data.draw(st.integers(0, row.max_draft_tokens))
                emitted = data.draw(
                    st.lists(st.integers(1, 3), min_size=accepted + 1, max_size=accepted + 1)
                )
            draft_kv_lens = {
                name: data.draw(st.integers(0, row.start + row.num_tokens + 2))
                for name in ("ngram", "small")
            }
            before = seq.num_tokens
            self.scheduler.commit_row(row, emitted, draft_kv_lens)
            assert seq.num_tokens == before + len(emitted)
            if row.samples:
                assert seq.num_computed_tokens == seq.num_tokens - 1
            assert max(seq.draft_kv_lens.values()) <= seq.num_computed_tokens
            stopped = emitted and data.draw(st.integers(0, 5)) == 0
            if seq.num_remaining_tokens <= 0 or stopped:
                self.scheduler.finish(seq)
        self.plan = None

    @precondition(lambda self: bool(self.sequences))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        # Also while a plan is out: the engine applies aborts when the step is done, before commit.
        self.scheduler.finish(data.draw(st.sampled_from(self.sequences)))

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.check()
        pool = self.scheduler.pool
        assert pool.num_free + pool.num_cached + pool.num_live == pool.num_total
        live = [seq for seq in self.sequences if seq.status is not Status.FINISHED]
        running = [seq for seq in live if seq.status is Status.RUNNING]
        assert len(running) == len(self.scheduler.running)
        assert len(live) - len(running) == self.scheduler.num_waiting

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        if self.plan is not None:
            for row in self.plan.rows:
                seq = self.scheduler.get(row.seq_id)
                if seq is not None:
                    self.scheduler.finish(seq)
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            for row in self.scheduler.plan().rows:
                seq = self.scheduler.get(row.seq_id)
                assert seq is not None
                self.scheduler.commit_row(row, [5] if row.samples else [], {})
                if seq.num_remaining_tokens <= 0:
                    self.scheduler.finish(seq)
        assert not self.scheduler.has_work, "some request never finishes"
        assert self.scheduler.pool.num_live == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, print_blob=True
)

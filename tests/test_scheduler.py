"""Who computes what: stories and tables over the scheduler, without tensors."""

from __future__ import annotations

import gc
import weakref

import pytest

from specserve.scheduler import Scheduler
from tests.build import a_config, a_request, run_step, run_until_done


def test_a_prompt_is_cut_into_what_decoding_rows_leave_of_the_budget() -> None:
    scheduler = Scheduler(a_config(budget=6))
    scheduler.add(a_request(1, name="A", first_token=100))
    scheduler.add(a_request(1, name="B", first_token=200))
    run_step(scheduler)
    scheduler.add(a_request(10, name="C"))
    table = [{name: row.num_tokens for name, row in run_step(scheduler).items()} for _ in range(3)]
    assert table == [
        {"A": 1, "B": 1, "C": 4},
        {"A": 1, "B": 1, "C": 4},
        {"A": 1, "B": 1, "C": 2},
    ]


def test_only_the_chunk_that_reaches_the_last_token_samples() -> None:
    scheduler = Scheduler(a_config(chunk=4))
    scheduler.add(a_request(9, name="A"))
    assert [run_step(scheduler)["A"].samples for _ in range(4)] == [False, False, True, True]


def test_guesses_are_charged_to_the_budget_and_leave_half_for_a_waiting_prompt() -> None:
    scheduler = Scheduler(a_config(budget=9))
    scheduler.add(a_request(1, name="A", drafter="ngram", draft_tokens=7, max_tokens=50))
    run_step(scheduler)
    assert run_step(scheduler)["A"].max_draft_tokens == 7
    scheduler.add(a_request(20, name="B"))
    rows = run_step(scheduler)
    assert (rows["A"].max_draft_tokens, rows["B"].num_tokens) == (4, 4)


def test_a_prompt_waits_for_no_guesses_that_nobody_makes() -> None:
    scheduler = Scheduler(a_config(budget=33))
    scheduler.add(a_request(1, name="A", drafter="auto", draft_tokens=15, max_tokens=90))
    run_step(scheduler)
    scheduler.add(a_request(90, name="B"))
    scheduler.note_guesses(0)
    rows = run_step(scheduler)
    assert (rows["A"].max_draft_tokens, rows["B"].num_tokens) == (1, 31)
    scheduler.note_guesses(6)
    rows = run_step(scheduler)
    assert (rows["A"].max_draft_tokens, rows["B"].num_tokens) == (12, 20)


def test_a_budget_too_small_for_all_guesses_is_shared_evenly() -> None:
    scheduler = Scheduler(a_config(budget=3 + 3 * 4))
    for name in "ABC":
        scheduler.add(a_request(1, name=name, drafter="ngram", draft_tokens=7, max_tokens=50))
    run_step(scheduler)
    assert [row.max_draft_tokens for row in run_step(scheduler).values()] == [4, 4, 4]


@pytest.mark.parametrize(("max_tokens", "drafted"), [(3, [1]), (4, [2, 1]), (5, [3, 2, 1])])
def test_guesses_never_reach_past_max_tokens(max_tokens: int, drafted: list[int]) -> None:
    scheduler = Scheduler(a_config())
    scheduler.add(a_request(2, name="A", drafter="ngram", draft_tokens=5, max_tokens=max_tokens))
    run_step(scheduler)
    seen = []
    while scheduler.has_work:
        seen.append(run_step(scheduler)["A"].max_draft_tokens)
    assert seen == [*drafted, 0]


def test_lookahead_shrinks_before_anybody_is_preempted() -> None:
    scheduler = Scheduler(a_config(blocks=4, block_size=4, prefix_cache=False))
    scheduler.add(a_request(5, name="A", drafter="ngram", draft_tokens=7, max_tokens=11))
    scheduler.add(a_request(5, name="B", drafter="ngram", draft_tokens=7, max_tokens=11))
    run_step(scheduler)
    rows = run_step(scheduler)
    assert set(rows) == {"A", "B"}
    # Two blocks each: five tokens computed, one known token, so two slots are left for guesses.
    assert [row.max_draft_tokens for row in rows.values()] == [2, 2]
    assert scheduler.num_preempted_last == 0


def test_guesses_take_no_block_that_a_prompt_could_use() -> None:
    """The first token of a long prompt comes as early beside wrong guesses as without them."""
    steps = {}
    for draft_tokens in (0, 15):
        scheduler = Scheduler(a_config(blocks=16, block_size=4, chunk=4, prefix_cache=False))
        for name in ("A1", "A2", "A3"):
            request = a_request(
                4, name=name, drafter="ngram", draft_tokens=draft_tokens, max_tokens=40
            )
            scheduler.add(request)
        run_step(scheduler)
        long = scheduler.add(a_request(28, name="B", max_tokens=4))
        steps[draft_tokens] = 0
        while long.num_output_tokens == 0:
            run_step(scheduler)
            steps[draft_tokens] += 1
    assert steps[15] == steps[0]


def test_guesses_preempt_nobody() -> None:
    preemptions = {}
    for draft_tokens in (0, 15):
        scheduler = Scheduler(a_config(blocks=13, block_size=4, prefix_cache=False))
        first = scheduler.add(
            a_request(
                8, name="A", drafter="ngram", draft_tokens=draft_tokens, max_tokens=24, priority=1
            )
        )
        run_step(scheduler)
        second = scheduler.add(a_request(24, name="B", max_tokens=4))
        run_until_done(scheduler)
        preemptions[draft_tokens] = first.num_preemptions + second.num_preemptions
    assert preemptions[15] == preemptions[0]


def test_aborted_requests_do_not_pile_up_behind_a_head_that_cannot_be_admitted() -> None:
    scheduler = Scheduler(a_config(max_num_seqs=1))
    scheduler.add(a_request(4, name="running", max_tokens=10_000))
    run_step(scheduler)
    scheduler.add(a_request(4, name="head", priority=-1))
    gone = [weakref.ref(scheduler.add(a_request(4, name=f"{idx}"))) for idx in range(500)]
    for ref in gone:
        seq = ref()
        assert seq is not None
        scheduler.finish(seq)
    del seq
    run_step(scheduler)
    gc.collect()
    assert sum(ref() is not None for ref in gone) < 30
    assert scheduler.num_waiting == 1


def test_those_who_wait_are_counted_by_their_reason() -> None:
    scheduler = Scheduler(a_config(blocks=6, block_size=4, prefix_cache=False))
    assert scheduler.waiting_by_reason() == {}
    scheduler.add(a_request(8, name="A", max_tokens=12))
    second = scheduler.add(a_request(8, name="B", max_tokens=12))
    assert scheduler.waiting_by_reason() == {"admission": 2}
    while second.num_preemptions == 0:
        run_step(scheduler)
    gone = scheduler.add(a_request(8, name="C", max_tokens=12))
    assert scheduler.waiting_by_reason() == {"preempted": 1, "kv_capacity": 1}
    scheduler.finish(gone)
    assert scheduler.waiting_by_reason() == {"preempted": 1}


def test_who_waits_behind_another_waits_for_the_same() -> None:
    scheduler = Scheduler(a_config(blocks=6, block_size=4, prefix_cache=False))
    scheduler.add(a_request(8, name="A", max_tokens=12))
    second = scheduler.add(a_request(8, name="B", max_tokens=12))
    while second.num_preemptions == 0:
        run_step(scheduler)
    third = scheduler.add(a_request(8, name="C", max_tokens=2))
    for _ in range(2):
        run_step(scheduler)
    assert scheduler.wait_reason(second) == "preempted"
    assert scheduler.wait_reason(third) == "kv_capacity"


def test_lookahead_never_evicts_a_reusable_prefix() -> None:
    scheduler = Scheduler(a_config(blocks=4, block_size=4))
    scheduler.add(a_request(9, name="old", max_tokens=1, first_token=50))
    run_until_done(scheduler)
    assert scheduler.pool.num_cached == 2
    scheduler.add(a_request(3, name="A", drafter="ngram", draft_tokens=15, max_tokens=30))
    run_step(scheduler)
    row = run_step(scheduler)["A"]
    assert row.max_draft_tokens == 2 * 4 - 4  # two free blocks, three tokens known, one new
    assert scheduler.pool.num_cached == 2


def test_the_newest_of_the_lowest_priority_is_preempted_and_everybody_finishes() -> None:
    scheduler = Scheduler(a_config(blocks=6, block_size=4, prefix_cache=False))
    first = scheduler.add(a_request(8, name="A", max_tokens=12))
    second = scheduler.add(a_request(8, name="B", max_tokens=12))
    steps = run_until_done(scheduler)
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert first.num_output_tokens == second.num_output_tokens == 12
    assert steps < 40


def test_an_urgent_request_overtakes_in_the_queue_and_is_preempted_last() -> None:
    scheduler = Scheduler(a_config(blocks=6, block_size=4, prefix_cache=False, max_num_seqs=2))
    relaxed = scheduler.add(a_request(8, name="relaxed", max_tokens=12, priority=5))
    urgent = scheduler.add(a_request(8, name="urgent", max_tokens=12, priority=-5))
    assert list(run_step(scheduler)) == ["urgent", "relaxed"]
    run_until_done(scheduler)
    assert (urgent.num_preemptions, relaxed.num_preemptions) == (0, 1)


def test_two_long_requests_that_fit_only_singly_do_not_throw_each_other_out_for_ever() -> None:
    scheduler = Scheduler(a_config(blocks=10, block_size=4, prefix_cache=True))
    first = scheduler.add(a_request(16, name="A", max_tokens=20))
    second = scheduler.add(a_request(16, name="B", max_tokens=20, first_token=100))
    run_until_done(scheduler)
    assert first.num_preemptions + second.num_preemptions <= 2


def test_a_shared_prefix_is_computed_once() -> None:
    scheduler = Scheduler(a_config(block_size=4))
    scheduler.add(a_request(11, name="A", max_tokens=2))
    run_until_done(scheduler)
    again = scheduler.add(a_request(11, name="B", max_tokens=2))
    row = run_step(scheduler)["B"]
    assert (row.start, row.num_tokens, again.num_cached_tokens) == (8, 3, 8)


def test_a_prompt_that_is_wholly_cached_still_computes_one_token() -> None:
    scheduler = Scheduler(a_config(block_size=4))
    scheduler.add(a_request(8, name="A", max_tokens=2))
    run_until_done(scheduler)
    scheduler.add(a_request(8, name="B", max_tokens=2))
    row = run_step(scheduler)["B"]
    assert (row.start, row.num_tokens, row.samples) == (4, 4, True)


def test_another_salt_never_hits() -> None:
    scheduler = Scheduler(a_config(block_size=4))
    scheduler.add(a_request(11, name="A", salt="a", max_tokens=2))
    run_until_done(scheduler)
    other = scheduler.add(a_request(11, name="B", salt="b", max_tokens=2))
    none = scheduler.add(a_request(11, name="C", max_tokens=2))
    run_until_done(scheduler)
    assert (other.num_cached_tokens, none.num_cached_tokens) == (0, 0)


def test_a_rejected_guess_leaves_no_trace_in_the_prefix_cache() -> None:
    scheduler = Scheduler(a_config(block_size=4))
    scheduler.add(a_request(3, name="A", drafter="ngram", draft_tokens=5, max_tokens=3))
    run_step(scheduler)  # emits the 4th token
    run_step(scheduler, accepted=0)  # guesses fill the second block and are rejected
    assert scheduler.pool.num_live == 1  # only rejected guesses were in the second block
    run_until_done(scheduler)
    assert scheduler.pool.num_cached == 1  # tokens 0..3; nothing that was guessed


def test_a_prefix_hit_tells_which_drafters_have_filled_it() -> None:
    scheduler = Scheduler(a_config(block_size=4))
    seq = scheduler.add(a_request(9, name="A", drafter="small", draft_tokens=2, max_tokens=1))
    row = scheduler.plan().rows[0]
    # One drafter has filled one block and a half, another two and more than the target has.
    scheduler.commit_row(row, [7], {"small": 6, "tiny": 12})
    scheduler.finish(seq)
    scheduler.add(a_request(9, name="same", drafter="auto", draft_tokens=2, max_tokens=1))
    scheduler.add(a_request(9, name="none", max_tokens=1, salt="other"))
    rows = {row.request.request_id: row for row in scheduler.plan().rows}
    assert (rows["same"].start, rows["same"].draft_kv_lens) == (8, {"small": 4, "tiny": 8})
    assert (rows["none"].start, rows["none"].draft_kv_lens) == (0, {})


def test_aborting_in_any_state_gives_everything_back_and_may_be_repeated() -> None:
    scheduler = Scheduler(a_config(blocks=8, block_size=4, max_num_seqs=1))
    running = scheduler.add(a_request(9, name="A", max_tokens=20))
    waiting = scheduler.add(a_request(9, name="B", max_tokens=20))
    run_step(scheduler)
    for seq in (waiting, running, running, waiting):
        scheduler.finish(seq)
        scheduler.check()
    assert (scheduler.pool.num_live, scheduler.has_work, scheduler.num_waiting) == (0, False, 0)
    assert scheduler.plan().rows == ()

"""The suffix drafter: the automaton against its definition, what is guessed, who may read what."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specserve.config import EngineConfig
from specserve.drafting import Draft, DraftRow
from specserve.errors import ConfigError
from specserve.types import Request, SamplingParams
from specserve_drafts.suffix import SuffixDrafter, make_suffix
from specserve_drafts.suffix_automaton import ROOT, SuffixAutomaton
from specserve_kernels import native_library, native_suffix
from tests.engines import serving
from tests.logit_rows import a_sampling_request
from tests.test_drafters import resources
from tests.tiny_models import tiny_decoder

# --- the automaton -------------------------------------------------------------------------------

texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def followers(text: Seq[int], run: Seq[int]) -> set[int]:
    """Tokens that ever stood behind a run."""
    n = len(run)
    return {text[at + n] for at in range(len(text) - n) if list(text[at : at + n]) == list(run)}


def longest_repeated_suffix(text: Seq[int]) -> int:
    """Length of the longest suffix that also stands earlier in the text, by definition."""
    for n in range(len(text) - 1, 0, -1):
        if any(list(text[at : at + n]) == list(text[-n:]) for at in range(len(text) - n)):
            return n
    return 0


@given(texts)
def test_the_match_is_the_longest_suffix_that_stood_before(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for end, token_id in enumerate(text, start=1):
        automaton.extend([token_id])
        match_len = longest_repeated_suffix(text[:end])
        assert automaton.match_len == match_len
        if match_len:
            known = automaton.transitions[automaton.match]
            assert set(known) == followers(text[:end], text[end - match_len : end])


@given(texts, texts)
def test_a_walk_through_another_text_holds_the_longest_suffix_known(
    text: list[int], other: list[int]
) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    joined = ",".join(map(str, text))
    state, match_len = ROOT, 0
    for end, token_id in enumerate(other, start=1):
        state, match_len = automaton.step(state, match_len, token_id)
        known = [n for n in range(end + 1) if ",".join(map(str, other[end - n : end])) in joined]
        assert match_len == max(known)
        assert set(automaton.transitions[state]) == followers(text, other[end - match_len : end])


@given(st.lists(st.integers(0, 3), min_size=2, max_size=400))
def test_states_stay_below_twice_the_tokens(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    assert len(automaton.link) <= 2 * len(text)
    assert automaton.num_tokens == len(text)


# --- what is guessed -----------------------------------------------------------------------------


FORMS = [
    pytest.param(False, id="readable"),
    pytest.param(
        True,
        id="compiled",
        marks=pytest.mark.skipif(
            not native_suffix.available(), reason=str(native_library.why_not())
        ),
    ),
]


@pytest.fixture(params=FORMS, scope="module")
def compiled(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def a_request(prompt: Seq[int], **changes: Any) -> Request:
    request = a_sampling_request(tuple(prompt), temperature=0.0)
    return msgspec.structs.replace(request, drafter="suffix", max_draft_tokens=8, **changes)


def guess(
    drafter: SuffixDrafter,
    request: Request,
    history: Seq[int],
    *,
    seq_id: int = 0,
    max_tokens: int = 8,
    width: int = 1,
) -> Draft:
    row = DraftRow(
        seq_id=seq_id,
        request=request,
        history=history,
        num_known=len(history),
        max_tokens=max_tokens,
        kv_len=0,
        block_table=(),
        width=width,
    )
    return drafter.propose([row])[0]


def emit(drafter: SuffixDrafter, request: Request, output: Seq[int], *, seq_id: int = 0) -> None:
    """A whole life: the sequence was asked for once, then it ends."""
    guess(drafter, request, request.prompt_ids, seq_id=seq_id)
    drafter.forget(seq_id)
    drafter.read_output(request, output)


def test_what_followed_the_longest_match_is_guessed(compiled: bool) -> None:
    text = [1, 2, 3, 4, 5, 9, 2, 3, 7, 9, 1, 2, 3]
    draft = guess(SuffixDrafter(compiled=compiled), a_request(text), text, max_tokens=3)
    assert draft.token_ids == (4, 5, 9)  # after 1 2 3, not the later 2 3


def test_of_two_continuations_the_more_frequent_is_guessed(compiled: bool) -> None:
    text = [5, 6, 1, 0, 5, 6, 1, 8, 5, 6, 2, 7, 5, 6]
    assert guess(
        SuffixDrafter(compiled=compiled), a_request(text), text, max_tokens=1
    ).token_ids == (1,)


def test_of_equally_frequent_continuations_the_latest_is_guessed(compiled: bool) -> None:
    text = [5, 6, 1, 0, 5, 6, 2, 0, 5, 6]
    assert guess(
        SuffixDrafter(compiled=compiled), a_request(text), text, max_tokens=1
    ).token_ids == (2,)


def test_a_loop_goes_on_beyond_the_end_of_the_text(compiled: bool) -> None:
    text = [7, 1, 2, 3, 1, 2, 3, 1, 2, 3]
    drafter, request = SuffixDrafter(compiled=compiled), a_request(text)
    assert guess(drafter, request, text, max_tokens=7).token_ids == (1, 2, 3, 1, 2, 3, 1)


def test_a_text_without_repeats_is_not_guessed(compiled: bool) -> None:
    text = list(range(50))
    assert guess(SuffixDrafter(compiled=compiled), a_request(text), text).token_ids == ()


def test_a_tree_holds_the_likeliest_continuations_and_its_parents_come_first(
    compiled: bool,
) -> None:
    text = [5, 6, 1, 8, 5, 6, 1, 9, 5, 6, 2, 7, 5, 6]
    draft = guess(SuffixDrafter(compiled=compiled), a_request(text), text, max_tokens=6, width=2)
    roots = [t for t, parent in zip(draft.token_ids, draft.parents, strict=True) if parent == -1]
    assert roots == [1, 2]
    assert all(parent < idx for idx, parent in enumerate(draft.parents))
    survival = list[float]()
    for score, parent in zip(draft.scores, draft.parents, strict=True):
        survival.append(score * (survival[parent] if parent >= 0 else 1.0))
    assert survival == sorted(survival, reverse=True)


def test_guesses_that_fail_lower_the_score_and_guesses_that_hold_raise_it(
    compiled: bool,
) -> None:
    request = a_request([1, 2, 3, 4, 0, 1, 2])
    scores = {}
    for kind in ("holds", "fails"):
        drafter = SuffixDrafter(compiled=compiled)
        for _ in range(30):
            history = [*request.prompt_ids]
            draft = guess(drafter, request, history, max_tokens=2)
            assert draft.token_ids == (3, 4)
            guess(drafter, request, [*history, *([3, 4, 0] if kind == "holds" else [9])])
            drafter.forget(0)
        scores[kind] = guess(drafter, request, [*request.prompt_ids], max_tokens=1).scores[0]
    assert scores["holds"] > 0.75 > 0.35 > scores["fails"]


def test_state_survives_a_preemption(compiled: bool) -> None:
    text = [1, 2, 3, 4, 1, 2]
    drafter, request = SuffixDrafter(compiled=compiled), a_request(text)
    before = guess(drafter, request, text)
    drafter.forget(0)
    assert guess(drafter, request, text) == before
    assert guess(drafter, request, [*text, 3, 4, 9, 3]).token_ids[:2] == (4, 9)


# --- past outputs, salts, memory -----------------------------------------------------------------


def test_a_past_output_of_the_same_salt_is_guessed(compiled: bool) -> None:
    drafter = SuffixDrafter(compiled=compiled)
    emit(drafter, a_request([1, 2], cache_salt="a"), [10, 11, 12, 13, 14])
    later = a_request([50, 10, 11, 12], cache_salt="a")
    assert guess(drafter, later, [50, 10, 11, 12], seq_id=1).token_ids == (13, 14)


@pytest.mark.parametrize("other", ["b", ""])
def test_text_emitted_under_one_salt_is_never_guessed_under_another(
    other: str, compiled: bool
) -> None:
    drafter = SuffixDrafter(compiled=compiled)
    emit(drafter, a_request([1, 2], cache_salt="a"), [10, 11, 12, 13, 14])
    stranger = a_request([50, 10, 11, 12], cache_salt=other)
    assert guess(drafter, stranger, [50, 10, 11, 12], seq_id=1).token_ids == ()


def test_no_guess_crosses_from_one_past_output_into_the_next(compiled: bool) -> None:
    drafter = SuffixDrafter(compiled=compiled)
    emit(drafter, a_request([1]), [10, 11, 12])
    emit(drafter, a_request([1]), [20, 21, 22], seq_id=1)
    draft = guess(drafter, a_request([50, 10, 11]), [50, 10, 11], seq_id=2)
    assert draft.token_ids == (12,)


def test_prompts_do_not_enter_the_corpus(compiled: bool) -> None:
    drafter = SuffixDrafter(compiled=compiled)
    emit(drafter, a_request([30, 31, 32, 33, 34]), [1])
    assert guess(drafter, a_request([30, 31, 32]), [30, 31, 32], seq_id=1).token_ids == ()


@given(outputs=st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30)), max_size=30))
def test_memory_is_bounded_over_all_salts(outputs: list[tuple[str, int]], compiled: bool) -> None:
    drafter = SuffixDrafter(corpus_tokens=64, compiled=compiled)
    for seq_id, (salt, num_tokens) in enumerate(outputs):
        emit(drafter, a_request([1], cache_salt=salt), list(range(num_tokens)), seq_id=seq_id)
        # One separator per output comes on top of half the budget, once per generation.
        assert drafter.num_corpus_tokens <= 64 + 2


def test_the_latest_past_output_outlives_older_ones(compiled: bool) -> None:
    drafter = SuffixDrafter(corpus_tokens=40, compiled=compiled)
    emit(drafter, a_request([1]), list(range(100, 118)))
    for seq_id in range(1, 4):
        emit(drafter, a_request([1]), list(range(200, 218)), seq_id=seq_id)
    old = guess(drafter, a_request([9, 101, 102]), [9, 101, 102], seq_id=8)
    new = guess(drafter, a_request([9, 201, 202]), [9, 201, 202], seq_id=9)
    assert old.token_ids == ()
    assert new.token_ids[:2] == (203, 204)


def test_without_a_corpus_only_its_own_text_is_read(compiled: bool) -> None:
    drafter = SuffixDrafter(corpus_tokens=0, compiled=compiled)
    emit(drafter, a_request([1, 2]), [10, 11, 12, 13, 14])
    assert guess(drafter, a_request([5, 10, 11]), [5, 10, 11], seq_id=1).token_ids == ()


@pytest.mark.parametrize("argument", ["-1", "many", "", "1.5"])
def test_a_corpus_size_that_is_no_size_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match="suffix:65536"):
        make_suffix(resources("suffix", argument=argument))


# --- a predicted output --------------------------------------------------------------------------


def test_a_predicted_output_is_guessed_from_its_first_token(compiled: bool) -> None:
    request = a_request([1, 2], prediction_ids=(40, 41, 42, 43))
    drafter = SuffixDrafter(compiled=compiled)
    assert guess(drafter, request, [1, 2, 40]).token_ids == (41, 42, 43)


def test_a_predicted_output_is_found_again_after_an_edit(compiled: bool) -> None:
    request = a_request([1, 2], prediction_ids=(40, 41, 42, 43, 44, 45, 46))
    drafter = SuffixDrafter(compiled=compiled)
    history = [1, 2, 40, 41, 99, 43, 44]
    assert guess(drafter, request, history).token_ids == (45, 46)


def test_a_predicted_output_is_not_read_by_other_requests(compiled: bool) -> None:
    drafter = SuffixDrafter(compiled=compiled)
    guess(drafter, a_request([1, 2], prediction_ids=(40, 41, 42, 43)), [1, 2, 40])
    assert guess(drafter, a_request([1, 2]), [1, 2, 40], seq_id=1).token_ids == ()


# --- in the engine -------------------------------------------------------------------------------


async def test_the_output_of_a_preempted_sequence_enters_the_corpus_once(compiled: bool) -> None:
    config = EngineConfig(
        block_size=4,
        num_blocks=6,
        max_model_len=24,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_prefill_chunk=16,
        enable_prefix_caching=False,
    )
    drafter = SuffixDrafter(compiled=compiled)
    model = tiny_decoder(vocab=64, seed=5, dtype=torch.float64)
    async with serving(model, config, drafters={"suffix": drafter}) as served:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        first, second = [
            served.requests(range(8), params, name=name, cache_salt=name)[0] for name in "AB"
        ]
        chunks = await served.run([first, second])
        assert max(chunk.num_preemptions for chunk in chunks) > 0
        # What has ended is told with the next step.
        short = msgspec.structs.replace(params, max_tokens=1)
        await served.run(served.requests([1, 2], short, name="C", cache_salt="C"))
    assert drafter.num_corpus_tokens == 2 * (12 + 1)  # and a separator before each

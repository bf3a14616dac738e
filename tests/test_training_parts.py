"""Pieces of draft training: losses, vocabulary, batches, answers, prompts, cost."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
import torch

from specserve.errors import ConfigError, ModelError
from specserve.tokenizer import Tokenizer
from specserve.training.answers import AnswerStore, Plan, generate
from specserve.training.evaluate import accepted_by_position, cost_of
from specserve.training.heldout import steps_of
from specserve.training.lessons import Document, batches, split
from specserve.training.losses import LOSSES, blend_of, law_of, log_probs_at, loss_of, parts
from specserve.training.prompts import MAKERS, generated_prompts
from specserve.training.self_prompts import ROLES, Said, self_prompts
from specserve.training.vocabulary import coverage, known_flags, most_frequent, offsets
from specserve.types import SamplingParams, SpecStats
from specserve_observability.records import RowRecord, StepRecord
from tests.small_tokenizers import saved, words
from tests.training_world import a_lesson, some_ids

# --- losses ----------------------------------------------------------------------------------


def random_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * 2


def test_overlap_and_kl_are_those_of_the_whole_laws() -> None:
    target, draft, ids = random_logits(7, 30), random_logits(7, 12, seed=1), torch.arange(5, 17)
    found = parts(draft, law_of(target, ids, 12, 0.7), 0.7)
    p, q = torch.softmax(target / 0.7, 1)[:, ids], torch.softmax(draft / 0.7, 1)
    assert torch.allclose(found.overlap, torch.minimum(p, q).sum(1))
    p = p / p.sum(1, keepdim=True)
    assert torch.allclose(found.kl, (p * (p / q).log()).sum(1))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_by_few_rows_are_those_of_plain_operations(temperature: float) -> None:
    """More rows than are taken at a time, an entry twice in a row, and both gradients."""
    plain = random_logits(75, 30).requires_grad_(True)
    fast = plain.detach().clone().requires_grad_(True)
    entries = torch.randint(30, (75, 6), generator=torch.Generator().manual_seed(0))
    weights = random_logits(75, 6, seed=3)
    expected = torch.log_softmax(plain / temperature, dim=1).gather(1, entries)
    found = log_probs_at(fast, entries, temperature)
    assert torch.allclose(found, expected)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    assert plain.grad is not None
    assert fast.grad is not None
    assert torch.allclose(fast.grad, plain.grad)
    assert torch.equal(fast, plain)  # what it was given is left as it was


def test_a_law_knows_where_the_targets_choice_is_beyond_the_draft() -> None:
    target = torch.tensor([[0.0, 5.0, 1.0, 2.0], [0.0, 1.0, 7.0, 2.0]])
    law = law_of(target, torch.tensor([0, 2, 3]), 2, 1.0)
    assert law.is_known.tolist() == [False, True]
    assert law.entries.tolist() == [[2, 1], [1, 2]]  # the draft's own numbers, best first
    assert torch.allclose(law.log_probs[1].exp(), torch.softmax(target[1], 0)[[2, 3]])


@pytest.mark.parametrize("kind", LOSSES)
def test_the_gradient_of_each_loss_is_its_slope(kind: str) -> None:
    target, draft, ids = random_logits(5, 20), random_logits(5, 9, seed=2), torch.arange(3, 12)
    law = law_of(target, ids, 6, 0.7)
    blend = blend_of(parts(draft, law, 0.7).overlap)  # constant, as the definition says

    def total(logits: torch.Tensor) -> torch.Tensor:
        return loss_of(kind, parts(logits, law, 0.7), blend).sum()

    leaf = draft.clone().requires_grad_(True)
    total(leaf).backward()
    assert leaf.grad is not None
    step = 1e-6
    for row in range(5):
        for entry in range(9):
            moved = torch.zeros_like(draft)
            moved[row, entry] = step
            slope = (total(draft + moved) - total(draft - moved)) / (2 * step)
            assert leaf.grad[row, entry] == pytest.approx(float(slope), abs=1e-6)


def test_lk_follows_kl_where_nothing_is_accepted_and_the_overlap_where_much_is() -> None:
    law = law_of(torch.tensor([[9.0, 0.0, 0.0]]), torch.arange(3), 3, 1.0)
    far, near = torch.tensor([[-9.0, 9.0, 0.0]]), torch.tensor([[8.0, 0.0, 0.0]])
    assert float(blend_of(parts(far, law, 1.0).overlap)) > 0.99
    assert float(blend_of(parts(near, law, 1.0).overlap)) < 0.06
    kl = parts(far, law, 1.0).kl
    assert torch.allclose(loss_of("lk", parts(far, law, 1.0)), kl, rtol=0.01)


def test_descending_the_lk_loss_raises_what_is_accepted_to_all_there_is() -> None:
    law = law_of(random_logits(4, 20), torch.arange(9), 9, 0.7)
    reachable = law.log_probs.exp().sum(1)
    logits = torch.zeros(4, 9, dtype=torch.float64, requires_grad=True)
    for _ in range(400):
        loss_of("lk", parts(logits, law, 0.7)).sum().backward()
        assert logits.grad is not None
        with torch.no_grad():
            logits -= 0.5 * logits.grad
            logits.grad = None
    assert (parts(logits, law, 0.7).overlap > 0.9 * reachable).all()


# --- vocabulary ------------------------------------------------------------------------------


def test_the_most_frequent_tokens_are_kept_in_the_order_of_their_ids() -> None:
    said = [[9, 9, 9, 4], [4, 7, 9]]
    ids = most_frequent(said, 3, vocab_size=12, always=[11])
    assert ids.tolist() == [4, 9, 11]
    assert (torch.arange(3) + offsets(ids)).tolist() == ids.tolist()
    assert known_flags(ids, 12).nonzero()[:, 0].tolist() == ids.tolist()
    assert coverage(said, ids) == pytest.approx(6 / 7)


# --- batches ---------------------------------------------------------------------------------


def documents(count: int, per_prompt: int = 2) -> list[Document]:
    return [
        Document(
            doc_id=idx,
            prompt_idx=idx // per_prompt,
            temperature=0.0,
            prompt_len=3,
            token_ids=tuple(range(5 + idx * 7 % 23)),
        )
        for idx in range(count)
    ]


def test_an_epoch_is_every_text_once_in_batches_that_fit() -> None:
    every = documents(61)
    found = batches(every, batch_tokens=64, seed=1, epoch=0)
    assert Counter(one.doc_id for group in found for one in group) == Counter(range(61))
    for group in found:
        assert len(group) * max(len(one.token_ids) for one in group) <= 64
    assert found == batches(every, batch_tokens=64, seed=1, epoch=0)
    assert found != batches(every, batch_tokens=64, seed=1, epoch=1)


def test_no_prompt_is_both_learned_from_and_held_out() -> None:
    learn_from, held_out = split(documents(60, per_prompt=3), held_out=0.2, seed=4)
    assert len({one.prompt_idx for one in held_out}) == 4
    assert len(learn_from) + len(held_out) == 60
    assert not {one.prompt_idx for one in learn_from} & {one.prompt_idx for one in held_out}


def test_a_guess_is_about_the_place_it_would_stand_at() -> None:
    """Prompt of 2 and answer of 4: three places; the second guess from place 0 is about place 1."""
    lesson = a_lesson([([1, 2, 3, 4, 5, 6], 2), ([1, 2, 3], 1)], some_ids(40))
    assert lesson.num_places.tolist() == [3, 1]
    assert lesson.answers.tolist() == [[4, 5, 6], [3, 0, 0]]
    assert [part.tolist() for part in lesson.places(0)] == [[0, 0, 0, 1], [0, 1, 2, 0]]
    assert [part.tolist() for part in lesson.places(1)] == [[0, 0], [1, 2]]


def test_steps_are_counted_as_they_would_follow_one_another() -> None:
    assert steps_of([0, 0, 0]) == 3
    assert steps_of([2, 9, 9, 0]) == 2
    assert steps_of([1, 5, 4, 0, 0, 0, 0]) == 2


# --- answers ---------------------------------------------------------------------------------

PROMPTS = [[1, 2], [3], [4, 5, 6]]


def a_plan(temperatures: Seq[float] = (0.0, 0.7), seed: int = 0) -> Plan:
    return Plan(PROMPTS, temperatures=temperatures, max_answer=6, max_length=20, seed=seed)


def echo(prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> list[tuple[int, ...]]:
    """An answer that depends on what an engine's answer depends on."""
    found = []
    for ids, one in zip(prompts, params, strict=True):
        assert one.seed is not None
        noise = one.seed % 50 if one.temperature else 0
        found.append((*ids, noise, *range(sum(ids) % 3)))
    return found


def test_answers_that_were_interrupted_end_up_the_same(tmp_path: Path) -> None:
    whole = generate(a_plan(), AnswerStore(tmp_path / "a"), echo, num_tokens=60, round_size=4)
    rounds = 0

    def breaks(prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> list[tuple[int, ...]]:
        nonlocal rounds
        rounds += 1
        if rounds == 3:
            raise KeyboardInterrupt
        return echo(prompts, params)

    store = AnswerStore(tmp_path / "b")
    with pytest.raises(KeyboardInterrupt):
        generate(a_plan(), store, breaks, num_tokens=60, round_size=4)
    assert store.num_rounds == 2
    told: list[int] = []
    rest = generate(a_plan(), store, echo, num_tokens=60, round_size=4, progress=told.append)
    assert rest == whole == store.load()
    assert sum(told) == sum(len(one.answer_ids) for one in whole) >= 60
    other = AnswerStore(tmp_path / "c")
    assert generate(a_plan(seed=1), other, echo, num_tokens=60, round_size=4) != whole


def test_prompts_take_turns_and_are_never_asked_the_same_twice(tmp_path: Path) -> None:
    asked = [a_plan().at(number) for number in range(12)]
    assert [prompt_idx for prompt_idx, _, _ in asked] == [0, 1, 2] * 4
    assert [params.temperature for _, _, params in asked[:6]] == [0, 0.7, 0, 0.7, 0, 0.7]
    assert all(params.temperature > 0 for _, _, params in asked[6:])
    assert len({params.seed for _, _, params in asked}) == 12
    greedy = a_plan(temperatures=[0.0])
    found = generate(greedy, AnswerStore(tmp_path), echo, num_tokens=10**6, round_size=2)
    assert len(found) == 3  # greedy answers come once
    assert generate(greedy, AnswerStore(tmp_path), echo, num_tokens=10**6, round_size=2) == found


def test_long_prompts_are_left_out_and_having_no_other_is_an_error() -> None:
    plan = Plan([[1] * 50, [2]], temperatures=[0], max_answer=30, max_length=20, seed=0)
    assert plan.num_prompts == 1
    assert plan.at(0)[2].max_tokens == 19
    with pytest.raises(ConfigError, match="--max-length"):
        Plan([[1] * 50], temperatures=[0], max_answer=6, max_length=20, seed=0)


# --- prompts ---------------------------------------------------------------------------------


def test_thousands_of_different_prompts_of_every_kind_can_be_made() -> None:
    found = generated_prompts(6000, seed=0)
    assert len({text for _, text in found}) == 6000
    counts = Counter(category for category, _ in found)
    assert set(counts) == set(MAKERS)
    assert min(counts.values()) > 200
    assert all("{" not in text.replace("{}", "") for _, text in found)
    assert found == generated_prompts(6000, seed=0)
    assert found[:100] != generated_prompts(100, seed=1)


# --- evaluation ------------------------------------------------------------------------------


def test_acceptance_at_a_position_counts_steps_that_got_there() -> None:
    stats = [SpecStats(per_step_drafted=(3, 3, 1), per_step_accepted=(3, 1, 0))]
    assert accepted_by_position(stats, 3) == (2 / 3, 1 / 2, 1.0)


def a_step(draft: float, rest: float, num_guesses: int, *, num_rows: int = 1) -> StepRecord:
    row = RowRecord("r", None, "eagle3" if num_guesses else "none", 1, num_guesses, 0, 1)
    return StepRecord(
        step_idx=0, plan_start=0, plan_end=0, draft_start=1, forward_start=1 + draft,
        verify_start=1 + draft + rest, verify_end=1 + draft + rest, commit_end=9,
        rows=(row,) * num_rows, num_running=1, num_waiting=0, blocks_free=0, blocks_cached=0,
        blocks_live=0, token_budget=0, num_preempted=0,
    )  # fmt: skip


def test_the_cost_of_a_guess_is_relative_to_a_step_without_any() -> None:
    steps = [a_step(0.0, 0.010, 0), a_step(0.004, 0.012, 4), a_step(9.0, 9.0, 4, num_rows=2)]
    cost = cost_of(steps)
    assert cost is not None
    assert cost.target_step == pytest.approx(0.010)
    assert cost.draft_per_token == pytest.approx(0.001)
    assert cost.relative == pytest.approx(0.1)
    assert cost_of(steps[1:]) is None


# --- prompts of the target's own -------------------------------------------------------------


def a_chat_tokenizer(directory: Path) -> Tokenizer:
    template = "{% for message in messages %}user : {{ message.content }} end{% endfor %}"
    return saved(words("?", "user", ":", "end"), directory, chat_template=template)


def test_the_target_asks_itself_in_every_role_and_unended_or_old_questions_are_left_out(
    tmp_path: Path,
) -> None:
    tokenizer = a_chat_tokenizer(tmp_path)
    asked: list[tuple[tuple[int, ...], SamplingParams]] = []

    def ask(prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> list[Said]:
        first = len(asked)
        asked.extend((tuple(ids), one) for ids, one in zip(prompts, params, strict=True))
        kinds = (("number {}", True), ("", True), ("One {}. Two. And thr", False))
        return [
            Said(kinds[(at + at // 18) % 3][0].format(at % 200), kinds[(at + at // 18) % 3][1])
            for at in range(first, len(asked))
        ]

    found = self_prompts(tokenizer, ask, 100, seed=5)
    assert len(found) == len({text for _, text in found}) == 100
    assert {category for category, _ in found} == {role.category for role in ROLES}
    for category, text in found:
        role = next(role for role in ROLES if role.category == category)
        assert "thr" not in text
        if role.is_text:  # a task around a text, whole or up to its last sentence
            assert re.search(r"number \d+|One \d+\. Two\.", text)
            assert text not in ("number 0", "One 0. Two.")
        else:
            assert re.fullmatch(r"number \d+", text)
    assert asked[0][0] == (1, 2)  # where a person's words would follow
    assert len({ids for ids, _ in asked}) == len({role.system for role in ROLES})
    assert {params.max_tokens for _, params in asked} == {role.longest for role in ROLES}
    assert len({params.seed for _, params in asked}) == len(asked)
    assert self_prompts(tokenizer, ask, 1, seed=5)  # and again


def test_a_target_that_never_ends_its_own_questions_is_given_up(tmp_path: Path) -> None:
    def ask(prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> list[Said]:
        return [Said("on and on", False) for _ in prompts]

    with pytest.raises(ModelError, match="only 0 were ended"):
        self_prompts(a_chat_tokenizer(tmp_path), ask, 10, seed=0)

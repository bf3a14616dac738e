"""Trees of a draft model: what is guessed, and that its KV is right after any verdict on them.

The oracle is a drafter that begins here: whatever the past, both must guess the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from specserve.drafting import Draft, DraftRow, Outcome, is_chain
from specserve.models.decoder import Decoder
from specserve_drafts.draft_model import DraftModelDrafter
from specserve_kernels.interface import PagedBatch
from tests.logit_rows import a_sampling_request
from tests.tiny_models import tiny_decoder

V, BLOCK, NUM_BLOCKS = 64, 4, 96
PROMPTS = ([5, 9, 5, 9, 5], [1, 2], list(range(20, 33)))


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.set_num_threads(1)
    return tiny_decoder(vocab=V, seed=3)


def a_drafter(model: Decoder, **changes: Any) -> DraftModelDrafter:
    given: dict[str, Any] = {"vocab_size": V, "num_blocks": NUM_BLOCKS, "block_size": BLOCK}
    return DraftModelDrafter(model, **(given | changes))


class Running:
    """One sequence; blocks shuffled, so that a wrong slot is another's."""

    def __init__(self, seq_id: int, prompt: Seq[int], **request: Any) -> None:
        blocks = list(range(NUM_BLOCKS))
        random.Random(0).shuffle(blocks)
        self.seq_id = seq_id
        self.blocks = tuple(blocks[seq_id::3])
        self.history = list(prompt)
        self.request = a_sampling_request(
            prompt, **({"temperature": 0.0, "seed": seq_id} | request)
        )
        self.kv_len = 0

    def row(self, max_tokens: int, width: int, kv_len: int | None = None) -> DraftRow:
        return DraftRow(
            seq_id=self.seq_id,
            request=self.request,
            history=self.history,
            num_known=len(self.history),
            max_tokens=max_tokens,
            kv_len=self.kv_len if kv_len is None else kv_len,
            block_table=self.blocks,
            width=width,
        )

    def accept(self, draft: Draft, path: Seq[int], last: int) -> Outcome:
        """The target accepted the nodes of `path` and then said `last`."""
        emitted = [*(draft.token_ids[node] for node in path), last]
        outcome = Outcome(
            seq_id=self.seq_id,
            request=self.request,
            start=len(self.history) - 1,
            token_ids=(self.history[-1], *emitted),
            num_computed=len(emitted),
            drafter="draft_model",
            num_drafted=len(draft.token_ids),
            num_accepted=len(path),
        )
        self.kv_len = draft.kv_len  # what the runner knows: history, and of a chain what was fed
        if is_chain(draft) and path:
            self.kv_len += min(len(path), len(draft.token_ids) - 1)
        self.history += emitted
        return outcome


def a_path(draft: Draft, chance: random.Random, rate: float) -> list[int]:
    """A random walk down the tree, never favouring first children."""
    path: list[int] = []
    while chance.random() < rate:
        at = path[-1] if path else -1
        children = [node for node, parent in enumerate(draft.parents) if parent == at]
        if not children:
            break
        path.append(chance.choice(children))
    return path


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("seed", range(3))
def test_after_any_verdict_it_guesses_as_one_that_begins_here(
    model: Decoder, seed: int, temperature: float
) -> None:
    drafter, chance = a_drafter(model), random.Random(seed)
    batch = [Running(idx, prompt, temperature=temperature) for idx, prompt in enumerate(PROMPTS)]
    num_branching = 0
    for _ in range(8):
        asked = [(chance.choice([0, 3, 8, 15]), chance.choice([1, 2, 4])) for _ in batch]
        drafts = drafter.propose(
            [running.row(*ask) for running, ask in zip(batch, asked, strict=True)]
        )
        fresh = a_drafter(model).propose(
            [running.row(*ask, kv_len=0) for running, ask in zip(batch, asked, strict=True)]
        )
        for draft, expected in zip(drafts, fresh, strict=True):
            assert (draft.token_ids, draft.parents) == (expected.token_ids, expected.parents)
            assert draft.scores == pytest.approx(expected.scores)
            num_branching += not is_chain(draft)
        outcomes = [
            running.accept(draft, a_path(draft, chance, 0.7), chance.randrange(V))
            for running, draft in zip(batch, drafts, strict=True)
        ]
        if chance.random() < 0.8:  # a drafter on the bench is told nothing
            drafter.observe(outcomes)
    assert num_branching > 3


def test_what_was_accepted_of_a_tree_is_not_fed_again(model: Decoder) -> None:
    fed: list[int] = []
    drafter = a_drafter(Counting(model, fed))
    running = Running(0, PROMPTS[0])
    (draft,) = drafter.propose([running.row(15, 4)])
    second = next(
        node
        for node, parent in enumerate(draft.parents)
        if parent >= 0 and node in draft.parents and node > 0
    )
    path = [draft.parents[second], second]
    while draft.parents[path[0]] >= 0:
        path.insert(0, draft.parents[path[0]])
    drafter.observe([running.accept(draft, path, 7)])
    fed.clear()
    drafter.propose([running.row(0, 1)])
    assert fed == [1]  # the last token alone


class Counting:
    """A model that notes how many tokens each forward was given."""

    def __init__(self, model: Decoder, fed: list[int]) -> None:
        self._model = model
        self._fed = fed
        self.vocab_size, self.dtype = model.vocab_size, model.dtype
        self.new_kv_cache = model.new_kv_cache
        self.kv_bytes_per_token = model.kv_bytes_per_token

    def forward(self, input_ids: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        self._fed.append(len(input_ids))
        return self._model.forward(input_ids, *rest, **options)


def greedy_logits(model: Decoder, ids: Seq[int]) -> torch.Tensor:
    """[V] of a plain forward."""
    batch = PagedBatch((0, len(ids)), (0,), (tuple(range(16)),), (None,), BLOCK)
    return model.forward(
        torch.tensor(ids),
        torch.arange(len(ids)),
        batch,
        model.new_kv_cache(16, BLOCK),
        [len(ids) - 1],
    )[0]


def test_a_trees_nodes_have_the_models_best_continuations_as_children(model: Decoder) -> None:
    running = Running(0, PROMPTS[0])
    (draft,) = a_drafter(model).propose([running.row(15, 4)])
    assert len(draft.token_ids) == 15
    paths: list[list[int]] = []
    families: dict[tuple[int, ...], list[int]] = {}
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        before = paths[parent] if parent >= 0 else []
        families.setdefault(tuple(before), []).append(token_id)
        paths.append([*before, token_id])
    assert max(map(len, paths)) > 2
    for before, family in families.items():
        best = greedy_logits(model, [*running.history, *before]).topk(4).indices.tolist()
        assert family == best[: len(family)]
    assert all(
        draft.scores[node] * 1.0 <= 1.0 and score > 0 for node, score in enumerate(draft.scores)
    )


def test_a_tree_keeps_its_likeliest_nodes(model: Decoder) -> None:
    """Fewer nodes are a part of more: none is kept whose path is less likely than a dropped one."""
    running = Running(0, PROMPTS[0])
    reach = []
    for max_tokens in (6, 15):
        (draft,) = a_drafter(model).propose([running.row(max_tokens, 4)])
        paths: list[tuple[int, ...]] = []
        odds: list[float] = []
        for token_id, parent, score in zip(
            draft.token_ids, draft.parents, draft.scores, strict=True
        ):
            paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
            odds.append(score * (odds[parent] if parent >= 0 else 1))
        reach.append(dict(zip(paths, odds, strict=True)))
    few, many = reach
    dropped = [odds for path, odds in many.items() if path not in few]
    assert min(few.values()) >= max(dropped)


def test_scores_are_the_models_own_probabilities(model: Decoder) -> None:
    running = Running(0, PROMPTS[0])
    (draft,) = a_drafter(model).propose([running.row(4, 1)])
    for idx, (token_id, score) in enumerate(zip(draft.token_ids, draft.scores, strict=True)):
        logits = greedy_logits(model, [*running.history, *draft.token_ids[:idx]])
        assert score == pytest.approx(float(torch.softmax(logits, 0)[token_id]), rel=1e-6)


def test_a_tree_ends_at_the_models_own_length(model: Decoder) -> None:
    running = Running(0, PROMPTS[0])
    drafter = a_drafter(model, max_positions=len(running.history) + 1)
    (draft,) = drafter.propose([running.row(12, 3)])
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    assert max(depths) == 2


def test_a_draft_in_another_dtype_guesses_much_the_same(model: Decoder) -> None:
    single = tiny_decoder(vocab=V, seed=3, dtype=torch.float32)
    rows = [Running(idx, prompt).row(6, 1) for idx, prompt in enumerate(PROMPTS)]
    wide, narrow = a_drafter(model).propose(rows), a_drafter(single).propose(rows)
    assert [draft.token_ids for draft in narrow] == [draft.token_ids for draft in wide]


def assert_guesses_as_one_that_begins_here(drafter: DraftModelDrafter, running: Running) -> None:
    model = tiny_decoder(vocab=V, seed=3)
    (draft,) = drafter.propose([running.row(6, 1)])
    (fresh,) = a_drafter(model).propose([running.row(6, 1, kv_len=0)])
    assert draft.token_ids == fresh.token_ids


def test_a_guess_that_was_fed_but_never_computed_by_the_target_has_no_kv_to_keep(
    model: Decoder,
) -> None:
    """The target said it by itself: its slot went back to the pool with the refused guesses."""
    drafter = a_drafter(model)
    running = Running(0, PROMPTS[2][:12])  # the next position begins a block
    (draft,) = drafter.propose([running.row(8, 2)])
    fed = draft.parents.index(0)  # has children, so its parent was fed
    drafter.observe([running.accept(draft, [], draft.token_ids[draft.parents[fed]])])
    table = list(running.blocks)
    table[3], table[9] = table[9], table[3]
    running.blocks = tuple(table)
    running.accept(Draft(kv_len=running.kv_len), [], 33)  # a step without this drafter
    assert_guesses_as_one_that_begins_here(drafter, running)


def test_news_of_a_step_it_was_not_asked_in_changes_nothing(model: Decoder) -> None:
    drafter = a_drafter(model)
    running = Running(0, PROMPTS[0])
    (draft,) = drafter.propose([running.row(3, 1)])
    kv_len = running.kv_len
    for token_id in (7, 8, draft.token_ids[0]):
        running.accept(draft, [], token_id)  # it heard nothing of these
    drafter.observe([running.accept(Draft(kv_len=kv_len), [], 9)])
    running.kv_len = kv_len
    assert_guesses_as_one_that_begins_here(drafter, running)

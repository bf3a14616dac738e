"""Verification in Triton: the verdicts of the engine's own walk, for chains and trees."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.drafting import Draft
from specserve.sampler import RowError
from specserve.verifier import Verdict, verify, verify_replay
from tests.interpreted_triton import ON_DEVICES
from tests.logit_rows import a_sampling_request
from tests.triton_rows import as_row, choose

from specserve_kernels.triton_kernels import verification  # isort: skip (needs triton)
from specserve.verifier import node_rows  # isort: skip

Question = tuple[Draft, list[int]]  # a draft, and the target's choice at each of its rows


def packed(drafts: list[Draft], device: str) -> verification.Guesses:
    lengths = [1 + len(draft.token_ids) for draft in drafts]
    token_ids = [token for draft in drafts for token in (-1, *draft.token_ids)]
    parents = [row for draft in drafts for row in (-1, *(p + 1 for p in draft.parents))]
    columns = np.cumsum([0, *lengths]).tolist(), token_ids, parents
    return verification.Guesses(
        *(torch.tensor(column, dtype=torch.int32, device=device) for column in columns)
    )


def verdicts_of(drafts: list[Draft], choices: torch.Tensor, max_guesses: int) -> list[Verdict]:
    """The kernel's, read back from its buffer, every field of which is checked to be filled."""
    verdicts = torch.full((len(drafts), 2 * max_guesses + 2), -7, dtype=torch.int32)
    verdicts = verdicts.to(choices.device)
    verification.verify_replay(packed(drafts, str(choices.device)), choices, verdicts)
    found = []
    for count, *fields in verdicts.tolist():
        tokens, path = fields[: max_guesses + 1], fields[max_guesses + 1 :]
        assert set(tokens[count:]) <= {-1}
        assert set(path[max(count - 1, 0) :]) <= {-1}
        accepted = tuple(path[: max(count - 1, 0)])
        found.append(Verdict(token_ids=tuple(tokens[:count]), path=accepted))
    return found


@st.composite
def questions(draw: st.DrawFn) -> Question:
    """Any tree, with ids that are no tokens and twins; few tokens, so that many guesses are right;
    some rows have nothing to choose."""
    num_guesses = draw(st.integers(0, 7))
    chain = draw(st.booleans())
    parents = [idx - 1 if chain else draw(st.integers(-1, idx - 1)) for idx in range(num_guesses)]
    tokens = draw(st.lists(st.integers(-1, 2), min_size=num_guesses, max_size=num_guesses))
    choice = st.one_of(st.integers(0, 2), st.just(-1) if draw(st.booleans()) else st.just(0))
    choices = draw(st.lists(choice, min_size=num_guesses + 1, max_size=num_guesses + 1))
    return Draft(token_ids=tuple(tokens), parents=tuple(parents)), choices


def expected_verdict(draft: Draft, choices: list[int]) -> Verdict:
    try:
        error = RowError("nothing to choose")
        return verify_replay([error if token < 0 else token for token in choices], draft)
    except RowError:
        return Verdict(token_ids=(), path=())


@ON_DEVICES
@settings(max_examples=200, deadline=None)
@given(batch=st.lists(questions(), min_size=1, max_size=4), spare=st.integers(0, 9))
def test_every_sequence_gets_the_engines_verdict(
    device: str, batch: list[Question], spare: int
) -> None:
    choices = torch.tensor([token for _, row in batch for token in row], dtype=torch.int32)
    drafts = [draft for draft, _ in batch]
    most = max(len(draft.token_ids) for draft in drafts) + spare
    actual = verdicts_of(drafts, choices.to(device), most)
    assert actual == [expected_verdict(draft, row) for draft, row in batch]


@ON_DEVICES
@pytest.mark.parametrize("seed", range(4))
def test_from_logits_to_verdicts_a_step_is_the_engines(device: str, seed: int) -> None:
    """Sampling and verification together, right guesses included: what `verify` says of each."""
    rng = np.random.default_rng(seed)
    vocab_size, drafts, requests, rows = 40, [], [], []
    for idx in range(3):
        request = a_sampling_request(
            (1, 2, 3), seed=seed * 10 + idx, temperature=float(rng.choice([0.0, 1.0])),
            presence_penalty=float(rng.choice([0.0, 1.0])), top_k=int(rng.choice([0, 5])),
        )  # fmt: skip
        parents = [int(rng.integers(-1, node)) for node in range(3)]
        tokens = tuple(rng.integers(0, 3, 3).tolist())
        drafts.append(Draft(token_ids=tokens, parents=tuple(parents)))
        requests.append(request)
        rows += [as_row(row, vocab_size) for row in node_rows(request, (1, 2, 3), drafts[-1])]
    logits = torch.from_numpy(rng.standard_normal((12, vocab_size)).astype(np.float32))
    logits[:, :3] += 4.0  # so that guesses are right now and then
    choices = choose(logits.to(device), rows, vocab_size, tile=64)
    actual = verdicts_of(drafts, choices.token_ids, 5)
    expected = [
        verify(request, (1, 2, 3), draft, logits[4 * idx : 4 * idx + 4], vocab_size=vocab_size)
        for idx, (request, draft) in enumerate(zip(requests, drafts, strict=True))
    ]
    assert actual == expected


@ON_DEVICES
def test_a_damaged_root_emits_nothing_and_its_batch_mates_go_on(device: str) -> None:
    draft = Draft(token_ids=(4,), parents=(-1,))
    logits = torch.full((4, 8), -math.inf, device=device)
    logits[2:, 4] = 0.0
    rows = [as_row(row, 8) for row in node_rows(a_sampling_request((1,)), (1,), draft)]
    choices = choose(logits, [*rows, *rows], 8, tile=16)
    assert verdicts_of([draft, draft], choices.token_ids, 1) == [
        Verdict(token_ids=(), path=()),
        Verdict(token_ids=(4, 4), path=(0,)),
    ]

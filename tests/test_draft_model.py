"""The target itself as a draft model: real KV on both sides, so every guess must be accepted.

A guess that is refused here is a wrong slot, a stale key or noise that was not shared. Rows run
through the production runner, several at once, prompts in chunks, blocks shuffled.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from specserve.models.decoder import Decoder
from specserve.runner import ModelRunner
from specserve.speculation.speculator import Speculator
from specserve.target import HostTarget
from specserve.types import BatchPlan, Request, RowPlan
from specserve_drafts.draft_model import DraftModelDrafter
from tests.logit_rows import a_sampling_request
from tests.tiny_models import tiny_decoder

V, BLOCK, NUM_BLOCKS = 64, 4, 96
PROMPTS = ([5, 9, 5, 9, 5], [1], list(range(20, 43)))


class Running:
    """One sequence as the scheduler would keep it."""

    def __init__(self, seq_id: int, request: Request, blocks: Seq[int]) -> None:
        self.seq_id = seq_id
        self.request = request
        self.blocks = tuple(blocks)
        self.history = list(request.prompt_ids)
        self.kv_len = 0
        self.draft_kv_lens: Mapping[str, int] = {}
        self.num_drafted = 0
        self.num_accepted = 0

    def plan(self, chunk: int, max_draft_tokens: int) -> RowPlan:
        num_tokens = min(chunk, len(self.history) - self.kv_len)
        samples = self.kv_len + num_tokens == len(self.history)
        return RowPlan(
            seq_id=self.seq_id,
            request=self.request,
            history=self.history,
            start=self.kv_len,
            num_tokens=num_tokens,
            max_draft_tokens=max_draft_tokens if samples else 0,
            samples=samples,
            is_prefill=len(self.history) - self.kv_len > 1,
            block_table=self.blocks,
            draft_kv_lens=self.draft_kv_lens,
        )

    @property
    def output(self) -> list[int]:
        return self.history[len(self.request.prompt_ids) :]


def decode(
    model: Decoder, draft: Decoder | None, num_guesses: Seq[int], **request: Any
) -> list[Running]:
    """All prompts at once for len(num_guesses) steps, each step with its own K."""
    name = "draft_model" if draft else "none"
    drafter = draft and DraftModelDrafter(
        draft, vocab_size=V, num_blocks=NUM_BLOCKS, block_size=BLOCK, max_catch_up=16
    )
    runner = ModelRunner(
        HostTarget(model, num_blocks=NUM_BLOCKS, block_size=BLOCK, vocab_size=V),
        Speculator({name: drafter} if drafter else {}, vocab_size=V, sharpness=1.0),
    )
    blocks = list(range(NUM_BLOCKS))
    random.Random(0).shuffle(blocks)
    running = [
        Running(
            idx,
            a_sampling_request(prompt, seed=idx, drafter=name, **request),
            blocks[idx * 32 : idx * 32 + 32],
        )
        for idx, prompt in enumerate(PROMPTS)
    ]
    for step_idx, max_draft_tokens in enumerate(num_guesses):
        plans = tuple(seq.plan(5, max_draft_tokens) for seq in running)
        results = runner.execute(BatchPlan(step_idx=step_idx, rows=plans)).rows
        for seq, plan, result in zip(running, plans, results, strict=True):
            assert result.error is None
            seq.history += result.token_ids
            seq.kv_len = plan.start + plan.num_tokens + result.num_accepted
            seq.draft_kv_lens = result.draft_kv_lens
            seq.num_drafted += result.num_draft_tokens
            seq.num_accepted += result.num_accepted
    return running


@pytest.fixture(scope="module")
def target() -> Decoder:
    torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other
    return tiny_decoder(vocab=V, seed=3, dtype=torch.float64)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 20, "top_p": 0.95, "presence_penalty": 1.0},
        {"temperature": 0.7, "verify": "rejection"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "num_guesses", [[3] * 16, [1] * 16, [7, 0, 0, 3, 0, 5, 1, 7] * 2], ids=["3", "1", "changing"]
)
def test_the_target_as_its_own_draft_is_always_right(
    target: Decoder, params: dict[str, Any], num_guesses: list[int]
) -> None:
    for seq in decode(target, target, num_guesses, **params):
        assert seq.num_drafted > 8
        assert seq.num_accepted == seq.num_drafted


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_any_draft_model_leaves_the_text_alone(target: Decoder, temperature: float) -> None:
    other = tiny_decoder(vocab=V, seed=4, dtype=torch.float64)
    plain = decode(target, None, [0] * 30, temperature=temperature)
    drafted = decode(target, other, [3, 7, 0, 1, 5] * 4, temperature=temperature)
    for expected, seq in zip(plain, drafted, strict=True):
        shared = min(len(expected.output), len(seq.output))
        assert shared > 10
        assert seq.output[:shared] == expected.output[:shared]
        assert seq.num_accepted < seq.num_drafted

"""Log-probabilities of prompts are those of one plain forward, however the prompt is computed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import pytest
import torch
from torch import Tensor

from specserve.admission import Limits, make_requests
from specserve.config import EngineConfig
from specserve.drafting import Drafter
from specserve.errors import RequestError
from specserve.models.decoder import Decoder
from specserve.scheduler import MAX_SCORED_TOKENS, Scheduler
from specserve.types import (
    BatchPlan,
    PromptLogprobs,
    Request,
    SamplingParams,
    Speculation,
    TokenChunk,
)
from specserve_kernels.interface import PagedBatch
from tests.engines import serving
from tests.guessers import make_guesser
from tests.tiny_models import tiny_decoder

PROMPTS = [
    [5, 9, 5, 9, 5, 9, 5],
    [1],
    [7, 8],
    [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17],
    [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 3, 3],
    list(range(20, 53)),
]
NUM_TOP = 4
NUM_TOKENS = 12
BLOCK = 4
SMALL_POOL = -(-(max(map(len, PROMPTS)) + NUM_TOKENS) // BLOCK) + 6  # preempts, as in exact replay


@functools.cache
def model() -> Decoder:
    torch.set_num_threads(1)
    return tiny_decoder(vocab=64, seed=3, dtype=torch.float64)


def plain_logits(prompt: Seq[int]) -> Tensor:
    """[n, V] of one forward over the whole prompt."""
    num_tokens = len(prompt)
    num_blocks = -(-num_tokens // BLOCK)
    batch = PagedBatch(
        query_start_loc=(0, num_tokens),
        context_lens=(0,),
        block_tables=(tuple(range(num_blocks)),),
        parents=(None,),
        block_size=BLOCK,
    )
    cache = model().new_kv_cache(num_blocks, BLOCK)
    ids = torch.tensor(list(prompt))
    return model().forward(ids, torch.arange(num_tokens), batch, cache, range(num_tokens))


def check(prompt: Seq[int], found: Seq[PromptLogprobs]) -> None:
    assert len(found) == len(prompt) - 1
    laws = torch.log_softmax(plain_logits(prompt), dim=-1)
    for law, token_id, entry in zip(laws[:-1], prompt[1:], found, strict=True):
        best = torch.sort(law, descending=True, stable=True)
        assert entry.logprob == pytest.approx(float(law[token_id]), abs=1e-7)
        assert entry.rank == 1 + int((law > law[token_id]).sum())
        assert [idx for idx, _ in entry.top] == best.indices[:NUM_TOP].tolist()
        values = [value for _, value in entry.top]
        assert values == pytest.approx(best.values[:NUM_TOP].tolist(), abs=1e-7)


def a_config(*, chunk: int = 64, cache: bool = False, pool: int = 512) -> EngineConfig:
    return EngineConfig(
        block_size=BLOCK,
        num_blocks=pool,
        max_model_len=80,
        max_num_seqs=8,
        max_num_batched_tokens=96,
        max_prefill_chunk=chunk,
        enable_prefix_caching=cache,
    )


def a_params(idx: int, prompt_logprobs: int | None = NUM_TOP) -> SamplingParams:
    return SamplingParams(max_tokens=NUM_TOKENS, seed=idx, prompt_logprobs=prompt_logprobs)


async def outputs(
    config: EngineConfig,
    *,
    batch: int = 8,
    drafters: Mapping[str, Drafter] | None = None,
    speculation: Speculation | None = None,
    prompt_logprobs: int | None = NUM_TOP,
) -> list[TokenChunk]:
    done: list[TokenChunk] = []
    async with serving(model(), config, drafters=drafters) as served:
        for first in range(0, len(PROMPTS), batch):
            requests = [
                request
                for idx, prompt in list(enumerate(PROMPTS))[first : first + batch]
                for request in served.requests(
                    prompt, a_params(idx, prompt_logprobs), name=f"{idx}", speculation=speculation
                )
            ]
            done += await served.run(requests)
    return done


@pytest.mark.parametrize(("chunk", "cache"), list(itertools.product((1, 3, 64), (False, True))))
async def test_they_are_those_of_a_plain_forward_however_the_prompt_is_computed(
    chunk: int, cache: bool
) -> None:
    truth = [chunk.prompt_logprobs for chunk in await outputs(a_config(), batch=1)]
    for prompt, found in zip(PROMPTS, truth, strict=True):
        check(prompt, found)
    for batch, pool in itertools.product((1, 8), (SMALL_POOL, 512)):
        config = a_config(chunk=chunk, cache=cache, pool=pool)
        found = await outputs(config, batch=batch)
        assert [chunk.prompt_logprobs for chunk in found] == truth  # bit for bit


async def test_a_preempted_prompt_gives_each_of_them_once() -> None:
    """The first one's text takes the blocks that the second one's prompt has begun to fill."""
    prompts = [list(range(1, 5)), list(range(30, 52))]
    config = a_config(chunk=1, cache=True, pool=9)
    async with serving(model(), config) as served:
        requests = [
            request
            for prompt, most in zip(prompts, (30, 6), strict=True)
            for request in served.requests(
                prompt, SamplingParams(max_tokens=most, prompt_logprobs=NUM_TOP), name=f"{most}"
            )
        ]
        chunks = await served.run(requests)
        [record] = [one for one in served.recorder.requests if one.request_id == "6"]
    num_computed = sum(part.num_tokens for part in record.prefill)
    assert record.num_preemptions == 1
    assert 22 < num_computed < 2 * 22, "it was not preempted in the middle of its prompt"
    for prompt, chunk in zip(prompts, chunks, strict=True):
        check(prompt, chunk.prompt_logprobs)


@pytest.mark.parametrize("name", ["oracle", "anti", "draft_model", "eagle3"])
async def test_texts_and_guesses_are_what_they_are_without_them(name: str) -> None:
    plain = await outputs(a_config(), prompt_logprobs=None)
    assert all(chunk.prompt_logprobs == () for chunk in plain)
    truth = {tuple(p): chunk.token_ids for p, chunk in zip(PROMPTS, plain, strict=True)}
    drafters = {name: make_guesser(name, model(), truth, a_config())}
    asked = Speculation(drafter=name, max_draft_tokens=3)
    chunks = await outputs(a_config(cache=True), drafters=drafters, speculation=asked)
    assert [chunk.token_ids for chunk in chunks] == [chunk.token_ids for chunk in plain]
    assert all(chunk.stats is not None and chunk.stats.num_draft_tokens for chunk in chunks)
    for prompt, chunk in zip(PROMPTS, chunks, strict=True):
        check(prompt, chunk.prompt_logprobs)


async def test_a_prompt_in_the_cache_is_computed_again_for_them_and_only_for_them() -> None:
    prompt = PROMPTS[5]
    async with serving(model(), a_config(cache=True)) as served:
        for wanted, num_cached in ((None, 0), (None, 32), (0, 0), (None, 32)):
            [request] = served.requests(prompt, a_params(0, wanted), name=f"{wanted}")
            [chunk] = await served.run([request])
            assert chunk.num_cached_tokens == num_cached
            assert len(chunk.prompt_logprobs) == (0 if wanted is None else len(prompt) - 1)
            assert all(entry.top == () for entry in chunk.prompt_logprobs)


async def test_a_text_read_again_as_a_prompt_is_worth_what_it_was_when_it_was_made() -> None:
    params = SamplingParams(max_tokens=NUM_TOKENS, seed=1, logprobs=NUM_TOP)
    async with serving(model(), a_config()) as served:
        [made] = await served.run(served.requests(PROMPTS[3], params, name="made"))
        whole = [*PROMPTS[3], *made.token_ids]
        [read] = await served.run(served.requests(whole, a_params(0), name="read"))
    again = read.prompt_logprobs[-NUM_TOKENS:]
    assert [(one.logprob, one.top) for one in again] == [
        (one.logprob, one.top) for one in made.logprobs
    ]


# ---- memory --------------------------------------------------------------------------------


def scored(plan: BatchPlan) -> int:
    return sum(row.num_scored for row in plan.rows)


def a_plan_of(prompts: Seq[tuple[int, int | None]]) -> tuple[Scheduler, BatchPlan]:
    """A step of prompts: how long, and what is asked of them."""
    config = EngineConfig(max_num_batched_tokens=512, num_blocks=4096, max_num_seqs=8)
    scheduler = Scheduler(config)
    for request in _requests(prompts, config):
        scheduler.add(request)
    return scheduler, scheduler.plan()


def _requests(prompts: Seq[tuple[int, int | None]], config: EngineConfig) -> list[Request]:
    limits = Limits.of(config, vocab_size=64, eos_ids=frozenset(), drafters=("none",))
    return [
        request
        for idx, (length, wanted) in enumerate(prompts)
        for request in make_requests(
            limits, [idx] * length, SamplingParams(prompt_logprobs=wanted), request_id=f"{idx}"
        )
    ]


def test_a_step_keeps_the_logits_of_few_prompt_tokens_and_nobody_waits_for_that() -> None:
    long = 10 * MAX_SCORED_TOKENS
    scheduler, plan = a_plan_of([(long, 1), (long, 5), (100, None), (1, 0)])
    assert [row.num_scored for row in plan.rows] == [MAX_SCORED_TOKENS, 1, 0, 0]
    assert [row.num_tokens for row in plan.rows] == [MAX_SCORED_TOKENS, 1, 100, 1]
    for row in plan.rows:
        scheduler.commit_row(row, [7] if row.samples else [], {})
    assert scored(scheduler.plan()) == MAX_SCORED_TOKENS + 1


def test_what_cannot_be_given_is_refused() -> None:
    config = EngineConfig()
    for wanted in (-1, 21):
        with pytest.raises(RequestError, match="prompt_logprobs") as caught:
            _requests([(4, wanted)], config)
        assert caught.value.param == "prompt_logprobs"

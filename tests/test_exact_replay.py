"""Promise one: for a given seed the text is the same, token for token, however it is computed.

The reference is plain decoding: no drafter, one request at a time, prompts computed whole, no
prefix cache, a pool that never preempts. The model is a small float64 decoder with real KV.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import pytest
import torch

from specserve.config import EngineConfig
from specserve.drafting import Drafter
from specserve.models.decoder import Decoder
from specserve.types import SamplingParams, Speculation, TokenChunk
from tests.engines import serving
from tests.guessers import GUESSERS, every_guesser, failing, make_guesser
from tests.tiny_models import tiny_decoder

NUM_TOKENS = 18
TEMPERATURES = [0.0, 0.7, 1.0]
PROMPTS = [
    [5, 9, 5, 9, 5, 9, 5],
    [1],
    [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17],
    [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 3, 3],
    list(range(20, 53)),
    [2, 2, 2, 2],
    [40, 41, 42, 40, 41, 42, 40, 41],
    [63, 0, 63],
]
BLOCK = 4
LONGEST = max(len(prompt) for prompt in PROMPTS) + NUM_TOKENS
SMALL_POOL = -(-LONGEST // BLOCK) + 6  # one long request and a little more


@functools.cache
def model() -> Decoder:
    torch.set_num_threads(1)
    return tiny_decoder(vocab=64, seed=3, dtype=torch.float64)


def a_config(*, chunk: int = 64, cache: bool = False, pool: int = 512) -> EngineConfig:
    return EngineConfig(
        block_size=BLOCK,
        num_blocks=pool,
        max_model_len=LONGEST + 8,
        max_num_seqs=8,
        max_num_batched_tokens=96,
        max_prefill_chunk=chunk,
        enable_prefix_caching=cache,
    )


def params_of(temperature: float, idx: int) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, seed=1000 + idx)


async def texts(
    config: EngineConfig,
    temperature: float,
    *,
    drafters: Mapping[str, Drafter] | None = None,
    speculation: Speculation | None = None,
    sharpness: float | None = None,
    batch: int = 8,
    only: Seq[int] = range(len(PROMPTS)),
) -> list[TokenChunk]:
    """Outputs of the prompts numbered in `only`, `batch` of them at a time."""
    done: list[TokenChunk] = []
    async with serving(model(), config, drafters=drafters, sharpness=sharpness) as served:
        for first in range(0, len(only), batch):
            requests = []
            for idx in only[first : first + batch]:
                requests += served.requests(
                    PROMPTS[idx],
                    params_of(temperature, idx),
                    name=f"{idx}",
                    speculation=speculation,
                )
            done += await served.run(requests)
    return done


_plain: dict[float, list[tuple[int, ...]]] = {}


async def plain_ids(temperature: float) -> list[tuple[int, ...]]:
    if temperature not in _plain:
        chunks = await texts(a_config(), temperature, batch=1)
        _plain[temperature] = [chunk.token_ids for chunk in chunks]
    return _plain[temperature]


async def truth_of(temperature: float) -> dict[tuple[int, ...], tuple[int, ...]]:
    ids = await plain_ids(temperature)
    return {tuple(prompt): out for prompt, out in zip(PROMPTS, ids, strict=True)}


async def test_the_reference_texts_are_worth_comparing() -> None:
    by_temperature = [await plain_ids(temperature) for temperature in TEMPERATURES]
    for ids in by_temperature:
        assert all(len(text) == NUM_TOKENS for text in ids)
        assert len(set(ids)) == len(PROMPTS)
        assert sum(len(set(text)) for text in ids) > 6 * len(PROMPTS)  # no constant loops
    assert by_temperature[0] != by_temperature[1] != by_temperature[2]


# K = 0 calls no guesser: two of them stand for all.
CASES = [
    (guesser, num_guesses)
    for guesser in GUESSERS
    for num_guesses in (0, 1, 3, 7)
    if num_guesses or guesser in ("ngram", "draft_model")
]


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("guesser", "num_guesses"), CASES)
async def test_text_is_the_same_however_it_is_computed(
    guesser: str, num_guesses: int, temperature: float
) -> None:
    truth = await truth_of(temperature)
    expected = await plain_ids(temperature)
    for batch, chunk, cache, pool in itertools.product(
        (1, 8), (3, 64), (False, True), (SMALL_POOL, 512)
    ):
        config = a_config(chunk=chunk, cache=cache, pool=pool)
        # Alone, texts cannot touch each other: three of them do, one longer than its chunk.
        only = range(len(PROMPTS)) if batch > 1 else [num_guesses % 4, 4, 5 + num_guesses % 3]
        chunks = await texts(
            config,
            temperature,
            drafters={guesser: make_guesser(guesser, model(), truth, config)},
            speculation=Speculation(drafter=guesser, max_draft_tokens=num_guesses),
            batch=batch,
            only=only,
        )
        setting = f"batch {batch}, chunk {chunk}, cache {cache}, pool {pool}"
        assert [chunk.token_ids for chunk in chunks] == [expected[idx] for idx in only], setting
        if pool == SMALL_POOL and batch > 1:
            assert sum(chunk.num_preemptions for chunk in chunks) > 0, "nothing was preempted"


async def test_the_settings_really_differ() -> None:
    """Each guesser guesses, and is right as often as it should be: else the matrix is empty."""
    truth = await truth_of(0.7)
    rates = {}
    for guesser in GUESSERS:
        chunks = await texts(
            a_config(),
            0.7,
            drafters={guesser: make_guesser(guesser, model(), truth, a_config())},
            speculation=Speculation(drafter=guesser, max_draft_tokens=4),
            sharpness=1.0,  # the target as its own draft is always right as it is, not sharpened
        )
        stats = [chunk.stats for chunk in chunks if chunk.stats is not None]
        drafted = sum(s.num_draft_tokens for s in stats)
        assert drafted > 0
        rates[guesser] = sum(s.num_accepted_draft_tokens for s in stats) / drafted
    assert (rates["oracle"], rates["draft_model"], rates["anti"]) == (1.0, 1.0, 0.0)
    assert 0.4 < rates["tree"] <= 0.5  # one of two siblings; the last step may have an odd one
    assert 0.3 < rates["synthetic"] < 0.9
    assert 0.0 < rates["ngram"] < 0.9


@pytest.mark.parametrize("temperature", TEMPERATURES)
async def test_every_request_of_a_mixed_batch_replays_and_speculation_may_change_midway(
    temperature: float,
) -> None:
    truth = await truth_of(temperature)
    expected = await plain_ids(temperature)
    config = a_config(chunk=5, cache=True, pool=SMALL_POOL + 20)
    drafters = {name: make_guesser(name, model(), truth, config) for name in GUESSERS}
    async with serving(model(), config, drafters=drafters) as served:
        requests = []
        for idx, prompt in enumerate(PROMPTS):
            name = GUESSERS[idx % len(GUESSERS)]
            speculation = Speculation(drafter=name, max_draft_tokens=idx)
            requests += served.requests(
                prompt, params_of(temperature, idx), name=f"{idx}", speculation=speculation
            )
        chunks = await served.run(requests)
        assert [chunk.token_ids for chunk in chunks] == expected
        # A text continued by another request, from any point, with another drafter: positions and
        # seed are the same, so the rest is the same.
        for idx, prompt in enumerate(PROMPTS):
            cut = 5 + idx
            params = SamplingParams(
                temperature=temperature, max_tokens=NUM_TOKENS - cut, seed=1000 + idx
            )
            speculation = Speculation(
                drafter=GUESSERS[(idx + 2) % len(GUESSERS)], max_draft_tokens=7 - idx % 7
            )
            [request] = served.requests(
                [*prompt, *expected[idx][:cut]], params, name="rest", speculation=speculation
            )
            rest = await served.collect(request)
            assert rest.token_ids == expected[idx][cut:]


@pytest.mark.parametrize("temperature", TEMPERATURES)
async def test_text_is_the_same_whoever_is_chosen_and_however_often_they_fail(
    temperature: float,
) -> None:
    """Drafter, K and width are the controller's choice in each step; every third call fails."""
    truth = await truth_of(temperature)
    expected = await plain_ids(temperature)
    used: set[str] = set()
    for batch, chunk, cache, pool, fails in (
        (1, 64, False, 512, False),
        (8, 3, True, SMALL_POOL, False),
        (8, 64, True, 512, True),
        (3, 5, False, SMALL_POOL + 8, True),
    ):
        config = a_config(chunk=chunk, cache=cache, pool=pool)
        drafters = every_guesser(model(), truth, config)
        if fails:
            drafters = {name: failing(drafter, every=3) for name, drafter in drafters.items()}
        chunks = await texts(
            config,
            temperature,
            drafters=drafters,
            speculation=Speculation(drafter="auto", max_draft_tokens=7),
            batch=batch,
        )
        setting = f"batch {batch}, chunk {chunk}, cache {cache}, pool {pool}, fails {fails}"
        assert [chunk.token_ids for chunk in chunks] == expected, setting
        used |= {name for chunk in chunks if chunk.stats for name in chunk.stats.drafters}
    assert len(used) >= 3, "there was nothing to choose"


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("guesser", ["draft_model", "eagle3", "medusa"])
async def test_trees_of_every_width_leave_the_text_alone(guesser: str, width: int) -> None:
    truth = await truth_of(0.7)
    expected = await plain_ids(0.7)
    config = a_config(chunk=7, cache=True, pool=SMALL_POOL + 12)
    chunks = await texts(
        config,
        0.7,
        drafters={guesser: make_guesser(guesser, model(), truth, config)},
        speculation=Speculation(drafter=guesser, max_draft_tokens=9, draft_width=width),
    )
    assert [chunk.token_ids for chunk in chunks] == expected
    assert sum(chunk.stats.num_draft_tokens for chunk in chunks if chunk.stats) > 50


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
@pytest.mark.parametrize("guesser", ["anti", "draft_model", "tree"])
async def test_penalties_count_guesses_only_once_they_are_tokens(guesser: str, name: str) -> None:
    strong = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "repetition_penalty": 1.5}
    params = SamplingParams(
        temperature=0.0,
        max_tokens=NUM_TOKENS,
        seed=1,
        min_tokens=6,
        logit_bias={3: 5.0, 9: -100.0},
        **{name: strong[name]},
    )
    ids = {}
    for num_guesses in (0, 5):
        config = a_config()
        drafter = make_guesser(guesser, model(), await truth_of(0.0), config)
        async with serving(
            model(), config, drafters={guesser: drafter}, eos_ids=frozenset({11})
        ) as served:
            requests = []
            for idx, prompt in enumerate(PROMPTS):
                requests += served.requests(
                    prompt,
                    params,
                    name=f"{idx}",
                    speculation=Speculation(drafter=guesser, max_draft_tokens=num_guesses),
                )
            ids[num_guesses] = [chunk.token_ids for chunk in await served.run(requests)]
    assert ids[0] == ids[5]


FILTERS = {
    "allowed ids": SamplingParams(
        temperature=1.0, allowed_token_ids=tuple(range(1, 64, 2)), max_tokens=NUM_TOKENS, seed=5
    ),
    "top_k": SamplingParams(temperature=1.0, top_k=3, max_tokens=NUM_TOKENS, seed=5),
    "top_p": SamplingParams(temperature=1.2, top_p=0.7, max_tokens=NUM_TOKENS, seed=5),
    "min_p": SamplingParams(temperature=1.5, min_p=0.1, max_tokens=NUM_TOKENS, seed=5),
    "stop ids": SamplingParams(
        temperature=1.0, stop_token_ids=tuple(range(0, 64, 7)), max_tokens=NUM_TOKENS, seed=5
    ),
    "stop strings": SamplingParams(
        temperature=1.0, stop=(" 1 ", " 2", "3 4"), max_tokens=NUM_TOKENS, seed=5
    ),
    "min_tokens": SamplingParams(
        temperature=1.0,
        stop_token_ids=tuple(range(0, 64, 3)),
        min_tokens=7,
        max_tokens=NUM_TOKENS,
        seed=5,
    ),
}


@pytest.mark.parametrize("kind", FILTERS)
@pytest.mark.parametrize("sliding_window", [None, 6])
async def test_filters_and_endings_replay_even_inside_accepted_guesses(
    kind: str, sliding_window: int | None
) -> None:
    """The truth is recorded without guesses, so that oracle and tree run into every ending."""
    decoder = tiny_decoder(vocab=64, seed=3, dtype=torch.float64, window=sliding_window)

    async def run(name: str, config: EngineConfig) -> list[TokenChunk]:
        drafter = make_guesser(name, decoder, truth, config)
        async with serving(decoder, config, drafters={name: drafter}) as served:
            requests = []
            for idx, prompt in enumerate(PROMPTS):
                speculation = Speculation(
                    drafter=name if truth else "none", max_draft_tokens=7 if truth else 0
                )
                requests += served.requests(
                    prompt, FILTERS[kind], name=f"{idx}", speculation=speculation
                )
            return await served.run(requests)

    truth: dict[tuple[int, ...], tuple[int, ...]] = {}
    plain = await run("ngram", a_config())
    truth = {tuple(p): chunk.token_ids for p, chunk in zip(PROMPTS, plain, strict=True)}
    if "stop" in kind:
        assert {chunk.finish_reason for chunk in plain} >= {"stop"}
    if kind == "min_tokens":
        assert min(len(chunk.token_ids) for chunk in plain) > 7
    # The recorded texts end where they end; beyond it those who know them say nothing.
    for name in ("oracle", "tree", "draft_model", "ngram"):
        chunks = await run(name, a_config(chunk=5, cache=True, pool=SMALL_POOL + 8))
        for want, have in zip(plain, chunks, strict=True):
            assert (have.token_ids, have.text) == (want.token_ids, want.text), name
            assert (have.finish_reason, have.stop_reason) == (
                want.finish_reason,
                want.stop_reason,
            )

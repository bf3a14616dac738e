"""A constrained text is the same, token for token, whoever guesses; and guesses get cheaper.

As in test_exact_replay.py: a small float64 decoder with real KV against plain decoding.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import msgspec
import pytest
import torch

from specserve.admission import constrained
from specserve.config import EngineConfig
from specserve.drafting import Draft, Drafter, DraftRow
from specserve.errors import EngineError
from specserve.models.decoder import Decoder
from specserve.types import Request, SamplingParams, Speculation, TokenChunk, VerifyRule
from specserve_drafts.grammar import GrammarDrafter
from tests.engines import Served, serving
from tests.grammar_world import END, SPECS, VOCAB_SIZE, bpe_tokenizer, constraint
from tests.guessers import make_guesser
from tests.test_grammar import matches
from tests.tiny_models import tiny_decoder

PROMPTS = [[5, 9, 5, 9, 5, 9, 5], [7], [20, 21, 22, 23, 24, 25, 26, 27, 28, 29]]
GUESSERS = ["ngram", "suffix", "oracle", "anti", "tree", "draft_model", "eagle3", "grammar"]
MAX_TOKENS = 60


@functools.cache
def model() -> Decoder:
    torch.set_num_threads(1)
    return tiny_decoder(vocab=VOCAB_SIZE, seed=3, dtype=torch.float64)


def a_config(*, chunk: int = 64, pool: int = 256, cache: bool = False) -> EngineConfig:
    return EngineConfig(
        block_size=4,
        num_blocks=pool,
        max_model_len=MAX_TOKENS + 20,
        max_num_seqs=8,
        max_num_batched_tokens=96,
        max_prefill_chunk=chunk,
        enable_prefix_caching=cache,
    )


SMALL = a_config(chunk=3, pool=24, cache=True)  # prompts in pieces, preemptions


async def texts(
    kind: str,
    params: SamplingParams,
    *,
    config: EngineConfig | None = None,
    drafters: Mapping[str, Drafter] | None = None,
    speculation: Speculation | None = None,
) -> list[TokenChunk]:
    async with a_server(config or a_config(), drafters) as served:
        requests: list[Request] = []
        for idx, prompt in enumerate(PROMPTS):
            seeded = msgspec.structs.replace(params, seed=50 + idx)
            requests += bound(served, prompt, seeded, kind, str(idx), speculation)
        return await served.run(requests)


def a_server(config: EngineConfig, drafters: Mapping[str, Drafter] | None = None):  # type: ignore[no-untyped-def]  # serving's own type
    return serving(
        model(),
        config,
        drafters=drafters,
        tokenizer=bpe_tokenizer(),
        eos_ids=frozenset({END}),
        vocab_size=VOCAB_SIZE,
    )


def bound(
    served: Served,
    prompt: Seq[int],
    params: SamplingParams,
    kind: str,
    name: str,
    speculation: Speculation | None = None,
) -> list[Request]:
    requests = served.requests(prompt, params, name=name, speculation=speculation)
    return constrained(requests, [constraint(kind) for _ in requests], param="json")


def params_of(temperature: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS)


def guesser(name: str, truth: Seq[TokenChunk], config: EngineConfig) -> dict[str, Drafter]:
    if name == "none":
        return {}
    known = {tuple(p): chunk.token_ids for p, chunk in zip(PROMPTS, truth, strict=True)}
    return {name: make_guesser(name, model(), known, config)}


_truth: dict[tuple[str, float], list[TokenChunk]] = {}


async def truth_of(kind: str, temperature: float) -> list[TokenChunk]:
    key = (kind, temperature)
    if key not in _truth:
        _truth[key] = await texts(kind, params_of(temperature))
    return _truth[key]


@pytest.mark.parametrize("kind", SPECS)
async def test_texts_that_end_are_what_was_asked_for(kind: str) -> None:
    for temperature in (0.0, 1.0):
        chunks = await truth_of(kind, temperature)
        assert {chunk.finish_reason for chunk in chunks} <= {"stop", "length"}
        ended = [chunk for chunk in chunks if chunk.finish_reason == "stop"]
        assert ended or temperature == 0, "no text ended: the test shows nothing"
        assert all(matches(kind, chunk.text) for chunk in ended)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("name", GUESSERS)
async def test_a_constrained_text_is_the_same_whoever_guesses(
    name: str, kind: str, temperature: float
) -> None:
    truth = await truth_of(kind, temperature)
    for config, num_guesses in ((a_config(), 3), (SMALL, 7)):
        width = 2 if name in ("draft_model", "eagle3", "suffix") and num_guesses == 7 else None
        chunks = await texts(
            kind,
            params_of(temperature),
            config=config,
            drafters=guesser(name, truth, config),
            speculation=Speculation(drafter=name, max_draft_tokens=num_guesses, draft_width=width),
        )
        assert [(c.token_ids, c.text, c.finish_reason) for c in chunks] == [
            (c.token_ids, c.text, c.finish_reason) for c in truth
        ]


# ---- what guesses cost ---------------------------------------------------------------------


async def test_a_guess_that_the_grammar_forbids_is_never_verified() -> None:
    """The anti-drafter's guesses are wrong ones: in a choice of words nearly all of them cannot
    come, and without a grammar they are all verified."""
    truth = await truth_of("choice", 1.0)
    speculation = Speculation(drafter="anti", max_draft_tokens=4)
    drafters = guesser("anti", truth, a_config())
    chunks = await texts("choice", params_of(1.0), drafters=drafters, speculation=speculation)
    num_drafted = sum(chunk.stats.num_draft_tokens for chunk in chunks if chunk.stats)
    async with a_server(a_config(), drafters) as served:
        free: list[Request] = []
        for idx, prompt in enumerate(PROMPTS):
            params = msgspec.structs.replace(params_of(1.0), seed=50 + idx, max_tokens=9)
            free += served.requests(prompt, params, name=str(idx), speculation=speculation)
        unbound = await served.run(free)
    num_steps = sum(chunk.stats.num_steps for chunk in chunks if chunk.stats)
    assert num_drafted <= num_steps / 4
    assert sum(chunk.stats.num_draft_tokens for chunk in unbound if chunk.stats) > 10


@pytest.mark.parametrize("drafter", ["grammar", "auto"])
async def test_text_that_must_come_takes_fewer_steps(drafter: str) -> None:
    truth = await truth_of("compact", 1.0)
    chunks = await texts(
        "compact",
        params_of(1.0),
        drafters=guesser("grammar", truth, a_config()),
        speculation=Speculation(drafter=drafter, max_draft_tokens=7),
    )
    assert [chunk.token_ids for chunk in chunks] == [chunk.token_ids for chunk in truth]
    for chunk, free in zip(chunks, truth, strict=True):
        assert chunk.stats is not None
        assert free.stats is not None
        assert free.stats.num_steps == len(free.token_ids)
        if drafter == "grammar":  # which steps "auto" lets it guess in depends on measured time
            assert chunk.stats.num_steps < free.stats.num_steps
            assert chunk.stats.num_accepted_draft_tokens >= free.stats.num_steps / 8


class MayNotBeAsked(GrammarDrafter):
    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        raise AssertionError("it was asked")


@pytest.mark.parametrize("drafter", ["grammar", "auto"])
async def test_the_grammar_is_not_asked_about_requests_without_one(drafter: str) -> None:
    async with a_server(a_config(), {"grammar": MayNotBeAsked()}) as served:
        speculation = Speculation(drafter=drafter, max_draft_tokens=4)
        requests = served.requests(PROMPTS[0], params_of(0.0), name="free", speculation=speculation)
        await served.run(requests)
        assert len(served.recorder.steps) > 10
        assert not any(step.failed_drafters for step in served.recorder.steps)
        await served.run(bound(served, PROMPTS[0], params_of(0.0), "compact", "b", speculation))
        asked = any(step.failed_drafters for step in served.recorder.steps)
        assert asked or drafter == "auto"  # which asks when it thinks it worth it


# ---- together with everything else ---------------------------------------------------------

TOGETHER = {
    "penalties": SamplingParams(
        temperature=0.8,
        presence_penalty=1.5,
        frequency_penalty=1.0,
        repetition_penalty=1.3,
        max_tokens=MAX_TOKENS,
    ),
    "filters": SamplingParams(temperature=1.3, top_k=5, top_p=0.8, min_p=0.05, max_tokens=40),
    "bias": SamplingParams(temperature=1.0, logit_bias={40: 8.0, 300: -100.0}, max_tokens=40),
    "stop": SamplingParams(temperature=1.0, stop=("e", "s"), max_tokens=40),
    "logprobs": SamplingParams(temperature=1.0, logprobs=4, max_tokens=40),
}


@pytest.mark.parametrize("name", ["ngram", "tree", "eagle3", "grammar"])
@pytest.mark.parametrize("together", TOGETHER)
async def test_other_parameters_keep_their_meaning_under_a_grammar(
    together: str, name: str
) -> None:
    params = TOGETHER[together]
    truth = await texts("schema", params)
    chunks = await texts(
        "schema",
        params,
        config=SMALL,
        drafters=guesser(name, truth, SMALL),
        speculation=Speculation(drafter=name, max_draft_tokens=5),
    )
    assert [(c.token_ids, c.text, c.stop_reason) for c in chunks] == [
        (c.token_ids, c.text, c.stop_reason) for c in truth
    ]
    for chunk, plain in zip(chunks, truth, strict=True):
        for one, other in zip(chunk.logprobs, plain.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-9)
            assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]


async def test_logprobs_are_of_the_law_that_the_grammar_leaves() -> None:
    """Where two tokens are allowed, their probabilities add up to one."""
    params = SamplingParams(temperature=1.0, logprobs=20, max_tokens=MAX_TOKENS)
    num_checked = 0
    for chunk, prompt in zip(await texts("choice", params), PROMPTS, strict=True):
        walk = constraint("choice")
        for at, logprobs in enumerate(chunk.logprobs):
            mask = walk.mask([*prompt, *chunk.token_ids[:at]], len(prompt), ())
            assert mask is not None
            num_allowed = sum(byte.bit_count() for byte in mask)
            possible = [value for _, value in logprobs.top if value > -9999]
            assert len(possible) == num_allowed
            assert sum(torch.tensor(possible, dtype=torch.float64).exp().tolist()) == pytest.approx(
                1.0
            )
            assert logprobs.logprob in possible
            num_checked += num_allowed > 1
    assert num_checked > 3


@pytest.mark.parametrize("verify", ["rejection", "block", "typical"])
@pytest.mark.parametrize("name", ["ngram", "tree", "eagle3", "draft_model", "anti"])
async def test_under_every_rule_of_verification_texts_keep_to_the_grammar(
    name: str, verify: VerifyRule
) -> None:
    for kind in ("compact", "regex"):
        chunks = await texts(
            kind,
            params_of(1.0),
            drafters=guesser(name, await truth_of(kind, 1.0), a_config()),
            speculation=Speculation(drafter=name, max_draft_tokens=4, verify=verify),
        )
        ended = [chunk for chunk in chunks if chunk.finish_reason == "stop"]
        assert {chunk.finish_reason for chunk in chunks} <= {"stop", "length"}
        assert ended
        assert all(matches(kind, chunk.text) for chunk in ended)


async def test_replies_of_one_request_do_not_touch_each_other() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, n=6, seed=9)
    async with a_server(SMALL) as served:
        together = await served.run(bound(served, PROMPTS[0], params, "schema", "n"))
        for idx, chunk in enumerate(together):
            alone = msgspec.structs.replace(params, n=1, seed=9 + idx)
            [again] = await served.run(bound(served, PROMPTS[0], alone, "schema", f"{idx}"))
            assert again.token_ids == chunk.token_ids
    assert len({chunk.token_ids for chunk in together}) == 6
    assert sum(chunk.num_preemptions for chunk in together) > 0


class GivesUp:
    """Allows everything for five tokens; then nobody can tell."""

    def mask(self, known: Seq[int], num_prompt: int, prefix: Seq[int]) -> bytes | None:
        if len(known) + len(prefix) - num_prompt >= 5:
            raise EngineError("the grammar became too much work")
        return b"\xfe" + b"\xff" * (VOCAB_SIZE // 8)

    def admits(self, known: Seq[int], num_prompt: int, prefix: Seq[int]) -> bool:
        return len(known) + len(prefix) - num_prompt < 5

    def forced(self, known: Seq[int], num_prompt: int, most: int) -> tuple[int, ...]:
        return ()


@pytest.mark.parametrize("name", ["none", "oracle", "anti", "tree", "draft_model"])
async def test_a_grammar_that_nobody_can_follow_any_more_ends_its_own_request_alone(
    name: str,
) -> None:
    params = msgspec.structs.replace(params_of(1.0), seed=50)
    drafters = guesser(name, await truth_of("schema", 1.0), a_config())
    speculation = Speculation(drafter=name, max_draft_tokens=4)
    async with a_server(a_config(), drafters) as served:
        [easy] = bound(served, PROMPTS[0], params, "schema", "easy", speculation)
        asked = served.requests(PROMPTS[1], params, name="hard", speculation=speculation)
        [request] = constrained(asked, [GivesUp()], param="regex")
        failed, fine = await served.run([request, easy])
    assert failed.finish_reason == "error"
    assert "too much work" in (failed.error or "")
    assert len(failed.token_ids) == 5
    assert fine.token_ids == (await truth_of("schema", 1.0))[0].token_ids

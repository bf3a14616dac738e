"""Replies to public bug reports, each asked in every way (tests/ways.py); README.md has the table.

Here: what a reply says. The scripted model shows exactly where a burst of accepted guesses is cut;
the small real one shows that a reply is that of plain decoding, number for number.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
import torch

from specserve.kv_cache import KVCache
from specserve.models.decoder import Decoder
from specserve_kernels.interface import PagedBatch
from tests.http_server import CONFIG
from tests.raw_http import connect
from tests.scripted import BROKEN, END, VOCAB_SIZE, by_first_letter, says
from tests.test_server_structured import CHATTER, FORMATS, check
from tests.ways import PLAIN, Way, a_real_server, a_scripted_server

pytestmark = pytest.mark.timeout(120)

EMOJI = "a🎉你👩‍🚀é" * 2  # twice, so that ngram finds something


# ---- where a burst is cut ----------------------------------------------------------------------


async def test_no_half_character_leaves_wherever_a_text_is_cut(way: Way) -> None:
    async with a_scripted_server(says(EMOJI)) as server:
        for max_tokens in range(1, len(EMOJI.encode()) + 2):
            said = await way.hear(server, k=1 + max_tokens % 5, max_tokens=max_tokens)
            assert "\ufffd" not in said.text
            assert said.text.encode() == EMOJI.encode()[:max_tokens][: len(said.text.encode())]
            assert max_tokens - len(said.text.encode()) < 11  # a joined emoji is 11 bytes
            assert said.usage["completion_tokens"] == max_tokens


@pytest.mark.parametrize("stop", [" ha ha ha", "a ha", "!"])
async def test_everything_ends_at_the_token_that_completes_the_stop_string(
    way: Way, stop: str
) -> None:
    text = "so ha ha ha ha! ha"
    end = text.index(stop)
    async with a_scripted_server(says(text, then=None)) as server:
        for k in range(1, 9):
            said = await way.hear(server, k=k, stop=[stop], max_tokens=40, logprobs=1)
            assert said.text == text[:end]
            assert (said.finish_reason, said.stop_reason) == ("stop", stop)
            kept = end + len(stop)
            assert bytes(said.token_ids) == text[:kept].encode()
            assert len(said.logprobs) == len(said.top_logprobs) == kept
            assert said.usage["completion_tokens"] == kept


async def test_a_false_beginning_of_a_stop_string_is_let_go(way: Way) -> None:
    text = "ABDEXDEDEFGH"
    async with a_scripted_server(says(text * 2)) as server:
        for k in range(1, 9):
            said = await way.hear(server, k=k, stop=["DEF", "ZZ"], max_tokens=24)
            assert said.text == "ABDEXDE"
            kept = await way.hear(
                server, k=k, stop="DEF", include_stop_str_in_output=True, max_tokens=24
            )
            assert kept.text == "ABDEXDEDEF"
            free = await way.hear(server, k=k, stop="DEFI", max_tokens=24)
            assert free.text == text * 2


async def test_nothing_follows_an_end_inside_an_accepted_draft(way: Way) -> None:
    async with a_scripted_server(says("abab")) as server:
        for k in range(1, 9):
            said = await way.hear(server, k=k, max_tokens=40, logprobs=0, frequency_penalty=0.1)
            assert (said.text, said.finish_reason) == ("abab", "stop")
            assert said.token_ids == [*b"abab", END]
            assert len(said.logprobs) == said.usage["completion_tokens"] == 5
            # Of its KV too: asked to go on from there, it says what it says without a cache.
            rest = await way.hear(server, k=k, prompt=[*b"say:abab", END], max_tokens=3)
            assert rest.token_ids == [END]


async def test_exactly_max_tokens_come_and_are_counted(way: Way) -> None:
    async with a_scripted_server(says("abcab")) as server:
        for max_tokens in range(1, 18):
            said = await way.hear(server, k=4, max_tokens=max_tokens, ignore_eos=True)
            assert len(said.token_ids) == said.usage["completion_tokens"] == max_tokens
            assert said.finish_reason == "length"


async def test_no_end_comes_before_min_tokens_though_it_is_guessed(way: Way) -> None:
    async with a_scripted_server(says("aba")) as server:
        plain = await PLAIN.hear(server, min_tokens=6, max_tokens=20)
        assert END not in plain.token_ids[:6]
        for k in range(1, 9):
            said = await way.hear(server, k=k, min_tokens=6, max_tokens=20)
            assert said.same_as(plain)
            stopped = await way.hear(server, k=k, min_tokens=6, max_tokens=20, stop="a")
            assert len(stopped.token_ids) >= 6


async def test_what_was_emitted_is_what_steps_emitted(way: Way) -> None:
    async with a_scripted_server(says("ababab")) as server:
        for k in range(1, 9):
            said = await way.hear(server, k=k, max_tokens=40)
            spec, ours = said.metrics["speculative_decoding"], said.metrics["specserve"]
            with_guesses = spec["mean_acceptance_length"] * spec["num_spec_steps"]
            emitted = with_guesses + ours["steps"] - spec["num_spec_steps"]
            assert round(emitted, 6) == said.usage["completion_tokens"] == 7
            assert spec["num_accepted_draft_tokens"] <= spec["num_draft_tokens"]
            assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"]
            assert (spec["num_draft_tokens"] > 0) == (way.drafter != "none")


async def test_one_that_fails_says_so_and_its_neighbour_goes_on(way: Way) -> None:
    script = by_first_letter({"b": says("1212", then=BROKEN), "g": says("good", then=None)})
    async with a_scripted_server(script) as server:
        bad, good = await asyncio.gather(
            way.ask(server, prompt="b:", max_tokens=50),
            way.hear(server, prompt="g:", max_tokens=50),
        )
        assert good.text == ("good" * 13)[:50]
        if way.stream:
            *chunks, last = bad.events
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "1212"
            assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
            assert sorted(last["error"]) == ["code", "message", "param", "type"]
        else:
            assert bad.status == 500
            last = bad.json()
        assert last["error"]["code"] == "engine_error"


@pytest.mark.parametrize("kind", ["json_schema", "regex"])
async def test_a_grammar_is_kept_whatever_is_guessed_against_it(way: Way, kind: str) -> None:
    async with a_scripted_server(says(CHATTER, then=None)) as server:
        plain = await PLAIN.hear(server, **FORMATS[kind], max_tokens=120)
        check(kind, plain.text)
        for k in (1, 5, 8):
            said = await way.hear(server, k=k, **FORMATS[kind], max_tokens=120)
            assert said.same_as(plain)


# ---- a reply is that of plain decoding ---------------------------------------------------------

PROMPTS = [
    [5, 9, 5, 9, 5, 9, 5],
    [1],
    list(range(40, 57)),  # a chunk of 16 and one token
    list(range(100, 133)),  # two chunks and one
    [200, 201, 202, 200, 201, 202, 200, 201],
]
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 11},
    "presence penalty": {"presence_penalty": 2.0},
    "frequency penalty": {"frequency_penalty": 2.0},
    "repetition penalty": {"repetition_penalty": 1.5},
    "all penalties, sampled": {
        "temperature": 0.9, "seed": 3, "presence_penalty": 1.0, "frequency_penalty": 1.0,
        "repetition_penalty": 1.2, "top_p": 0.9, "top_k": 50,
    },
    "top_k beyond the vocabulary": {"top_k": 10 * VOCAB_SIZE, "temperature": 1.0, "seed": 2},
    "bias": {"logit_bias": {"17": 5.0, "30": -100.0}},
    "logprobs": {"logprobs": 5, "temperature": 1.0, "seed": 4},
}  # fmt: skip


@pytest.mark.parametrize("kind", PARAMS)
async def test_a_reply_is_that_of_plain_decoding(way: Way, kind: str) -> None:
    body = {**PARAMS[kind], "max_tokens": 24}
    async with a_real_server() as world:
        plain = [await world.plain(prompt, **body) for prompt in PROMPTS]
        together = await asyncio.gather(
            *(way.hear(world.server, prompt=prompt, **body) for prompt in PROMPTS)
        )
        for prompt, expected, said in zip(PROMPTS, plain, together, strict=True):
            assert said.same_as(expected), prompt
        guessed = [said.metrics["speculative_decoding"]["num_draft_tokens"] for said in together]
        if way.drafter != "ngram" or kind == "greedy":  # where nothing repeats, ngram is silent
            assert (sum(guessed) > 0) == (way.drafter != "none")
    if kind == "logprobs":
        _check_logprobs(world.model, PROMPTS[0], together[0].token_ids, together[0].logprobs)


def _check_logprobs(model: Decoder, prompt: list[int], ids: list[int], said: list[float]) -> None:
    """Against one plain forward pass over the whole text."""
    known = [*prompt, *ids]
    cache: KVCache = model.new_kv_cache(1, len(known))
    batch = PagedBatch(
        query_start_loc=(0, len(known)),
        context_lens=(0,),
        block_tables=((0,),),
        parents=(None,),
        block_size=len(known),
    )
    with torch.inference_mode():
        logits = model.forward(
            torch.tensor(known), torch.arange(len(known)), batch, cache, range(len(known))
        )
    rows = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    expected = rows[torch.arange(len(ids)), torch.tensor(ids)]
    assert said == pytest.approx(expected.tolist(), abs=1e-6)
    assert min(said) < -0.1  # not the 0.0 of a certainty


async def test_a_seed_says_the_same_five_times_alone_and_in_a_crowd(way: Way) -> None:
    body = {"prompt": PROMPTS[0], "temperature": 0.8, "seed": 11, "max_tokens": 20}
    async with a_real_server() as world:
        plain = await world.plain(**body)
        other = {**body, "prompt": PROMPTS[3], "seed": 7}
        for crowd in (0, 3):
            said, *_ = await asyncio.gather(
                way.hear(world.server, **body),
                *(way.hear(world.server, **{**other, "seed": idx}) for idx in range(crowd)),
            )
            assert said.same_as(plain)
        again = [await way.hear(world.server, **body) for _ in range(3)]
        assert all(said.same_as(plain) for said in again)


async def test_a_preempted_reply_is_whole(way: Way) -> None:
    """Eight at once in a pool that holds three of them."""
    asked = [{"prompt": [50 + idx, 60, 70, 80], "max_tokens": 40} for idx in range(6)]
    asked += [{**one, "temperature": 0.9, "seed": 5} for one in asked[:2]]
    async with a_real_server() as world:
        plain = [await PLAIN.hear(world.server, **one) for one in asked]
        truth = {
            tuple(one["prompt"]): said.token_ids for one, said in zip(asked, plain, strict=True)
        }
    small = msgspec.structs.replace(CONFIG, num_blocks=34, max_model_len=64)
    async with a_real_server(small, truth=truth) as world:
        said = await asyncio.gather(*(way.hear(world.server, **one) for one in asked))
    assert [one.text for one in said] == [one.text for one in plain]
    assert all(one.same_as(expected) for one, expected in zip(said, plain, strict=True))
    assert sum(one.metrics["specserve"]["preemptions"] for one in said) > 0


async def test_a_cached_prefix_holds_no_rejected_guess(way: Way) -> None:
    uncached = msgspec.structs.replace(CONFIG, enable_prefix_caching=False)
    async with a_real_server(uncached) as world:
        first = await world.plain([5, 6, 7], max_tokens=21)
        rest = await world.plain([5, 6, 7, *first.token_ids], max_tokens=21)
    async with a_real_server(truth=world.truth) as cached:
        for k in range(1, 9):
            for prompt, expected in (([5, 6, 7], first), ([5, 6, 7, *first.token_ids], rest)):
                said = await way.hear(cached.server, prompt=prompt, k=k, max_tokens=21)
                assert said.same_as(expected)
        assert sum(record.num_cached_tokens for record in cached.server.recorder.requests) > 50


async def test_a_text_ends_with_its_context_whatever_is_guessed_beyond(way: Way) -> None:
    tiny = msgspec.structs.replace(CONFIG, max_model_len=40, num_blocks=24, max_draft_tokens=5)
    async with a_real_server(tiny) as world:
        for room in (0, 1, 2, 5, 6):
            prompt = list(range(60, 100 - room))
            if room == 0:
                reply = await way.ask(world.server, prompt=prompt)
                assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")
                continue
            plain = await world.plain(prompt, max_tokens=room, ignore_eos=True)
            said = await way.hear(world.server, prompt=prompt, ignore_eos=True)
            assert said.same_as(plain)
            assert (len(said.token_ids), said.finish_reason) == (room, "length")


async def test_a_chunk_of_one_token_is_no_decode_step(way: Way) -> None:
    """It is computed in a step in which others verify guesses."""
    async with a_real_server() as world:
        long, short = PROMPTS[4], PROMPTS[2:4]
        await world.plain(long, max_tokens=100, ignore_eos=True)
        plain = [await world.plain(prompt, max_tokens=12) for prompt in short]
        async with connect(world.server.port) as busy:
            await way.start(busy, prompt=long, max_tokens=100, ignore_eos=True, cache_salt="b")
            await world.server.has(running=1)
            for prompt, expected in zip(short, plain, strict=True):
                said = await way.hear(world.server, prompt=prompt, max_tokens=12, cache_salt="c")
                assert said.same_as(expected)
            await busy.read_reply()


@pytest.mark.parametrize(
    "body",
    [
        {"top_k": 1, "temperature": 1.0, "seed": 1},
        {"logit_bias": {str(idx): -100 for idx in range(100)}},
        {"allowed_token_ids": [65, 66]},
        {"structured_outputs": {"regex": "[ab]{9}"}},
    ],
    ids=["top_k", "bias", "allowed", "grammar"],
)
async def test_logprobs_of_what_cannot_be_are_numbers(way: Way, body: dict[str, Any]) -> None:
    async with a_real_server() as world:
        plain = await world.plain(PROMPTS[0], max_tokens=8, logprobs=5, **body)
        said = await way.hear(world.server, prompt=PROMPTS[0], max_tokens=8, logprobs=5, **body)
        assert said.same_as(plain)
    assert json.dumps([said.logprobs, said.top_logprobs], allow_nan=False)
    for top in said.top_logprobs:
        assert all(-9999.0 <= value <= 0 for value in top.values())

"""Exact replay on the demo model: bits, not tolerances. Counts tokens that differ; there are none.

The default run compares a sample; `pytest -m slow tests/test_demo_replay.py` compares 20,000 tokens
in each dtype.
"""

from __future__ import annotations

import gc
from pathlib import Path

import msgspec
import pytest
import torch

from specserve.config import EngineConfig
from specserve.drafting import Drafter
from specserve.models.config import parse_model_config
from specserve.models.decoder import Decoder
from specserve.tokenizer import Tokenizer
from specserve.types import SamplingParams, Speculation
from specserve.weights import load_weights, read_config
from specserve_drafts.ngram import NgramDrafter
from specserve_kernels import make_backend
from tests.engines import serving

pytestmark = [pytest.mark.demo, pytest.mark.timeout(7200)]

TEXTS = [
    "Write one sentence about the sea.",
    "List three fruits, one per line.",
    "Repeat exactly: the quick brown fox jumps over the lazy dog. the quick brown fox jumps over",
    "What is 12 + 30?",
    "Translate 'good morning' to French.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
    "Explain why the sky is blue in two sentences.",
    "Write a haiku about rain.",
    "Summarise: The cat sat on the mat. The cat was black. The mat was red. The cat slept.",
    "Count from 1 to 20.",
    "Which animal says moo?",
    "Write a short letter to a friend who is ill.",
    '{"name": "Ada", "age": 36}\n{"name": "Alan", "age": 41}\n',
    "Name the planets in order.",
    "How do I boil an egg?",
    "Who wrote Hamlet, and when?",
]


class Setting(msgspec.Struct, frozen=True):
    num_guesses: int
    batch: int
    chunk: int
    prefix_cache: bool
    pool: int


PLAIN = Setting(num_guesses=0, batch=1, chunk=512, prefix_cache=False, pool=400)
# The last pool holds about two of these texts: the others are preempted and computed again.
SETTINGS = [
    Setting(num_guesses=5, batch=1, chunk=512, prefix_cache=False, pool=400),
    Setting(num_guesses=0, batch=8, chunk=7, prefix_cache=True, pool=400),
    Setting(num_guesses=3, batch=8, chunk=16, prefix_cache=True, pool=400),
    Setting(num_guesses=7, batch=16, chunk=33, prefix_cache=False, pool=400),
    Setting(num_guesses=1, batch=8, chunk=11, prefix_cache=True, pool=24),
]


def load(directory: Path, dtype: torch.dtype) -> Decoder:
    torch.set_num_threads(2)
    return Decoder(
        parse_model_config(read_config(directory)),
        load_weights(directory),
        dtype=dtype,
        backend=make_backend("cpu"),
    )


async def generate(
    model: Decoder,
    tokenizer: Tokenizer,
    texts: list[str],
    setting: Setting,
    temperature: float,
    num_tokens: int,
) -> list[tuple[int, ...]]:
    config = EngineConfig(
        block_size=16,
        num_blocks=setting.pool,
        max_model_len=256,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        max_prefill_chunk=setting.chunk,
        enable_prefix_caching=setting.prefix_cache,
    )
    drafters: dict[str, Drafter] = {"ngram": NgramDrafter()}
    speculation = Speculation(drafter="ngram", max_draft_tokens=setting.num_guesses)
    done: list[tuple[int, ...]] = []
    async with serving(model, config, drafters=drafters, tokenizer=tokenizer) as served:
        for first in range(0, len(texts), setting.batch):
            requests = []
            for idx, text in enumerate(texts[first : first + setting.batch], first):
                requests += served.requests(
                    tokenizer.encode(text),
                    SamplingParams(
                        temperature=temperature, max_tokens=num_tokens, seed=idx, ignore_eos=True
                    ),
                    name=f"{idx}",
                    speculation=speculation,
                )
            done += [chunk.token_ids for chunk in await served.run(requests)]
        preempted = sum(record.num_preemptions for record in served.recorder.requests)
        assert (preempted > 0) == (setting.pool < 100 and len(texts) > 4)
    return done


async def count_flips(
    model: Decoder,
    tokenizer: Tokenizer,
    texts: list[str],
    settings: list[Setting],
    temperatures: list[float],
    num_tokens: int,
) -> tuple[int, int]:
    """(tokens compared, tokens that differ)."""
    compared = flips = 0
    for temperature in temperatures:
        expected = await generate(model, tokenizer, texts, PLAIN, temperature, num_tokens)
        for setting in settings:
            got = await generate(model, tokenizer, texts, setting, temperature, num_tokens)
            differ = sum(
                a != b
                for want, have in zip(expected, got, strict=True)
                for a, b in zip(want, have, strict=True)
            )
            compared += sum(len(text) for text in expected)
            flips += differ
            print(
                f"T={temperature} {setting}: {differ} flips, {compared} tokens so far", flush=True
            )
    return compared, flips


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
async def test_a_sample_of_the_demo_models_texts_replays(
    demo_model_dir: Path, dtype: torch.dtype
) -> None:
    model, tokenizer = load(demo_model_dir, dtype), Tokenizer.load(demo_model_dir)
    settings = [SETTINGS[2], SETTINGS[0]]
    compared, flips = await count_flips(model, tokenizer, TEXTS[2:6], settings, [0.0, 1.0], 12)
    assert (compared, flips) == (4 * 12 * 2 * 2, 0)
    del model
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
async def test_twenty_thousand_tokens_of_the_demo_model_replay(
    demo_model_dir: Path, dtype: torch.dtype
) -> None:
    model, tokenizer = load(demo_model_dir, dtype), Tokenizer.load(demo_model_dir)
    compared, flips = await count_flips(model, tokenizer, TEXTS, SETTINGS, [0.0, 0.7, 1.0], 84)
    print(f"{dtype}: {compared} tokens compared, {flips} flips")
    assert compared >= 20_000
    assert flips == 0

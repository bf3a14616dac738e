"""Exact replay on the demo model: bits, not tolerances. Counts tokens that differ; there are none.

The default run compares a sample; `pytest -m slow -s tests/test_demo_replay.py` compares 20,000
tokens in each dtype of the torch path and 100,000 in each of the native kernels.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

import msgspec
import pytest
import torch

from specserve.config import EngineConfig
from specserve.drafting import Drafter
from specserve.loading import AnyDecoder, load_model
from specserve.tokenizer import Tokenizer
from specserve.types import SamplingParams, Speculation
from specserve_drafts import DRAFTERS, DrafterResources
from specserve_kernels import native_library
from tests.engines import serving
from tests.guessers import make_guesser

pytestmark = [pytest.mark.demo, pytest.mark.timeout(14400)]
needs_native = pytest.mark.skipif(
    native_library.load() is None, reason=f"no native kernels: {native_library.why_not()}"
)
TORCH = [("fp32", "cpu"), ("bf16", "cpu")]
NATIVE = [("int8", "native"), ("bf16", "native")]

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
    """drafter: "none", "auto" (over suffix and ngram), or whose num_guesses to verify, no more than
    width per node; "tree" knows the text and branches beside it"""

    drafter: str
    num_guesses: int
    batch: int
    chunk: int
    prefix_cache: bool
    pool: int = 400
    width: int = 1


PLAIN = Setting("none", 0, batch=1, chunk=512, prefix_cache=False)
# The last pool holds about two of these texts: the others are preempted and computed again.
SETTINGS = [
    Setting("ngram", 5, batch=1, chunk=512, prefix_cache=False),
    Setting("none", 0, batch=8, chunk=7, prefix_cache=True),
    Setting("ngram", 3, batch=8, chunk=16, prefix_cache=True),
    Setting("ngram", 7, batch=16, chunk=33, prefix_cache=False),
    Setting("ngram", 1, batch=8, chunk=11, prefix_cache=True, pool=24),
]
# Every K from 1 to 7, chains and trees, the controller, batches of 1, 8 and 16, small chunks.
MANY_SETTINGS = [
    Setting("auto", 15, batch=1, chunk=512, prefix_cache=True),
    Setting("auto", 15, batch=8, chunk=16, prefix_cache=True),
    Setting("auto", 15, batch=16, chunk=33, prefix_cache=False),
    Setting("auto", 7, batch=16, chunk=11, prefix_cache=True, pool=24),
    Setting("suffix", 1, batch=8, chunk=7, prefix_cache=True),
    Setting("suffix", 2, batch=16, chunk=64, prefix_cache=False),
    Setting("suffix", 3, batch=16, chunk=512, prefix_cache=True, pool=24),
    Setting("ngram", 4, batch=8, chunk=33, prefix_cache=False),
    Setting("ngram", 5, batch=16, chunk=16, prefix_cache=True),
    Setting("suffix", 6, batch=16, chunk=5, prefix_cache=True, width=2),
    Setting("suffix", 7, batch=8, chunk=16, prefix_cache=False, width=4),
    Setting("tree", 6, batch=8, chunk=33, prefix_cache=True, width=2),
    Setting("tree", 7, batch=16, chunk=16, prefix_cache=False, width=2),
    Setting("tree", 15, batch=16, chunk=11, prefix_cache=True, width=2, pool=40),
]


def load(directory: Path, dtype: str, backend: str) -> AnyDecoder:
    torch.set_num_threads(2)
    return load_model(str(directory), dtype, backend, print).decoder


Texts = Mapping[tuple[int, ...], Seq[int]]  # prompt ids -> output ids


def drafters_of(
    setting: Setting, model: AnyDecoder, truth: Texts, config: EngineConfig
) -> dict[str, Drafter]:
    if setting.drafter == "tree":
        return {"scripted": make_guesser("tree", model, truth, config)}
    resources = DrafterResources(
        vocab_size=model.vocab_size, num_blocks=config.num_blocks, block_size=config.block_size
    )
    return {name: DRAFTERS[name](resources) for name in ("suffix", "ngram")}


async def generate(
    model: AnyDecoder,
    tokenizer: Tokenizer,
    texts: list[str],
    setting: Setting,
    temperature: float,
    num_tokens: int,
    truth: Texts,
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
    speculation = Speculation(
        drafter="scripted" if setting.drafter == "tree" else setting.drafter,
        max_draft_tokens=setting.num_guesses,
        draft_width=None if setting.drafter in ("none", "auto") else setting.width,
    )
    drafters = drafters_of(setting, model, truth, config)
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
        records = served.recorder.requests
        preempted = sum(record.num_preemptions for record in records)
        if setting.pool >= 100:
            assert preempted == 0
        drafted = sum(record.num_draft_tokens for record in records)
        accepted = sum(record.num_accepted_draft_tokens for record in records)
        print(f"accepted {accepted} of {drafted} guesses, {preempted} preemptions")
        if len(texts) * num_tokens > 1000:  # enough for what a setting is there for to happen
            assert (accepted > 0) == (setting.num_guesses > 0)
            assert (preempted > 0) == (setting.pool < 100)
    return done


async def count_flips(
    model: AnyDecoder,
    tokenizer: Tokenizer,
    texts: list[str],
    settings: list[Setting],
    temperatures: list[float],
    num_tokens: int,
) -> tuple[int, int]:
    """(tokens compared, tokens that differ)."""
    compared = flips = 0
    for temperature in temperatures:
        expected = await generate(model, tokenizer, texts, PLAIN, temperature, num_tokens, {})
        truth = {tuple(tokenizer.encode(t)): out for t, out in zip(texts, expected, strict=True)}
        for setting in settings:
            got = await generate(model, tokenizer, texts, setting, temperature, num_tokens, truth)
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


@pytest.mark.parametrize(
    ("dtype", "backend"), [*TORCH, *(pytest.param(*one, marks=needs_native) for one in NATIVE)]
)
async def test_a_sample_of_the_demo_models_texts_replays(
    demo_model_dir: Path, dtype: str, backend: str
) -> None:
    model, tokenizer = load(demo_model_dir, dtype, backend), Tokenizer.load(demo_model_dir)
    settings = [SETTINGS[2], SETTINGS[0], MANY_SETTINGS[1], MANY_SETTINGS[-3]]
    compared, flips = await count_flips(model, tokenizer, TEXTS[2:6], settings, [0.0, 1.0], 12)
    assert (compared, flips) == (4 * 12 * 4 * 2, 0)
    del model
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "backend"), TORCH)
async def test_twenty_thousand_tokens_of_the_demo_model_replay(
    demo_model_dir: Path, dtype: str, backend: str
) -> None:
    model, tokenizer = load(demo_model_dir, dtype, backend), Tokenizer.load(demo_model_dir)
    compared, flips = await count_flips(model, tokenizer, TEXTS, SETTINGS, [0.0, 0.7, 1.0], 84)
    print(f"{dtype} {backend}: {compared} tokens compared, {flips} flips")
    assert compared >= 20_000
    assert flips == 0


@needs_native
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "backend"), NATIVE)
async def test_a_hundred_thousand_tokens_of_the_native_kernels_replay(
    demo_model_dir: Path, dtype: str, backend: str
) -> None:
    model, tokenizer = load(demo_model_dir, dtype, backend), Tokenizer.load(demo_model_dir)
    compared, flips = await count_flips(
        model, tokenizer, TEXTS, MANY_SETTINGS, [0.0, 0.7, 1.0], 160
    )
    print(f"{dtype} {backend}: {compared} tokens compared, {flips} flips")
    assert compared >= 100_000
    assert flips == 0

"""The engine on Triton kernels, in the interpreter: a row stands alone, whatever else is computed.

The model is small, its kernels are those of real models. With -m gpu the same on a device.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from specserve.config import EngineConfig
from specserve.drafting import Drafter
from specserve.llm import LLM
from specserve.targets import make_chains
from specserve.types import SamplingParams, Speculation, TokenChunk
from specserve_drafts.draft_model import DraftModelDrafter
from tests.engines import Served, serving
from tests.guessers import make_guesser
from tests.interpreted_triton import ON_DEVICES, WHY_NOT_CPU, reachable
from tests.tiny_models import random_weights, tiny_config
from tests.training_world import a_target

from specserve.gpu.decoder import TritonDecoder  # isort: skip (needs triton)
from specserve.gpu.target import DeviceTarget  # isort: skip
from specserve_kernels.triton_kernels import compaction  # isort: skip

BLOCK = 4
NUM_TOKENS = 5
PROMPTS = [[5, 9, 5, 9, 5], list(range(20, 29))]
CONFIG = tiny_config(vocab=64, layers=2, hidden=32, heads=4, kv_heads=2)


def triton_decoder(device: str, kv_dtype: torch.dtype | None = None) -> TritonDecoder:
    return TritonDecoder(
        CONFIG,
        random_weights(CONFIG, seed=3),
        dtype=torch.float32,
        device=torch.device(device),
        kv_dtype=kv_dtype,
    )


def a_config(*, chunk: int = 64, pool: int = 64) -> EngineConfig:
    return EngineConfig(
        block_size=BLOCK,
        num_blocks=pool,
        max_model_len=32,
        max_num_seqs=4,
        max_num_batched_tokens=48,
        max_prefill_chunk=chunk,
        max_draft_tokens=6,
        enable_prefix_caching=True,
    )


@asynccontextmanager
async def on_device(
    decoder: TritonDecoder, config: EngineConfig, drafters: Mapping[str, Drafter] | None = None
) -> AsyncIterator[Served]:
    with ExitStack() as stack:

        def make_target(model: TritonDecoder, **sizes: int) -> DeviceTarget:
            sizes.pop("hidden_size")
            target = DeviceTarget(
                model,
                **sizes,
                max_sequences=config.max_num_seqs,
                max_guesses=config.max_draft_tokens,
                max_model_len=config.max_model_len,
            )
            stack.enter_context(reachable(target.kv_tensors))
            return target

        async with serving(decoder, config, drafters=drafters, make_target=make_target) as served:
            yield served


@dataclass(frozen=True)
class Setting:
    guesser: str = "none"
    num_guesses: int = 0
    width: int = 1
    batch: int = 2
    chunk: int = 64


async def texts(
    decoder: TritonDecoder,
    setting: Setting,
    truth: Mapping[tuple[int, ...], Seq[int]],
    params: SamplingParams,
) -> list[TokenChunk]:
    config = a_config(chunk=setting.chunk)
    drafters = {}
    if setting.guesser != "none":
        drafters = {setting.guesser: make_guesser(setting.guesser, decoder, truth, config)}
    if setting.guesser == "draft_model":  # as a server makes it
        drafters[setting.guesser] = DraftModelDrafter(
            decoder,
            vocab_size=CONFIG.vocab_size,
            num_blocks=config.num_blocks,
            block_size=BLOCK,
            chains=make_chains(config, decoder, CONFIG.vocab_size),
        )
    speculation = Speculation(
        drafter=setting.guesser,
        max_draft_tokens=setting.num_guesses,
        draft_width=setting.width,
    )
    done: list[TokenChunk] = []
    async with on_device(decoder, config, drafters) as served:
        for first in range(0, len(PROMPTS), setting.batch):
            requests = []
            for idx, prompt in enumerate(PROMPTS[first : first + setting.batch], first):
                own = msgspec.structs.replace(params, seed=idx)
                requests += served.requests(prompt, own, name=f"{idx}", speculation=speculation)
            done += await served.run(requests)
    return done


PLAIN = Setting(batch=1)
SETTINGS = [
    Setting("oracle", 3, chunk=4),
    Setting("tree", 4, width=2),
    Setting("draft_model", 2),
]


@ON_DEVICES
async def test_text_is_the_same_with_and_without_guesses_in_any_batch(device: str) -> None:
    decoder = triton_decoder(device)
    params = SamplingParams(temperature=0.8, max_tokens=NUM_TOKENS)
    plain = await texts(decoder, PLAIN, {}, params)
    truth = {tuple(p): chunk.token_ids for p, chunk in zip(PROMPTS, plain, strict=True)}
    for setting in SETTINGS:
        chunks = await texts(decoder, setting, truth, params)
        assert [c.token_ids for c in chunks] == [c.token_ids for c in plain], setting
        if setting.guesser in ("oracle", "tree"):
            accepted = sum(c.stats.num_accepted_draft_tokens for c in chunks if c.stats)
            assert accepted >= 2, setting


@ON_DEVICES
async def test_text_is_the_same_with_and_without_guesses_where_kv_is_fp8(device: str) -> None:
    """A tree, so that KV is moved as well; nothing but the last digits may be another's text."""
    decoder = triton_decoder(device, torch.float8_e4m3fn)
    params = SamplingParams(temperature=0.8, max_tokens=3)
    plain = await texts(decoder, PLAIN, {}, params)
    truth = {tuple(p): chunk.token_ids for p, chunk in zip(PROMPTS, plain, strict=True)}
    found = await texts(decoder, Setting("tree", 4, width=2), truth, params)
    assert [chunk.token_ids for chunk in found] == [chunk.token_ids for chunk in plain]
    assert decoder.kv_bytes_per_token() * 4 == triton_decoder(device).kv_bytes_per_token()


def test_llm_runs_on_the_kernels_and_says_the_same_as_with_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of a user: options, weights from files, memory, engine; greedy and sampled."""
    if WHY_NOT_CPU is not None:
        pytest.skip(WHY_NOT_CPU)
    directory = str(a_target(tmp_path / "model"))
    caches = compaction.cache_addresses
    with ExitStack() as stack:

        def watched(tensors: list[Tensor]) -> compaction.CacheAddresses:
            stack.enter_context(reachable(tensors))
            return caches(tensors)

        monkeypatch.setattr(compaction, "cache_addresses", watched)
        found = []
        for backend in ("triton", "reference"):
            with LLM(
                directory,
                backend=backend,
                dtype="fp32",
                drafters="none",
                kv_cache_gb=0.001,
                max_num_seqs=2,
                max_num_batched_tokens=16,
                max_draft_tokens=3,
                max_model_len=32,
            ) as llm:
                outputs = llm.generate(
                    [[1, 2, 1, 2, 1], [3, 4, 5]],
                    [
                        SamplingParams(temperature=t, max_tokens=4, seed=1, ignore_eos=True)
                        for t in (0.0, 0.9)
                    ],
                )
                found.append([output.outputs[0].token_ids for output in outputs])
        assert found[0] == found[1]

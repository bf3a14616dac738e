"""From a loaded model to the Target that runs its steps, and what that takes of a GPU's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch

from specserve.config import EngineConfig
from specserve.errors import ConfigError
from specserve.gpu.device_memory import peak_while
from specserve.kv_cache import KVCache
from specserve.loading import LoadedModel
from specserve.measuring import Measurable
from specserve.models.interface import CausalLM, ChainGrower
from specserve.target import HostTarget, Target

if TYPE_CHECKING:
    from specserve.gpu.chain import DeviceChains
    from specserve.gpu.decoder import TritonDecoder
    from specserve.gpu.target import DeviceTarget


def make_target(config: EngineConfig, loaded: LoadedModel) -> Target:
    """With a KV pool of config.num_blocks; ConfigError where a GPU has no room for it."""
    if loaded.uses_triton:
        return _device_target(config, loaded)
    return HostTarget(
        loaded.decoder,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        vocab_size=loaded.vocab_size,
        hidden_size=loaded.decoder.config.hidden_size,
    )


def make_chains(
    config: EngineConfig, decoder: CausalLM, vocab_size: int
) -> Callable[[KVCache], ChainGrower]:
    """What grows a draft model's chains on the device that it is on; it must be a TritonDecoder.

    vocab_size: of the target
    """
    from specserve.gpu.chain import DeviceChains  # needs triton

    return lambda kv_cache: DeviceChains(
        cast("TritonDecoder", decoder),
        kv_cache,
        vocab_size=vocab_size,
        max_sequences=config.max_num_seqs,
        max_guesses=max(1, config.max_draft_tokens),
        max_model_len=config.max_model_len,
    )


def measure_chains(config: EngineConfig, decoder: CausalLM, vocab_size: int) -> int:
    """Bytes of a GPU that the largest step of chains takes, choices and graph included."""

    def work() -> None:
        cache = decoder.new_kv_cache(1, config.block_size)
        cast("DeviceChains", make_chains(config, decoder, vocab_size)(cache)).run_largest()

    return peak_while(work)


def measurable(loaded: LoadedModel) -> Measurable:
    """The decoder as its steps run, for `measure_profile`."""
    if not loaded.uses_triton:
        return loaded.decoder
    from specserve.gpu.measured import MeasuredDecoder  # needs triton

    return MeasuredDecoder(cast("TritonDecoder", loaded.decoder))


def measure_steps(config: EngineConfig, loaded: LoadedModel) -> int:
    """Bytes of a GPU that the largest steps take beside the pool, sampling and graphs included.

    config: num_blocks is how many the measurement itself makes, at least 1
    """

    def work() -> None:
        _device_target(config, loaded).run_largest(config.max_num_batched_tokens)

    return peak_while(work)


def _device_target(config: EngineConfig, loaded: LoadedModel) -> DeviceTarget:
    from specserve.gpu.target import DeviceTarget  # needs triton

    try:
        return DeviceTarget(
            cast("TritonDecoder", loaded.decoder),
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            vocab_size=loaded.vocab_size,
            max_sequences=config.max_num_seqs,
            max_guesses=config.max_draft_tokens,
            max_model_len=config.max_model_len,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"the GPU has no room for a KV pool of {config.num_blocks} blocks ({error}): lower "
            "--gpu-memory-utilization or --kv-cache-gb, or free the GPU"
        ) from error

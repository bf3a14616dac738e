"""The composition root: the only module that knows every part and joins them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import torch

from specserve.admission import Limits
from specserve.config import EngineConfig
from specserve.drafting import Drafter
from specserve.engine import Engine
from specserve.errors import ConfigError
from specserve.gpu.device_memory import device_budget, peak_while
from specserve.kv_cache import KVCache
from specserve.loading import (
    NATIVE_DTYPES,
    AnyDecoder,
    LoadedModel,
    Say,
    check_backend,
    check_kv_cache_dtype,
    choose_dtype,
    load_model,
    use_threads,
)
from specserve.measuring import measure_profile
from specserve.memory import GIB, MemoryReport, growth_while, physical_memory, plan_memory
from specserve.models.interface import ChainGrower
from specserve.models.native import NativeDecoder
from specserve.options import EngineOptions
from specserve.runner import ModelRunner
from specserve.scheduler import MAX_SCORED_TOKENS
from specserve.speculation.costs import UNMEASURED
from specserve.speculation.recording import Recording
from specserve.speculation.speculator import Speculator
from specserve.targets import make_chains, make_target, measurable, measure_chains, measure_steps
from specserve.tokenizer import check_same_vocabulary
from specserve_drafts import DRAFTERS, DrafterResources, parse_drafter_spec
from specserve_drafts.head_files import Head, NativeForm, TargetParts
from specserve_drafts.heads import load_heads
from specserve_drafts.shipped import expand
from specserve_kernels.interface import PagedBatch
from specserve_observability.metrics import Metrics
from specserve_observability.recorder import Recorder

DEFAULT_KV_GB = 1.0  # in main memory, which others need, too
MODEL_DRAFTERS = ("draft_model", "pard")  # whole language models with the target's tokenizer

LEAST = {
    "threads": 0,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_prefill_chunk": 1,
    "max_waiting": 1,
    "block_size": 1,
    "draft_tokens": 0,
}


class Built(msgspec.Struct, frozen=True):
    engine: Engine
    model_path: Path
    memory: MemoryReport
    drafter_names: tuple[str, ...]


def build_engine(
    options: EngineOptions,
    *,
    recorder: Recorder | None = None,
    model_name: str | None = None,
    recording: Recording | None = None,
    say: Say = lambda line: None,
) -> Built:
    """Load everything, measure what must be measured, decide the block count.

    recording: where the choices of "auto" are kept for hindsight
    ConfigError or ModelError say what to change.
    """
    check_options(options)
    use_threads(options.threads)
    dtype = choose_dtype(options.dtype, options.backend, options.device)
    target = load_model(
        *(options.model, dtype, options.backend, say),
        device=options.device,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    drafts = load_draft_models(options, target, say)
    parts = _parts_for_heads(options, target)
    heads = load_heads(drafter_specs(options), parts, vocab_size=target.vocab_size)
    memory = _plan_blocks(options, target, drafts, heads)
    config = _engine_config(options, memory, target)
    drafters = _make_drafters(options, config, target, drafts, heads)
    names = tuple(drafters)
    speculator = _make_speculator(options, target, drafters, recording, say)
    runner = ModelRunner(make_target(config, target), speculator)
    engine = Engine(
        model_name=model_name or options.model,
        config=config,
        runner=runner,
        tokenizer=target.tokenizer,
        limits=Limits.of(
            config,
            vocab_size=target.vocab_size,
            eos_ids=target.tokenizer.eos_ids,
            drafters=("none", *names),
        ),
        recorder=recorder
        or Recorder(Metrics(drafters=names, max_draft_tokens=options.max_draft_tokens)),
    )
    return Built(engine, target.path, memory, names)


def drafter_specs(options: EngineOptions) -> list[tuple[str, str | None]]:
    """(name, argument) of every drafter to load, in order. ConfigError for unknown names."""
    return parse_drafter_spec(expand(options.drafters, options.model))


def check_options(options: EngineOptions) -> None:
    """ConfigError for what can be known to be wrong before anything is loaded."""
    for name, least in LEAST.items():
        value = getattr(options, name)  # the names are fields of EngineOptions
        if value < least:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} is {value}, it must be at least {least}")
    for name, value in (
        ("kv-cache-gb", options.kv_cache_gb),
        ("memory-gb", options.memory_gb),
        ("draft-sharpness", options.draft_sharpness),
        ("itl-target-ms", options.itl_target_ms),
        ("gpu-memory-utilization", options.gpu_memory_utilization),
    ):
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name} is {value}, it must be a number above 0")
    if options.gpu_memory_utilization > 1:
        raise ConfigError(
            f"--gpu-memory-utilization is {options.gpu_memory_utilization}, it must be at most 1"
        )
    if options.max_num_batched_tokens < options.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens is {options.max_num_batched_tokens}, it must be at least "
            f"--max-num-seqs ({options.max_num_seqs}): every decoding sequence needs one token"
        )
    if not 0 <= options.draft_tokens <= options.max_draft_tokens:
        raise ConfigError(
            f"--draft-tokens is {options.draft_tokens}, it must be from 0 to --max-draft-tokens "
            f"({options.max_draft_tokens})"
        )
    for name, argument in drafter_specs(options):
        if name in MODEL_DRAFTERS and not argument:
            raise ConfigError(f"--drafters {name} needs a model: {name}:PATH")
    check_backend(options.backend, options.device)
    check_kv_cache_dtype(options.kv_cache_dtype, options.backend, options.device)


def load_draft_models(
    options: EngineOptions, target: LoadedModel, say: Say
) -> Mapping[str, AnyDecoder]:
    """Decoders of drafters that are models, by path; same tokenizer checked id for id."""
    dtype = choose_dtype(options.draft_dtype, options.backend, options.device)
    loaded = {}
    for name, argument in drafter_specs(options):
        if name not in MODEL_DRAFTERS:
            continue
        assert argument  # check_options
        draft = load_model(
            *(argument, dtype, options.backend, say),
            device=options.device,
            kv_cache_dtype=options.kv_cache_dtype,
        )
        check_same_vocabulary(target.tokenizer, draft.tokenizer)
        loaded[argument] = draft.decoder
    return loaded


def _parts_for_heads(options: EngineOptions, target: LoadedModel) -> TargetParts:
    """What heads share with the target, and how native code packs them if the target is native."""
    if not isinstance(target.decoder, NativeDecoder):
        return target.parts
    dtype = NATIVE_DTYPES.get(choose_dtype(options.draft_dtype, options.backend))
    if dtype is None:
        return target.parts
    return msgspec.structs.replace(target.parts, native=NativeForm(dtype, torch.get_num_threads()))


def _make_drafters(
    options: EngineOptions,
    config: EngineConfig,
    target: LoadedModel,
    drafts: Mapping[str, AnyDecoder],
    heads: Mapping[str, Head],
) -> dict[str, Drafter]:
    drafters: dict[str, Drafter] = {}
    for name, argument in drafter_specs(options):
        if name == "none":
            continue
        resources = DrafterResources(
            argument=argument,
            vocab_size=target.vocab_size,
            model=drafts.get(argument or ""),
            chains=_chains_of(config, target, drafts.get(argument or "")),
            max_positions=_max_positions(drafts.get(argument or "")),
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            target=target.parts,
            head=heads.get(name),
        )
        try:
            drafters[name] = DRAFTERS[name](resources)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the GPU has no room for drafter {name} and its {config.num_blocks} KV blocks "
                f"({error}): lower --gpu-memory-utilization or --kv-cache-gb, or free the GPU"
            ) from error
    return drafters


def _chains_of(
    config: EngineConfig, target: LoadedModel, draft: AnyDecoder | None
) -> Callable[[KVCache], ChainGrower] | None:
    if draft is None or not target.uses_triton:  # one --device for both
        return None
    return make_chains(config, draft, target.vocab_size)


def _default_drafter(options: EngineOptions) -> str:
    names = [name for name, _ in drafter_specs(options) if name != "none"]
    if not names or options.speculation == "off":
        return "none"
    return "auto" if options.speculation == "auto" else names[0]


def _make_speculator(
    options: EngineOptions,
    target: LoadedModel,
    drafters: Mapping[str, Drafter],
    recording: Recording | None,
    say: Say,
) -> Speculator:
    """With the costs of this model on this machine, where there is anything to choose."""
    profile = UNMEASURED
    if drafters:
        started = time.perf_counter()
        profile = measure_profile(
            measurable(target),
            block_size=options.block_size,
            max_tokens=options.max_num_batched_tokens,
        )
        say(
            f"forward costs measured in {time.perf_counter() - started:.1f} s, ms by tokens: "
            + ", ".join(f"{c.num_tokens}: {1e3 * c.all_logits:.1f}" for c in profile.sizes)
        )
    return Speculator(
        drafters,
        vocab_size=target.vocab_size,
        profile=profile,
        itl_target=options.itl_target_ms and options.itl_target_ms / 1e3,
        sharpness=options.draft_sharpness,
        recording=recording,
    )


# ---- memory ------------------------------------------------------------------------------


def _plan_blocks(
    options: EngineOptions,
    target: LoadedModel,
    drafts: Mapping[str, AnyDecoder],
    heads: Mapping[str, Head],
) -> MemoryReport:
    models = [target.decoder, *drafts.values()]
    activation = sum(measure_activation(model, options) for model in drafts.values())
    if options.device == "cuda":  # graphs and the sampler's buffers live there, too
        smallest = _smallest_config(options, target)
        activation += measure_steps(smallest, target)
        activation += sum(
            measure_chains(smallest, drafts[argument or ""], target.vocab_size)
            for name, argument in drafter_specs(options)
            if name == "draft_model"
        )
    else:
        activation += measure_activation(target.decoder, options)
    kv_limit = options.kv_cache_gb
    if kv_limit is None:
        kv_limit = DEFAULT_KV_GB if options.device == "cpu" else math.inf
    budget = _memory_budget(options)
    return plan_memory(
        budget=budget,
        weights=sum(model.weight_bytes() for model in models)
        + sum(head.weight_bytes() for head in heads.values()),
        activation=activation,
        kv_bytes_per_token=sum(model.kv_bytes_per_token() for model in models)
        + sum(head.kv_bytes_per_token(options.block_size) for head in heads.values()),
        block_size=options.block_size,
        kv_limit=int(min(kv_limit * GIB, budget)),
    )


def _smallest_config(options: EngineOptions, target: LoadedModel) -> EngineConfig:
    """Of the steps that will be served, with next to no pool."""
    longest = target.decoder.max_position_embeddings
    return _config_of(
        options, num_blocks=1, max_model_len=min(options.max_model_len or longest, longest)
    )


def _memory_budget(options: EngineOptions) -> int:
    """Bytes for weights, steps and KV pool; on a GPU its weights are there already."""
    if options.memory_gb:
        return int(options.memory_gb * GIB)
    if options.device == "cuda":
        return device_budget(options.gpu_memory_utilization)
    return physical_memory() // 2


def measure_activation(model: AnyDecoder, options: EngineOptions) -> int:
    """Bytes by which the process grows in the largest possible step; warms the kernels up, too."""
    num_tokens = options.max_num_batched_tokens
    num_blocks = -(-num_tokens // options.block_size)
    cache = model.new_kv_cache(num_blocks, options.block_size)
    for tensor in (cache.keys, cache.values):
        tensor.fill_(0)  # the pool's own memory is counted elsewhere: make it present now
    ids = torch.zeros(num_tokens, dtype=torch.int64)
    batch = PagedBatch(
        query_start_loc=(0, num_tokens),
        context_lens=(0,),
        block_tables=(tuple(range(num_blocks)),),
        parents=(None,),
        block_size=options.block_size,
    )
    num_chosen = options.max_num_seqs * (1 + options.max_draft_tokens)
    num_logits = min(num_tokens, num_chosen + MAX_SCORED_TOKENS)

    def step() -> None:
        with torch.inference_mode():
            model.forward(ids, torch.arange(num_tokens), batch, cache, range(num_logits))

    return peak_while(step) if options.device == "cuda" else growth_while(step)


def _engine_config(
    options: EngineOptions, memory: MemoryReport, target: LoadedModel
) -> EngineConfig:
    longest = min(target.decoder.max_position_embeddings, memory.num_tokens)
    asked = options.max_model_len
    if asked is not None and not 1 <= asked <= longest:
        raise ConfigError(
            f"--max-model-len is {asked}, it must be from 1 to {longest}: the model's limit is "
            f"{target.decoder.max_position_embeddings} and the KV pool holds {memory.num_tokens} "
            "tokens (raise --kv-cache-gb)"
        )
    return _config_of(options, num_blocks=memory.num_blocks, max_model_len=asked or longest)


def _config_of(options: EngineOptions, *, num_blocks: int, max_model_len: int) -> EngineConfig:
    return EngineConfig(
        block_size=options.block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_prefill_chunk=options.max_prefill_chunk,
        max_waiting=options.max_waiting,
        enable_prefix_caching=options.prefix_caching,
        default_drafter=_default_drafter(options),
        default_draft_tokens=options.draft_tokens,
        max_draft_tokens=options.max_draft_tokens,
        default_verify=options.verify,
    )


def _max_positions(model: AnyDecoder | None) -> int | None:
    return None if model is None else model.max_position_embeddings

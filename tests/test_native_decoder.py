"""The native decoder: the same model as the torch decoder, and bits that depend on a row alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specserve.errors import ModelError
from specserve.models.config import ModelConfig, RopeConfig
from specserve.models.decoder import Decoder
from specserve.models.interface import Capture
from specserve.models.native import NativeDecoder, pack_model
from specserve.models.quantize import quantize_rows
from specserve.models.rope import cos_sin, inverse_frequencies, rotate
from specserve_kernels import PagedBatch, make_backend, native_library
from specserve_kernels.native_step import Dtype
from tests.test_numerics import (
    Texts,
    in_random_portions,
    num_rows_that_differ,
    some_sequences,
    token_by_token,
)
from tests.tiny_models import random_weights, tiny_config

pytestmark = pytest.mark.skipif(
    native_library.load() is None, reason=f"no native kernels: {native_library.why_not()}"
)

DTYPES: list[Dtype] = ["fp32", "bf16", "int8"]
YARN = RopeConfig(kind="yarn", theta=5000.0, factor=4.0, original_max_positions=64)
LLAMA3 = RopeConfig(kind="llama3", factor=8.0, original_max_positions=64)
ALL_BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}

CONFIGS: dict[str, ModelConfig] = {
    "plain": tiny_config(),
    "tied": tiny_config(tied=True),
    "odd widths": tiny_config(hidden=60, heads=6, kv_heads=3, intermediate=33, vocab=67),
    "wide heads": tiny_config(hidden=64, heads=6, kv_heads=2, head_dim=64, intermediate=96),
    "heads of 128": tiny_config(hidden=64, heads=2, kv_heads=1, head_dim=128),
    "window": tiny_config(window=20),
    "one layer of two has a window": msgspec.structs.replace(
        tiny_config(), sliding_windows=(None, 9)
    ),
    "biases": msgspec.structs.replace(tiny_config(intermediate=40), **ALL_BIASES),
    "qk norm": msgspec.structs.replace(tiny_config(), qk_norm=True),
    "yarn": msgspec.structs.replace(tiny_config(), rope=YARN),
    "llama3": msgspec.structs.replace(tiny_config(), rope=LLAMA3),
    "linear rope": msgspec.structs.replace(
        tiny_config(), rope=RopeConfig(kind="linear", factor=3.0)
    ),
}


def weights_of(config: ModelConfig) -> dict[str, Tensor]:
    """Random fp32 weights that bf16 holds exactly, with what the config's options add."""
    weights = random_weights(config)
    generator = torch.Generator().manual_seed(1)
    extra: dict[str, int] = {}
    for idx in range(config.num_layers):
        attention, mlp = f"model.layers.{idx}.self_attn", f"model.layers.{idx}.mlp"
        if config.qkv_bias:
            extra[f"{attention}.q_proj.bias"] = config.num_heads * config.head_dim
            extra[f"{attention}.k_proj.bias"] = config.num_kv_heads * config.head_dim
            extra[f"{attention}.v_proj.bias"] = config.num_kv_heads * config.head_dim
        if config.output_bias:
            extra[f"{attention}.o_proj.bias"] = config.hidden_size
        if config.mlp_bias:
            extra[f"{mlp}.gate_proj.bias"] = config.intermediate_size
            extra[f"{mlp}.up_proj.bias"] = config.intermediate_size
            extra[f"{mlp}.down_proj.bias"] = config.hidden_size
        if config.qk_norm:
            extra[f"{attention}.q_norm.weight"] = config.head_dim
            extra[f"{attention}.k_norm.weight"] = config.head_dim
    for name, size in extra.items():
        weights[name] = 0.5 + torch.randn(size, generator=generator, dtype=torch.float64)
    return {name: tensor.bfloat16().float() for name, tensor in weights.items()}


def a_native(config: ModelConfig, dtype: Dtype = "fp32", threads: int = 2) -> NativeDecoder:
    return NativeDecoder(config, weights_of(config), dtype=dtype, threads=threads)


def a_torch(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(config, weights_of(config), dtype=dtype, backend=make_backend("reference"))


def run(
    decoder: NativeDecoder | Decoder, batch: PagedBatch, ids: Tensor, positions: Tensor
) -> Tensor:
    """Logits of all rows, over a cache whose context is zeros."""
    num_blocks = 1 + max((max(table, default=0) for table in batch.block_tables), default=0)
    cache = decoder.new_kv_cache(num_blocks, batch.block_size)
    with torch.inference_mode():
        return decoder.forward(ids, positions, batch, cache, range(len(ids)))


def a_prompt(length: int, vocab: int = 64, seed: int = 0) -> tuple[Tensor, Tensor, PagedBatch]:
    """ids, positions and the batch of one sequence from its start, blocks of 4."""
    ids = torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed))
    blocks = tuple(range(-(-length // 4)))
    return ids, torch.arange(length), PagedBatch((0, length), (0,), (blocks,), (None,), 4)


# ---- the same model ------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_fp32_gives_the_torch_decoders_logits(name: str) -> None:
    config = CONFIGS[name]
    ids, positions, batch = a_prompt(90, config.vocab_size)
    expected = run(a_torch(config), batch, ids, positions)
    actual = run(a_native(config), batch, ids, positions)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-4)


@st.composite
def some_batch(draw: st.DrawFn) -> tuple[PagedBatch, list[int]]:
    """Ragged segments, trees among them, in shuffled blocks; and each row's position."""
    size = draw(st.sampled_from([1, 4, 16]))
    starts, contexts, parents, positions, lengths = [0], [], [], [], []
    for _ in range(draw(st.integers(1, 4))):
        context, count = draw(st.integers(0, 40)), draw(st.integers(1, 20))
        depths, tree = list(range(count)), None
        if draw(st.booleans()):
            tree = tuple(draw(st.integers(-1, idx - 1)) for idx in range(count))
            depths = []
            for parent in tree:
                depths.append(depths[parent] + 1 if parent >= 0 else 0)
        starts.append(starts[-1] + count)
        contexts.append(context)
        parents.append(tree)
        positions += [context + depth for depth in depths]
        lengths.append(-(-(context + count) // size))
    blocks = draw(st.permutations(range(sum(lengths) + 2)))
    tables = [tuple(blocks.pop() for _ in range(length)) for length in lengths]
    batch = PagedBatch(tuple(starts), tuple(contexts), tuple(tables), tuple(parents), size)
    return batch, positions


@settings(max_examples=40, deadline=None)
@given(case=some_batch(), window=st.sampled_from([None, 7]), seed=st.integers(0, 99))
def test_fp32_gives_the_torch_decoders_logits_on_ragged_batches_with_trees(
    case: tuple[PagedBatch, list[int]], window: int | None, seed: int
) -> None:
    batch, positions = case
    config = tiny_config(window=window)
    ids = torch.randint(64, (len(positions),), generator=torch.Generator().manual_seed(seed))
    expected = run(a_torch(config), batch, ids, torch.tensor(positions))
    actual = run(a_native(config), batch, ids, torch.tensor(positions))
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-4)


def as_int8(x: Tensor) -> Tensor:
    """The nearest of 255 levels per row, amax / 127 apart, by the torch path's own rule."""
    rows, scales = quantize_rows(x)
    return rows * scales[:, None].to(x.dtype)


ROUNDING: dict[Dtype, Callable[[Tensor], Tensor]] = {
    "fp32": lambda x: x,
    "bf16": lambda x: x.bfloat16().to(x.dtype),
    "int8": as_int8,
}


def readable_logits(config: ModelConfig, dtype: Dtype, ids: Tensor) -> Tensor:
    """The arithmetic in fp64, dense, one sequence: only matrix inputs and KV are rounded."""
    weights = {name: tensor.double() for name, tensor in weights_of(config).items()}
    rounding = ROUNDING[dtype]
    kv_rounding = ROUNDING["fp32" if dtype == "fp32" else "bf16"]
    inv_freq, factor = inverse_frequencies(config.rope, config.head_dim)
    cos, sin = cos_sin(torch.arange(len(ids)), inv_freq, factor, torch.float64)

    def linear(x: Tensor, name: str) -> Tensor:
        return rounding(x) @ rounding(weights[f"{name}.weight"]).T

    def norm(x: Tensor, name: str) -> Tensor:
        weight = weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, config.rms_norm_eps)

    def heads(x: Tensor) -> Tensor:
        return x.view(len(ids), -1, config.head_dim)

    x = weights["model.embed_tokens.weight"][ids]
    for idx in range(config.num_layers):
        layer = f"model.layers.{idx}"
        y = norm(x, f"{layer}.input_layernorm")
        query, key, value = (heads(linear(y, f"{layer}.self_attn.{n}_proj")) for n in "qkv")
        seen = F.scaled_dot_product_attention(
            rotate(query, cos, sin).transpose(0, 1),
            kv_rounding(rotate(key, cos, sin)).transpose(0, 1),
            kv_rounding(value).transpose(0, 1),
            is_causal=True,
            enable_gqa=True,
        )
        x = x + linear(seen.transpose(0, 1).flatten(1), f"{layer}.self_attn.o_proj")
        y = norm(x, f"{layer}.post_attention_layernorm")
        inner = F.silu(linear(y, f"{layer}.mlp.gate_proj")) * linear(y, f"{layer}.mlp.up_proj")
        x = x + linear(inner, f"{layer}.mlp.down_proj")
    tied = config.tie_word_embeddings
    return linear(norm(x, "model.norm"), "model.embed_tokens" if tied else "lm_head")


def share_of_equal_rows(left: Tensor, right: Tensor) -> float:
    """Of rows [T, V] whose logits agree but for the last digits of fp32."""
    return float(((left - right).abs().amax(1) < 1e-4).float().mean())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["plain", "tied", "wide heads", "odd widths", "llama3"])
def test_each_dtype_computes_what_the_readable_model_says(name: str, dtype: Dtype) -> None:
    """One layer: where fp32 and fp64 fall on two sides of a rounding a number moves by a whole
    step, and a second layer would carry that into every later row."""
    config = msgspec.structs.replace(CONFIGS[name], num_layers=1, sliding_windows=(None,))
    ids, positions, batch = a_prompt(90, config.vocab_size)
    expected = readable_logits(config, dtype, ids).float()
    actual = run(a_native(config, dtype), batch, ids, positions)
    assert share_of_equal_rows(actual, expected) > 0.89  # 81 of 90 on some CPUs' torch
    if dtype != "fp32":  # the rounding is not lost in the tolerance
        assert share_of_equal_rows(actual, readable_logits(config, "fp32", ids).float()) == 0


def test_int8_agrees_with_the_torch_decoders_int8() -> None:
    config = msgspec.structs.replace(CONFIGS["tied"], num_layers=1, sliding_windows=(None,))
    ids, positions, batch = a_prompt(90)
    expected = run(a_torch(config, torch.int8), batch, ids, positions)
    assert share_of_equal_rows(run(a_native(config, "int8"), batch, ids, positions), expected) > 0.9


# ---- bits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["plain", "odd widths", "wide heads", "window", "biases"])
def test_chunks_batch_mates_and_threads_change_no_bit(name: str, dtype: Dtype) -> None:
    config = CONFIGS[name]
    chance = random.Random(0)
    sequences = some_sequences(chance, count=4, longest=150)
    alone = token_by_token(Texts(a_native(config, dtype, threads=1), sequences))
    for threads in (1, 2, 3):
        decoder = a_native(config, dtype, threads)
        for most in (4, 40, 150):
            together = in_random_portions(Texts(decoder, sequences), chance, most)
            assert num_rows_that_differ(alone, together) == 0, (threads, most)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["plain", "odd widths", "biases"])
def test_a_prompt_in_one_step_has_the_bits_of_small_chunks(name: str, dtype: Dtype) -> None:
    """Threads share a long step by rows, a shorter one by columns, the shortest by neither."""
    config, length = CONFIGS[name], 203
    ids, positions, whole = a_prompt(length, config.vocab_size)
    alone = a_native(config, dtype, threads=1)
    cache = alone.new_kv_cache(-(-length // 4), 4)
    chunks = []
    for start, end in pairwise([0, 1, 4, 9, 40, 90, 150, length]):
        batch = PagedBatch((0, end - start), (start,), whole.block_tables, (None,), 4)
        with torch.inference_mode():
            rows = range(end - start)
            chunks.append(
                alone.forward(ids[start:end], positions[start:end], batch, cache, rows).clone()
            )
    for threads in (1, 2, 3):
        assert torch.equal(
            run(a_native(config, dtype, threads), whole, ids, positions), torch.cat(chunks)
        ), threads


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_trees_node_has_the_bits_of_the_same_token_in_a_chain(dtype: Dtype) -> None:
    """Also after its path's KV has moved to where a chain has it."""
    decoder = a_native(CONFIGS["wide heads"], dtype)
    context = [random.Random(3).randrange(64) for _ in range(45)]
    guesses, parents = [7, 8, 9, 10, 11], (-1, 0, 0, 2, 2)
    path = [0, 2, 4]
    table = tuple(range(14))

    def step(cache: object, ids: list[int], first: int, parents: tuple[int, ...] | None) -> Tensor:
        depths = list(range(len(ids)))
        if parents is not None:
            depths = []
            for parent in parents:
                depths.append(depths[parent] + 1 if parent >= 0 else 0)
        batch = PagedBatch((0, len(ids)), (first,), (table,), (parents,), 4)
        positions = torch.tensor([first + depth for depth in depths])
        with torch.inference_mode():
            return decoder.forward(torch.tensor(ids), positions, batch, cache, range(len(ids)))

    chain_cache, tree_cache = decoder.new_kv_cache(14, 4), decoder.new_kv_cache(14, 4)
    for cache in (chain_cache, tree_cache):
        step(cache, context, 0, None)
    chain = step(chain_cache, [guesses[node] for node in path], 45, None)
    tree = step(tree_cache, guesses, 45, parents)
    assert torch.equal(tree[path], chain)
    tree_cache.move([45 + node for node in path], [45, 46, 47])
    assert torch.equal(step(tree_cache, [1], 48, None), step(chain_cache, [1], 48, None))


# ---- states, packed weights, errors -----------------------------------------------------------


@pytest.mark.parametrize("layers", [(0,), (1, 2), (0, 1, 2)])
def test_states_are_the_residual_stream_entering_each_layer(layers: tuple[int, ...]) -> None:
    config = CONFIGS["plain"]
    ids, positions, batch = a_prompt(30)
    native, reference = a_native(config), a_torch(config)
    states = [torch.full((30, len(layers), 32), torch.nan) for _ in range(2)]
    with torch.inference_mode():
        logits, _ = (
            decoder.forward(
                ids,
                positions,
                batch,
                decoder.new_kv_cache(8, 4),
                [29, 3],
                capture=Capture(layers, buffer),
            )
            for decoder, buffer in zip((native, reference), states, strict=True)
        )
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=1e-4)
    assert torch.equal(logits, run(native, batch, ids, positions)[[29, 3]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_weights_can_be_mapped_from_a_file(dtype: Dtype, tmp_path: Path) -> None:
    config = CONFIGS["biases"]
    packed = pack_model(config, weights_of(config), dtype)
    mapped = {}
    for idx, (name, tensor) in enumerate(packed.items()):
        path = tmp_path / str(idx)
        path.write_bytes(tensor.view(torch.uint8).numpy().tobytes())
        flat = np.memmap(path, dtype=np.uint8, mode="c")
        mapped[name] = torch.from_numpy(flat).view(tensor.dtype).view(tensor.shape)
    ids, positions, batch = a_prompt(20)
    decoder = NativeDecoder.from_packed(config, mapped, dtype, threads=2)
    expected = run(a_native(config, dtype), batch, ids, positions)
    assert torch.equal(run(decoder, batch, ids, positions), expected)


def test_a_step_says_where_its_time_went() -> None:
    decoder = a_native(CONFIGS["plain"])
    ids, positions, batch = a_prompt(50)
    run(decoder, batch, ids, positions)
    phases = decoder.last_step_phases()
    parts = [phases.gemm, phases.head, phases.attention, phases.rest]
    assert min(parts) > 0
    assert sum(parts) <= phases.total


def test_positions_beyond_the_first_rope_tables_are_turned_as_well() -> None:
    config = CONFIGS["plain"]
    ids, _, batch = a_prompt(5)
    positions = torch.arange(3000, 3005)
    expected = run(a_torch(config), batch, ids, positions)
    actual = run(a_native(config), batch, ids, positions)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-4)


def test_a_missing_or_unknown_tensor_is_named() -> None:
    weights = weights_of(CONFIGS["plain"])
    unknown = {**weights, "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}
    with pytest.raises(ModelError, match="has no place for"):
        NativeDecoder(CONFIGS["plain"], unknown, dtype="int8", threads=1)
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj"):
        NativeDecoder(CONFIGS["plain"], weights, dtype="int8", threads=1)

"""int8 matrices: what their products are, bit for bit, and what they cost a model."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from specserve.loading import choose_dtype, load_model
from specserve.models.interface import CausalLM
from specserve.models.linear import RowInvariantLinear
from specserve.models.native import NativeDecoder
from specserve.models.quantize import (
    Int8Weight,
    exact_int_matmul,
    int_matmul,
    mix_rows,
    quantize_rows,
)
from specserve.perplexity import score, summarise
from specserve.types import SamplingParams, Speculation
from specserve_drafts.draft_model import DraftModelDrafter
from specserve_kernels import native_library
from tests.build import a_config
from tests.engines import serving
from tests.native_products import I8, packed
from tests.test_numerics import (
    Texts,
    in_random_portions,
    num_rows_that_differ,
    some_sequences,
    token_by_token,
)
from tests.tiny_models import random_weights, tiny_config, tiny_decoder

needs_native = pytest.mark.skipif(
    native_library.load() is None, reason=str(native_library.why_not())
)
SHAPES = [(1, 1, 1), (5, 33, 60), (16, 96, 64), (3, 48, 1536), (40, 20, 2100)]  # M, out, in


def hadamard(size: int) -> Tensor:
    """[size, size] fp64 by Sylvester's rule, orthogonal."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


def some_rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_mixing_is_hadamards_matrix_on_each_block_of_64_inputs() -> None:
    x = some_rows(7, 150)
    padded = torch.nn.functional.pad(x, (0, 42)).double()
    expected = (padded.view(7, 3, 64) @ hadamard(64)).view(7, 192)
    torch.testing.assert_close(mix_rows(x).double(), expected, rtol=0, atol=1e-6)


def test_mixing_both_sides_changes_no_product() -> None:
    x, weight = some_rows(9, 200), some_rows(30, 200, seed=1)
    mixed = mix_rows(x).double() @ mix_rows(weight).double().T
    torch.testing.assert_close(mixed, x.double() @ weight.double().T, rtol=0, atol=1e-4)


def test_an_outlier_costs_its_row_little_because_it_is_spread() -> None:
    """Without mixing, one input of 100 leaves the others, of size 1, two levels in all."""
    x, weight = some_rows(1, 576), some_rows(64, 576, seed=1)
    x[0, 17] = 100
    weight[:, 17] = 0
    exact = x @ weight.T
    error = (Int8Weight(weight).apply(x) - exact).norm() / exact.norm()
    assert error < 0.1
    plain = (x * 127 / 100).round() * 100 / 127
    assert ((plain - x) @ weight.T).norm() / exact.norm() > 0.2


def test_rounded_rows_are_within_half_a_level_of_what_they_stand_for() -> None:
    x = some_rows(50, 130) * torch.logspace(-20, 20, 50)[:, None]
    rows, scales = quantize_rows(x)
    assert rows.dtype == torch.int8
    assert rows.abs().amax() == 127
    off = rows.double() * scales[:, None].double() - mix_rows(x).double()
    assert bool((off.abs() <= scales[:, None].double() * 0.5001).all())


def test_zeros_stay_zeros_and_what_is_no_number_poisons_its_own_row_alone() -> None:
    weight, x = Int8Weight(some_rows(20, 70)), some_rows(5, 70, seed=1)
    clean = weight.apply(x)
    x[0], x[1, 3], x[2, 69], x[3] = 0, torch.nan, torch.inf, 1e-38
    out = weight.apply(x)
    assert bool((out[[0, 3]] == 0).all())
    assert bool(out[[1, 2]].isnan().all())
    assert torch.equal(out[4], clean[4])


@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), SHAPES)
def test_integer_sums_are_exact_at_their_largest(
    num_rows: int, num_outputs: int, num_inputs: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randint(0, 2, (rows, num_inputs), generator=generator) * 254 - 127
        for rows in (num_rows, num_outputs)
    )
    x[0] = 127
    weight[0] = 127
    expected = (x.double() @ weight.double().T).to(torch.int32)
    for multiply in (int_matmul, exact_int_matmul):
        assert torch.equal(multiply(x.to(torch.int8), weight.to(torch.int8)), expected)


@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), SHAPES)
def test_a_product_is_the_sum_times_the_rows_scale_times_the_columns(
    num_rows: int, num_outputs: int, num_inputs: int
) -> None:
    x, weight = some_rows(num_rows, num_inputs), some_rows(num_outputs, num_inputs, seed=1)
    (rows, row_scales), (columns, column_scales) = quantize_rows(x), quantize_rows(weight)
    sums = (rows.long() @ columns.long().T).numpy().astype(np.float32)
    expected = sums * row_scales.numpy()[:, None] * column_scales.numpy()
    assert np.array_equal(Int8Weight(weight).apply(x).numpy(), expected)


@needs_native
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), SHAPES)
def test_native_products_have_the_same_bits(
    num_rows: int, num_outputs: int, num_inputs: int
) -> None:
    x, weight = some_rows(num_rows, num_inputs), some_rows(num_outputs, num_inputs, seed=1)
    x[0] *= 1e6
    native = packed(I8, weight.numpy()).product(x.numpy())
    assert np.array_equal(native, Int8Weight(weight).apply(x).numpy())


def test_every_number_of_rows_is_one_call_and_nothing_is_measured() -> None:
    weight = Int8Weight(some_rows(96, 60))
    linear = RowInvariantLinear([weight])
    assert set(range(1, 17)) <= set(linear.call_sizes)
    x = some_rows(600, 60, seed=1)
    whole = linear(x, weight)
    for count in (1, 3, 17, 40, 513):
        assert torch.equal(linear(x[600 - count :], weight), whole[600 - count :])


def test_logits_of_an_int8_model_do_not_depend_on_chunks_and_batch_mates() -> None:
    decoder = tiny_decoder(dtype=torch.int8)
    chance = random.Random(0)
    sequences = some_sequences(chance, count=4, longest=100)
    alone = token_by_token(Texts(decoder, sequences))
    for most in (4, 40, 150):
        together = in_random_portions(Texts(decoder, sequences), chance, most)
        assert num_rows_that_differ(alone, together) == 0, most


def test_an_int8_model_is_near_the_model_and_keeps_its_kv_in_bf16() -> None:
    sequences = some_sequences(random.Random(1), count=2, longest=60)
    int8, exact = tiny_decoder(dtype=torch.int8), tiny_decoder(dtype=torch.float64)
    for near, right in zip(
        token_by_token(Texts(int8, sequences)), token_by_token(Texts(exact, sequences)), strict=True
    ):
        assert float((near - right).abs().mean() / right.abs().mean()) < 0.1
    assert int8.new_kv_cache(2, 4).keys.dtype == torch.bfloat16
    assert int8.kv_bytes_per_token() == exact.kv_bytes_per_token() // 4


def test_auto_is_int8_with_native_kernels_only() -> None:
    assert choose_dtype("auto", "cpu") in ("bf16", "fp32")
    assert choose_dtype("int8", "cpu") == "int8"
    if native_library.load() is not None:
        assert choose_dtype("auto", "native") == "int8"


# ---- perplexity --------------------------------------------------------------------------


def test_perplexity_is_that_of_every_token_but_a_windows_first() -> None:
    decoder = tiny_decoder()
    (ids,) = some_sequences(random.Random(2), count=1, longest=400)
    ids = (ids * 400)[:301]
    scores = score(decoder, ids, window=150)
    expected = []
    for start in (0, 150):  # a third window holds one token: nothing to predict from it
        window = ids[start : start + 150]
        (logits,) = token_by_token(Texts(decoder, [window]))
        logprobs = logits[:-1].log_softmax(1)
        expected.append(-logprobs.gather(1, torch.tensor(window[1:])[:, None])[:, 0])
    torch.testing.assert_close(scores.nll, torch.cat(expected))
    same = summarise("fp64", scores, scores)
    assert (same.num_tokens, same.ratio, same.ratio_error, same.same_argmax) == (298, 1, 0, 1)


@needs_native
@pytest.mark.demo
def test_int8_costs_the_demo_model_at_most_one_percent_of_perplexity(demo_model_dir: Path) -> None:
    """Rounding rows without mixing them first costs 3.5 to 4 %."""
    text = (Path(__file__).parent.parent / "specserve" / "README.md").read_text()
    bf16, int8 = (
        load_model(str(demo_model_dir), dtype, "native", lambda line: None)
        for dtype in ("bf16", "int8")
    )
    ids = bf16.tokenizer.encode(text)[:2048]
    found = summarise("int8", score(int8.decoder, ids, 512), score(bf16.decoder, ids, 512))
    assert found.ratio - 2 * found.ratio_error < 1.01, found


# ---- two models, two dtypes --------------------------------------------------------------


async def replies(target: CausalLM, draft: CausalLM | None) -> tuple[list[tuple[int, ...]], int]:
    """Token ids of six texts at two temperatures, and how many guesses were right."""
    config = a_config(blocks=128, max_num_seqs=4)
    drafters = {}
    if draft is not None:
        drafters["draft_model"] = DraftModelDrafter(
            draft, vocab_size=64, num_blocks=config.num_blocks, block_size=config.block_size
        )
    async with serving(target, config, drafters=drafters) as served:
        requests = []
        for idx in range(6):
            requests += served.requests(
                [5 + idx, 9, 11, 5 + idx],
                SamplingParams(temperature=0.7 * (idx % 2), max_tokens=24, seed=idx),
                name=f"{idx}",
                speculation=Speculation(drafter="draft_model" if draft else "none"),
            )
        chunks = await served.run(requests)
    right = sum(chunk.stats.num_accepted_draft_tokens for chunk in chunks if chunk.stats)
    return [chunk.token_ids for chunk in chunks], right


@needs_native
@pytest.mark.parametrize("draft_dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
async def test_a_draft_of_another_dtype_guesses_for_an_int8_target_and_changes_no_text(
    draft_dtype: torch.dtype,
) -> None:
    config = tiny_config()
    target = NativeDecoder(config, random_weights(config), dtype="int8", threads=1)
    plain, _ = await replies(target, None)
    guessed, right = await replies(target, tiny_decoder(dtype=draft_dtype))
    assert guessed == plain
    assert right > 40  # the same weights: of up to 144 tokens many must be guessed

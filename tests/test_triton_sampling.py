"""Sampling in Triton: the bits of numpy's noise, and the very tokens that the engine chooses."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from specserve.noise import Noise, Purpose, gumbel_of, uniform
from specserve.sampler import RowError, choose_row_in_numpy, edited
from tests.interpreted_triton import ON_DEVICES
from tests.triton_rows import a_random_row, as_row, choose, some_logits

import triton  # isort: skip (tests.interpreted_triton says where it is missing)
import triton.language as tl  # isort: skip

from specserve_kernels.triton_kernels import masks, noise, reference_sampling  # isort: skip
from specserve_kernels.triton_kernels.rows import Row, pack_rows  # isort: skip

KEYS = [(0, 0), (5, 77), (-1, 3), (2**64 - 1, 3), (-(2**63), 2**62)]
NUM_BATCHES, NUM_MORE = 16, 200  # of ragged batches: by default, and with -m slow


@triton.jit
def _noise_kernel(
    seeds_ptr, positions_ptr, cells_ptr, same_cells_ptr, uniforms_ptr, gumbels_ptr, bounds_ptr,
    PURPOSE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.arange(0, 1) + tl.program_id(0)
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    key_0, key_1 = noise.load_key(seeds_ptr, tl.program_id(0) * 0)
    position = tl.load(positions_ptr)
    cells = noise.tile_cells(tl.sum(tile, 0) * TILE, position, PURPOSE, key_0, key_1, TILE)
    tl.store(cells_ptr + ids, cells)
    tl.store(same_cells_ptr + ids, noise.cells_of(ids, position, PURPOSE, key_0, key_1))
    uniforms = noise.uniforms_of(ids, cells, position, PURPOSE, key_0, key_1)
    tl.store(uniforms_ptr + ids, uniforms)
    tl.store(gumbels_ptr + ids, noise.gumbel_of(uniforms))
    tl.store(bounds_ptr + 2 * ids, noise.gumbel_at(cells + 1))
    tl.store(bounds_ptr + 2 * ids + 1, noise.gumbel_at(cells))


@ON_DEVICES
@pytest.mark.parametrize("purpose", [Purpose.TARGET, Purpose.RESIDUAL])
@pytest.mark.parametrize(("seed", "position"), KEYS)
def test_noise_has_the_bits_of_numpys_generator(
    device: str, seed: int, position: int, purpose: Purpose
) -> None:
    n = 512
    row = pack_rows([Row(seed=seed, position=position)], device)
    cells, same_cells = torch.empty(2, n, dtype=torch.int32, device=device)
    uniforms, gumbels = torch.empty(2, n, dtype=torch.float64, device=device)
    bounds = torch.empty(n, 2, device=device)
    _noise_kernel[(2,)](
        row.seeds, row.positions, cells, same_cells, uniforms, gumbels, bounds,
        PURPOSE=purpose, TILE=n // 2,
    )  # fmt: skip
    expected = uniform(seed, position, purpose, n)
    np.testing.assert_array_equal(
        cells.cpu().numpy(), Noise().leading_bits(seed, position, purpose, n)
    )
    assert torch.equal(cells, same_cells)
    np.testing.assert_array_equal(uniforms.cpu().numpy(), expected)
    np.testing.assert_allclose(gumbels.cpu().numpy(), gumbel_of(expected), rtol=0, atol=1e-13)
    half = noise.SLACK.value / 2
    assert (bounds[:, 0].double() <= gumbels + half).all()
    assert (bounds[:, 1].double() >= gumbels - half).all()


@triton.jit
def _gumbel_kernel(uniforms_ptr, gumbels_ptr, steps_ptr, bounds_ptr, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    tl.store(gumbels_ptr + at, noise.gumbel_of(tl.load(uniforms_ptr + at)))
    tl.store(bounds_ptr + at, noise.gumbel_at(tl.load(steps_ptr + at)))


@ON_DEVICES
def test_gumbel_noise_is_precise_at_both_ends_and_its_bounds_hold_there(device: str) -> None:
    ends = [2.0**-65, 2.0**-54, 2.0**-53, 1e-9, 2.0**-16, 0.5, 1 - 2.0**-16, 1 - 2.0**-53]
    steps = [0, 0, 0, 0, 1, 2**15, 2**16 - 1, 2**16]
    uniforms = torch.tensor(ends, dtype=torch.float64, device=device)
    gumbels, bounds = torch.empty_like(uniforms), torch.empty(8, device=device)
    _gumbel_kernel[(1,)](
        uniforms, gumbels, torch.tensor(steps, dtype=torch.int32, device=device), bounds, TILE=8
    )
    expected = gumbel_of(np.array(ends))
    np.testing.assert_allclose(gumbels.cpu().numpy(), expected, rtol=1e-14)
    bounds = bounds.cpu().double().numpy()
    assert (bounds[:4] >= expected[:4]).all()
    assert np.abs(bounds[4:7] - expected[4:7]).max() < noise.SLACK.value / 2
    assert bounds[7] <= expected[7]


# --- tokens --------------------------------------------------------------------------------------


def check_batch(device: str, seed: int) -> None:
    """A ragged batch: each row its own parameters; fp32 or bf16 logits; scratch of any size."""
    rng = np.random.default_rng(seed)
    num_rows, vocab_size = int(rng.integers(1, 4)), int(rng.choice([1, 2, 17, 200, 256, 400]))
    logits = some_logits(rng, num_rows, vocab_size)
    logits = logits.bfloat16() if rng.random() < 0.5 else logits
    rows = [a_random_row(rng, vocab_size) for _ in range(num_rows)]
    sharpness = float(rng.choice([1.0, 1.0, 2.0]))
    actual = choose(
        logits.to(device),
        [as_row(row, vocab_size, sharpness=sharpness) for row in rows],
        vocab_size,
        num_slots=int(rng.choice([1, 32])),
        capacity=int(rng.choice([4, 512])),
    )
    plain = logits.float().numpy()[:, :vocab_size]
    expected = []
    for values, row in zip(plain, rows, strict=True):
        try:
            expected.append(
                choose_row_in_numpy(edited(values, row), row, noise=Noise(), sharpness=sharpness)
            )
        except RowError:
            expected.append(-1)
    assert actual.token_ids.tolist() == expected


@ON_DEVICES
@pytest.mark.parametrize("seed", range(NUM_BATCHES))
def test_every_row_gets_the_token_that_the_engine_chooses(device: str, seed: int) -> None:
    check_batch(device, seed)


@ON_DEVICES
@pytest.mark.slow
@pytest.mark.parametrize("tens", range(NUM_MORE // 10))
def test_every_row_of_many_batches_gets_the_engines_token(device: str, tens: int) -> None:
    for seed in range(1000 + 10 * tens, 1010 + 10 * tens):
        check_batch(device, seed)


@ON_DEVICES
@pytest.mark.parametrize(
    "row",
    [Row(min_weight=-1.0), Row(top_k=99), Row(top_k=3), Row(top_p=0.5), Row(top_k=9, top_p=0.4)],
    ids=lambda row: f"k {row.top_k}, p {row.top_p}, weight {row.min_weight}",
)
def test_each_filter_alone_gives_the_engines_tokens(device: str, row: Row) -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(6))
    rows = [row._replace(seed=1), row._replace(seed=2, temperature=2.0)]
    expected = reference_sampling.choose_tokens(logits.numpy(), rows)
    assert choose(logits.to(device), rows, 50, tile=64).token_ids.tolist() == expected


def test_the_readable_twin_chooses_as_the_engine_does() -> None:
    for seed in range(300):
        rng = np.random.default_rng(seed)
        vocab_size = int(rng.choice([1, 2, 17, 300]))
        row = a_random_row(rng, vocab_size)
        values = some_logits(rng, 1, vocab_size).numpy()[0, :vocab_size]
        try:
            expected = choose_row_in_numpy(edited(values, row), row, noise=Noise())
        except RowError:
            expected = -1
        assert reference_sampling.choose_token(values, as_row(row, vocab_size)) == expected


@ON_DEVICES
def test_a_token_depends_neither_on_batch_mates_nor_on_tiles(device: str) -> None:
    logits = (torch.randn(4, 300, generator=torch.Generator().manual_seed(0)) * 2).to(device)
    rows = [Row(seed=1, position=9), Row(seed=2, top_k=9), Row(temperature=0.0), Row(top_p=0.8)]
    together = choose(logits, rows, 300).token_ids.tolist()
    for idx, row in enumerate(rows):
        for tile in (64, 512):
            alone = choose(logits[idx : idx + 1], [row], 300, tile=tile)
            assert alone.token_ids.tolist() == [together[idx]]


@ON_DEVICES
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_damaged_row_chooses_nothing_and_says_what_it_saw(device: str, bad: float) -> None:
    logits = torch.zeros(3, 100, device=device)
    logits[0, 70] = bad
    logits[1] = -math.inf
    for row in (Row(), Row(temperature=0.0), Row(top_k=3, top_p=0.5)):
        choices = choose(logits, [row] * 3, 100, tile=64)
        assert choices.token_ids.tolist()[:2] == [-1, -1]
        assert choices.token_ids[2] >= 0
        assert str(choices.bests[0].item()) == str(bad)
        assert choices.bests[1].item() == -math.inf


@ON_DEVICES
def test_edited_logits_can_be_put_back(device: str) -> None:
    from specserve_kernels.triton_kernels import edits
    from specserve_kernels.triton_kernels.rows import Edit, pack_edits

    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(3)).bfloat16().to(device)
    before = logits.clone()
    rows = [Row(edits=(Edit(3, bias=1.0), Edit(49, bias=-math.inf))), Row()]
    wanted = pack_edits(rows, device)
    originals = torch.empty_like(wanted.biases, dtype=logits.dtype)
    values = torch.empty_like(wanted.biases)
    edits.edit(logits, wanted, values, originals)
    assert logits[0, [3, 49]].tolist() == [-math.inf, -math.inf]
    assert values[:2].tolist() == [before[0, 3].float().item() + 1.0, -math.inf]
    edits.restore(logits, wanted, originals)
    assert torch.equal(logits, before)


class OnlyThese:
    """A constraint whose mask has these bits; nothing else of it is asked for."""

    def __init__(self, may: np.ndarray) -> None:
        self._may = may

    def mask(self, known: Seq[int], num_prompt: int, prefix: Seq[int]) -> bytes:
        return np.packbits(self._may, bitorder="little").tobytes()


@ON_DEVICES
@pytest.mark.parametrize("vocab_size", [5, 32, 100, 4100])
def test_what_a_constraint_forbids_never_comes_and_the_rest_is_the_engines(
    device: str, vocab_size: int
) -> None:
    rng = np.random.default_rng(vocab_size)
    logits, rows, words = some_logits(rng, 3, vocab_size), [], []
    for _ in range(2):
        may = rng.random(vocab_size) < 0.5
        may[0] = True
        row = a_random_row(rng, vocab_size)
        request = msgspec.structs.replace(row.request, constraint=OnlyThese(may))
        rows.append(replace(row, request=request))
        mask = np.zeros(-(-vocab_size // 32) * 4, dtype=np.uint8)
        mask[: (vocab_size + 7) // 8] = np.packbits(may, bitorder="little")
        words.append(torch.from_numpy(mask.view(np.int32)))
    rows.append(a_random_row(rng, vocab_size))  # this one may say anything
    expected = [
        choose_row_in_numpy(edited(x[:vocab_size], row), row, noise=Noise())
        for x, row in zip(logits.numpy(), rows, strict=True)
    ]
    on_device = logits.to(device)
    mask_rows = torch.tensor([1, 0, -1], dtype=torch.int32, device=device)
    masks.forbid(on_device, torch.stack(words[::-1]).to(device), mask_rows, vocab_size=vocab_size)
    assert torch.equal(on_device[2].cpu(), logits[2])
    assert torch.equal(on_device[:, vocab_size:].cpu(), logits[:, vocab_size:])
    packed = [as_row(row, vocab_size) for row in rows]
    assert choose(on_device, packed, vocab_size, tile=4096).token_ids.tolist() == expected

"""How sure a draft is of its choice: the kernels against their readable twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.interpreted_triton import ON_DEVICES
from tests.triton_rows import a_random_row, as_row, some_logits

from specserve_kernels.triton_kernels import reference_sampling, shares  # isort: skip
from specserve_kernels.triton_kernels.choosing import Chooser  # isort: skip
from specserve_kernels.triton_kernels.rows import Row, pack_edits, pack_rows  # isort: skip

NUM_BATCHES, NUM_MORE = 5, 200  # ragged batches: by default, and with -m slow


def shares_of(
    logits: torch.Tensor, rows: list[Row], vocab_size: int
) -> tuple[list[int], list[float]]:
    """(choices, their shares) of [L, V] logits; the rows have no edits."""
    device, num_rows, tile = logits.device, len(rows), 64
    packed = pack_rows(rows, device)
    chooser = Chooser(
        *(num_rows, vocab_size, logits.dtype, device), tile=tile, capacity=256, chunk=512
    )
    choices = chooser.choose(logits, packed, pack_edits(rows, device))
    found = torch.full((num_rows,), torch.nan, device=device)
    sums = shares.make_sums(num_rows, vocab_size, device, tile=tile)
    shares.shares_of(
        logits, packed, chooser.cuts, choices, sums, found, vocab_size=vocab_size, tile=tile
    )
    return choices.token_ids.tolist(), found.tolist()


def check_batch(device: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_rows, vocab_size = int(rng.integers(1, 4)), int(rng.choice([1, 2, 17, 64, 200]))
    logits = some_logits(rng, num_rows, vocab_size)
    logits = logits.bfloat16() if rng.random() < 0.5 else logits
    sharpness = float(rng.choice([1.0, 1.0, 2.0]))
    rows = [
        as_row(a_random_row(rng, vocab_size), vocab_size, sharpness=sharpness)._replace(edits=())
        for _ in range(num_rows)
    ]
    choices, found = shares_of(logits.to(device), rows, vocab_size)
    expected = [
        reference_sampling.share(x[:vocab_size], row, choice)
        for x, row, choice in zip(logits.float().numpy(), rows, choices, strict=True)
    ]
    # The noise of a cell's end is fp32, and a GPU's fast logarithm: 1 % of it is nothing here.
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-6)


@ON_DEVICES
@pytest.mark.parametrize("seed", range(NUM_BATCHES))
def test_a_choices_share_is_its_twins(device: str, seed: int) -> None:
    check_batch(device, seed)


@ON_DEVICES
@pytest.mark.slow
@pytest.mark.parametrize("tens", range(NUM_MORE // 10))
def test_a_choices_share_is_its_twins_in_many_batches(device: str, tens: int) -> None:
    for seed in range(1000 + 10 * tens, 1010 + 10 * tens):
        check_batch(device, seed)


@ON_DEVICES
def test_a_sure_draft_says_1_a_torn_one_a_half_and_a_damaged_one_0(device: str) -> None:
    logits = torch.full((3, 80), -100.0, device=device)
    logits[0, 70] = logits[1, 3] = logits[1, 71] = 0.0
    logits[2, 5] = torch.nan
    choices, found = shares_of(logits, [Row(temperature=0.0)] * 3, 80)
    assert choices == [70, 3, -1]
    assert found == pytest.approx([1.0, 0.5, 0.0])

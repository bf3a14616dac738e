"""The GEMM for exact replay: right, and to the same bits for a row in any company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.interpreted_triton import ON_DEVICES

from specserve_kernels.triton_kernels import gemm, reference  # isort: skip (needs triton)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SIZES = [(1, 1), (7, 5), (64, 64), (65, 300), (70, 600)]  # N, K; up to 4 splits


def operands(
    num_rows: int, size: tuple[int, int], dtype: torch.dtype, device: str, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] within wider rows, weight [N, K]."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_rows, size[1] + 3, generator=generator).to(dtype).to(device)
    weight = torch.randn(size, generator=generator).to(dtype).to(device)
    return x[:, : size[1]], weight


def check_product(
    device: str, dtype: torch.dtype, num_rows: int, size: tuple[int, int], seed: int
) -> None:
    x, weight = operands(num_rows, size, dtype, device, seed)
    actual, expected = gemm.linear(x, weight), reference.linear(x, weight)
    assert actual.dtype == dtype
    # Relative to the size of a sum: single elements may cancel to nearly nothing.
    near = TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, rtol=near, atol=near * size[1] ** 0.5)


products = given(
    dtype=st.sampled_from(list(TOLERANCE)),
    num_rows=st.sampled_from([0, 1, 5, 33, 130]),
    size=st.sampled_from(SIZES),
    seed=st.integers(0, 999),
)


@ON_DEVICES
@settings(max_examples=40, deadline=None)
@products
def test_linear_is_its_reference(
    device: str, dtype: torch.dtype, num_rows: int, size: tuple[int, int], seed: int
) -> None:
    check_product(device, dtype, num_rows, size, seed)


@ON_DEVICES
@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=400, deadline=None)
@products
def test_linear_is_its_reference_on_many_products(
    device: str, dtype: torch.dtype, num_rows: int, size: tuple[int, int], seed: int
) -> None:
    check_product(device, dtype, num_rows, size, seed)


@ON_DEVICES
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_has_the_same_bits_in_any_company(device: str, dtype: torch.dtype) -> None:
    """Alone, in another place of the tile, in another tile, and where splits are not apart."""
    x, weight = operands(140, SIZES[-1], dtype, device)
    assert gemm.num_splits(*SIZES[-1], dtype) > 1
    together = gemm.linear(x, weight)
    for first, last in ((0, 1), (63, 64), (70, 90)):
        assert torch.equal(gemm.linear(x[first:last], weight), together[first:last])


@ON_DEVICES
def test_rows_of_different_lengths_are_refused(device: str) -> None:
    x, weight = operands(2, (4, 8), torch.float32, device)
    with pytest.raises(ValueError, match="contiguous rows of one length"):
        gemm.linear(x, weight[:, :7])
    with pytest.raises(ValueError, match="contiguous rows of one length"):
        gemm.linear(x, weight.T.contiguous().T)

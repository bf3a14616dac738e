"""RMSNorm in Triton against its readable twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.interpreted_triton import ON_DEVICES

from specserve_kernels.triton_kernels import norms, reference  # isort: skip (needs triton)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
EPSILON = 1e-5


@ON_DEVICES
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(max_examples=200, deadline=None)
@given(
    num_rows=st.integers(0, 6),
    num_columns=st.integers(1, 600),
    adds=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    seed=st.integers(0, 999),
)
def test_rms_norm_is_its_reference(
    device: str,
    dtype: torch.dtype,
    num_rows: int,
    num_columns: int,
    adds: bool,
    scale: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(2, num_rows, num_columns, generator=generator) * scale).to(dtype)
    weight = torch.randn(num_columns, generator=generator).to(dtype).to(device)
    x, residual = x.to(device), residual.to(device)
    if adds:
        expected_residual = residual.clone()
        expected = reference.add_rms_norm(x, expected_residual, weight, EPSILON)
        actual = norms.add_rms_norm(x, residual, weight, EPSILON)
        assert torch.equal(residual, expected_residual)
    else:
        expected = reference.rms_norm(x, weight, EPSILON)
        actual = norms.rms_norm(x, weight, EPSILON)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@ON_DEVICES
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_is_normed_to_the_same_bits_alone(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(7, 576, generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    weight = torch.ones(576, dtype=dtype, device=device)
    together = norms.rms_norm(x, weight, EPSILON)
    for row_idx in range(7):
        alone = norms.rms_norm(x[row_idx : row_idx + 1], weight, EPSILON)
        assert torch.equal(alone[0], together[row_idx])


@ON_DEVICES
def test_rows_that_are_not_contiguous_are_refused(device: str) -> None:
    x = torch.zeros(4, 8, device=device)
    with pytest.raises(ValueError, match="contiguous rows of one shape"):
        norms.rms_norm(x[:, :4], x[0, :4], EPSILON)

"""SwiGLU in Triton against its readable twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.interpreted_triton import ON_DEVICES

from specserve_kernels.triton_kernels import reference, swiglu  # isort: skip (needs triton)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def some_rows(
    num_rows: int, num_columns: int, scale: float, seed: int, dtype: torch.dtype, device: str
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_rows, 2 * num_columns, generator=generator) * scale
    return rows.to(dtype).to(device)


@ON_DEVICES
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(max_examples=200, deadline=None)
@given(
    num_rows=st.integers(0, 4),
    num_columns=st.one_of(st.integers(1, 40), st.sampled_from([1023, 1024, 1025])),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 999),
)
def test_swiglu_is_its_reference(
    device: str, dtype: torch.dtype, num_rows: int, num_columns: int, scale: float, seed: int
) -> None:
    gate_up = some_rows(num_rows, num_columns, scale, seed, dtype, device)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        swiglu.swiglu(gate_up), reference.swiglu(gate_up), rtol=tolerance, atol=tolerance * scale
    )


@ON_DEVICES
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_has_the_same_bits_alone(device: str, dtype: torch.dtype) -> None:
    gate_up = some_rows(5, 1536, 1.0, 0, dtype, device)
    together = swiglu.swiglu(gate_up)
    for row_idx in range(5):
        alone = swiglu.swiglu(gate_up[row_idx : row_idx + 1])
        assert torch.equal(alone[0], together[row_idx])


@ON_DEVICES
def test_rows_that_are_not_gate_and_up_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match=r"rows \[gate \| up\]"):
        swiglu.swiglu(torch.zeros(2, 7, device=device))
    with pytest.raises(ValueError, match=r"rows \[gate \| up\]"):
        swiglu.swiglu(torch.zeros(2, 8, device=device)[:, :4])

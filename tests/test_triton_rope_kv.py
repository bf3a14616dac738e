"""RoPE with QK-norm and the KV write in Triton against the readable twin."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.interpreted_triton import ON_DEVICES

from specserve_kernels.triton_kernels import reference, rope_kv  # isort: skip (needs triton)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
NUM_POSITIONS = 50


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Problem:
    qkv: Tensor
    positions: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    k_cache: Tensor
    v_cache: Tensor
    norm: rope_kv.QkNorm | None
    scales: tuple[float, float]

    def rows(self, rows: Tensor) -> tuple[Tensor, ...]:
        return self.qkv[rows], self.positions[rows], self.slots[rows], self.cos, self.sin


def a_problem(
    num_rows: int,
    heads: Heads,
    *,
    dtype: torch.dtype,
    device: str,
    has_norm: bool = False,
    narrow: bool = False,
    seed: int = 0,
) -> Problem:
    """Random rows at distinct slots of poisoned caches; every fourth row or so is padding."""
    generator = torch.Generator().manual_seed(seed)
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    slots = torch.randperm(num_rows + 9, generator=generator)[:num_rows]
    slots[torch.rand(num_rows, generator=generator) < 0.25] = -1
    num_blocks = -(-(num_rows + 9) // 4)
    shape = (num_blocks, 4, heads.num_kv_heads, heads.head_dim)
    k_cache, v_cache = torch.full((2, *shape), 7.0).to(torch.float8_e4m3fn if narrow else dtype)
    angles = torch.rand(NUM_POSITIONS, heads.head_dim // 2, generator=generator) * 6
    weights = torch.randn(2, heads.head_dim, generator=generator).to(dtype).to(device)
    return Problem(
        torch.randn(num_rows, width, generator=generator).to(dtype).to(device),
        torch.randint(NUM_POSITIONS, (num_rows,), generator=generator).to(device),
        slots.to(device),
        torch.cos(angles).to(device),
        torch.sin(angles).to(device),
        k_cache.to(device),
        v_cache.to(device),
        rope_kv.QkNorm(weights[0], weights[1], 1e-6) if has_norm else None,
        (0.5, 0.003) if narrow else (1.0, 1.0),  # the second sends some values out of range
    )


@ON_DEVICES
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(max_examples=200, deadline=None)
@given(
    num_rows=st.integers(0, 6),
    heads=st.sampled_from([Heads(4, 2, 16), Heads(3, 1, 8), Heads(2, 2, 20), Heads(9, 3, 64)]),
    has_norm=st.booleans(),
    narrow=st.booleans(),
    seed=st.integers(0, 999),
)
def test_rotated_rows_are_the_references(
    device: str,
    dtype: torch.dtype,
    num_rows: int,
    heads: Heads,
    has_norm: bool,
    narrow: bool,
    seed: int,
) -> None:
    problem = a_problem(
        num_rows, heads, dtype=dtype, device=device, has_norm=has_norm, narrow=narrow, seed=seed
    )
    k_scale, v_scale = problem.scales
    caches = problem.k_cache.clone(), problem.v_cache.clone()
    norm = problem.norm and (
        problem.norm.query_weight,
        problem.norm.key_weight,
        problem.norm.epsilon,
    )
    rows = problem.rows(torch.arange(num_rows))
    expected = reference.rope_and_write_kv(*rows, *caches, norm, k_scale=k_scale, v_scale=v_scale)
    actual = rope_kv.rope_and_write_kv(
        *(*rows, problem.k_cache, problem.v_cache, problem.norm), k_scale=k_scale, v_scale=v_scale
    )
    real = problem.slots >= 0
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual[real], expected[real], rtol=tolerance, atol=tolerance)
    # A key on the edge between two fp8 numbers may fall to either side.
    key_tolerance = 0.13 if narrow else tolerance
    torch.testing.assert_close(
        problem.k_cache.float(), caches[0].float(), rtol=key_tolerance, atol=key_tolerance
    )
    assert torch.equal(problem.v_cache.float(), caches[1].float())


@ON_DEVICES
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_row_has_the_same_bits_alone(device: str, dtype: torch.dtype) -> None:
    together = a_problem(6, Heads(9, 3, 64), dtype=dtype, device=device, has_norm=True)
    query = rope_kv.rope_and_write_kv(
        *together.rows(torch.arange(6)), together.k_cache, together.v_cache, together.norm
    )
    alone = a_problem(6, Heads(9, 3, 64), dtype=dtype, device=device, has_norm=True)
    assert (alone.slots >= 0).sum() > 2
    for row_idx in range(6):
        row = rope_kv.rope_and_write_kv(
            *(*alone.rows(torch.tensor([row_idx])), alone.k_cache, alone.v_cache, alone.norm)
        )
        assert alone.slots[row_idx] < 0 or torch.equal(row[0], query[row_idx])
    assert torch.equal(alone.k_cache, together.k_cache)
    assert torch.equal(alone.v_cache, together.v_cache)


@ON_DEVICES
def test_rows_that_are_not_contiguous_are_refused(device: str) -> None:
    problem = a_problem(2, Heads(2, 1, 8), dtype=torch.float32, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        rope_kv.rope_and_write_kv(
            *(problem.qkv.repeat(1, 2)[:, ::2], *problem.rows(torch.arange(2))[1:]),
            *(problem.k_cache, problem.v_cache),
        )

"""The repaired interpreter: exact narrow numbers, and no stray or double write goes unseen."""

from __future__ import annotations

import pytest
import torch

from tests.interpreted_triton import INTERPRETING, triton

if not INTERPRETING:
    pytest.skip("the interpreter is off", allow_module_level=True)

import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def convert_kernel(x_ptr, out_ptr, size, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < size).to(tl.float32)
    tl.store(out_ptr + index, x.to(out_ptr.dtype.element_ty), mask=index < size)


@triton.jit
def unmasked_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(out_ptr + index, tl.load(x_ptr + index))


@triton.jit
def racing_kernel(out_ptr):
    tl.store(out_ptr, tl.program_id(0))


@triton.jit
def add_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, tl.load(x_ptr) + tl.load(x_ptr))


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr):
    index = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(out_ptr + index, tl.dot(tl.load(a_ptr + index), tl.load(b_ptr + index)))


NARROW = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_casts_round_as_torch_does(dtype: torch.dtype) -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 3
    out = torch.empty(4096, dtype=dtype)
    convert_kernel[(1,)](x, out, 4096, BLOCK=4096)
    assert torch.equal(out.float(), x.to(dtype).float())
    back = torch.empty(4096)
    convert_kernel[(1,)](out, back, 4096, BLOCK=4096)
    assert torch.equal(back, out.float())


def test_products_of_bf16_are_taken_in_fp32() -> None:
    a, b = torch.randn(2, 16, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    out = torch.empty(16, 16)
    dot_kernel[(1,)](a, b, out)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-6, atol=1e-6)


def test_other_arithmetic_on_narrow_numbers_is_refused() -> None:
    x = torch.ones(1, dtype=torch.bfloat16)
    with pytest.raises(InterpreterError, match="convert to fp32 first"):
        add_kernel[(1,)](x, x.clone())


def test_an_address_outside_the_tensors_is_an_error() -> None:
    with pytest.raises(InterpreterError, match="load of 28 elements outside all tensors"):
        unmasked_kernel[(1,)](torch.zeros(100), torch.zeros(128), BLOCK=128)
    with pytest.raises(InterpreterError, match="store of 28 elements outside all tensors"):
        unmasked_kernel[(1,)](torch.zeros(128), torch.zeros(100), BLOCK=128)


def test_two_programs_that_write_one_address_are_an_error() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    racing_kernel[(1,)](out)
    with pytest.raises(RuntimeError, match="two programs"):
        racing_kernel[(2,)](out)

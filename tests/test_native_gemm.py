"""The native matrix products: int8 against exact integers, bf16 and f32 against float64, and the
promise that a row's bits depend on that row alone, on every instruction set this CPU can run.
The oracle of int8 is numpy: its bits are demanded, not its neighbourhood.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specserve.models.quantize import mix_rows
from specserve_kernels.native_library import why_not
from tests.native_products import (
    ADD,
    BF16,
    DTYPES,
    F32,
    I8,
    INSTRUCTION_SETS,
    STORE,
    SWIGLU,
    Floats,
    aligned,
    available,
    chosen,
    gemm,
    in_use,
    packed,
)

pytestmark = pytest.mark.skipif(gemm is None, reason=why_not() or "")


@pytest.fixture(autouse=True)
def _the_best_instruction_set_afterwards():
    best = in_use(I8)
    yield
    assert chosen(best)


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> str:
    if not chosen(request.param):
        pytest.skip(f"this CPU (or its system) does not run {request.param}")
    return request.param


def numbers(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def quantised(rows: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Whole numbers in -127..127 and the scale of each row (rows of zeros: zeros, scale 0)."""
    rows = mix_rows(torch.from_numpy(rows)).numpy()
    amax = np.abs(rows).max(axis=1)
    inverse = np.divide(np.float32(127), amax, out=np.zeros_like(amax), where=amax > 0)
    return np.rint(rows * inverse[:, None]).astype(np.int64), amax / np.float32(127)


def exact_int8(x: Floats, w: Floats) -> Floats:
    (xq, x_scales), (wq, w_scales) = quantised(x), quantised(w)
    return ((xq @ wq.T).astype(np.float32) * x_scales[:, None]) * w_scales[None, :]


def as_bf16(x: Floats) -> Floats:  # rounded to nearest even at 8 significant bits
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)


def assert_same_bits(left: Floats, right: Floats) -> None:
    np.testing.assert_array_equal(left.view(np.uint32), right.view(np.uint32))


# ---- right -------------------------------------------------------------------------------


def test_int8_products_are_exact_for_every_number_of_rows(instruction_set: str) -> None:
    w, x = numbers(80, 200), numbers(40, 200, seed=1)
    weight, expected = packed(I8, w), exact_int8(x, w)
    for num_rows in range(1, 41):
        assert_same_bits(weight.product(x[:num_rows]), expected[:num_rows])


@given(n=st.integers(1, 100), k=st.integers(1, 300), m=st.integers(1, 40), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_int8_products_are_exact_for_odd_shapes_on_every_instruction_set(
    n: int, k: int, m: int, seed: int
) -> None:
    w, x = numbers(n, k, seed=seed), numbers(m, k, seed=seed + 100)
    weight, expected = packed(I8, w), exact_int8(x, w)
    for name in available():
        assert chosen(name)
        assert_same_bits(weight.product(x), expected)


@pytest.mark.parametrize("k", [320, 65536])
def test_the_largest_int8_sums_neither_saturate_nor_overflow(instruction_set: str, k: int) -> None:
    rng = np.random.default_rng(0)
    w = np.where(rng.random((32, k)) < 0.5, -1, 1).astype(np.float32)
    w[0], w[1] = 1, -1
    x = np.stack([np.ones(k), -np.ones(k), w[5]]).astype(np.float32)
    expected = exact_int8(x, w)
    assert expected[0, 0] == pytest.approx(k)
    assert_same_bits(packed(I8, w).product(x), expected)


@given(n=st.integers(1, 100), k=st.integers(1, 300), m=st.integers(1, 40), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_float_products_are_as_close_to_float64_as_one_chain_of_additions(
    dtype: str, n: int, k: int, m: int, seed: int
) -> None:
    w, x = numbers(n, k, seed=seed), numbers(m, k, seed=seed + 100)
    weight = packed(DTYPES[dtype], w)
    if dtype == "bf16":
        w, x = as_bf16(w), as_bf16(x)
    expected = x.astype(np.float64) @ w.T.astype(np.float64)
    bound = (k + 1) * 2.0**-23 * (np.abs(x).astype(np.float64) @ np.abs(w.T)) + 1e-30
    for name in available():
        assert chosen(name)
        assert (np.abs(weight.product(numbers(m, k, seed=seed + 100)) - expected) <= bound).all()


def test_bf16_rounds_weights_and_rows_to_nearest_even(instruction_set: str) -> None:
    ties = np.array([1 + i * 2.0**-8 for i in range(1, 48)] + [3.4e38, 3.3e38], np.float32)
    values = np.concatenate([ties, -ties, np.nextafter(ties, 0), numbers(200)])
    one = np.ones((1, 1), np.float32)
    assert_same_bits(packed(BF16, one).product(values[:, None])[:, 0], as_bf16(values))
    assert_same_bits(packed(BF16, values[:, None]).product(one)[0], as_bf16(values))


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_vector_instruction_sets_add_in_the_same_order(dtype: str) -> None:
    weight, x = packed(DTYPES[dtype], numbers(96, 300)), numbers(23, 300, seed=1)
    # plain C++ rounds f32 products on x86; products of two bf16 are exact everywhere
    same = ["avx512vnni", "avx2"] + (["portable"] if dtype == "bf16" else [])
    results = [weight.product(x) for name in same if chosen(name)]
    for result in results[1:]:
        assert_same_bits(result, results[0])


# ---- a row depends on itself ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_in_any_company(dtype: str, instruction_set: str) -> None:
    weight, x = packed(DTYPES[dtype], numbers(112, 330)), numbers(70, 330, seed=1)
    alone = np.concatenate([weight.product(row[None]) for row in x])
    rng = np.random.default_rng(2)
    for num_rows in (1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 70):
        picked = rng.permutation(70)[:num_rows]
        assert_same_bits(weight.product(x[picked]), alone[picked])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 7, 16, 18, 40])
def test_any_split_of_the_columns_gives_the_same_bits(
    dtype: str, num_rows: int, instruction_set: str
) -> None:
    weight, x = packed(DTYPES[dtype], numbers(150, 200)), numbers(num_rows, 200, seed=1)
    whole = weight.product(x)
    for cuts in ([0, 16, 150], [0, 48, 144, 150], [0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 150]):
        out = np.full_like(whole, np.nan)
        for begin, end in pairwise(cuts):
            assert weight.run(x, out, (begin, end)) is None
        assert_same_bits(out, whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_threads_may_multiply_at_once(dtype: str, instruction_set: str) -> None:
    weight, x = packed(DTYPES[dtype], numbers(192, 256)), numbers(33, 256, seed=1)
    whole = weight.product(x)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            out = np.zeros_like(whole)
            halves = [pool.submit(weight.run, x, out, half) for half in ((0, 96), (96, 192))]
            assert [half.result() for half in halves] == [None, None]
            assert_same_bits(out, whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_the_asked_columns_are_written_and_only_the_row_is_read(
    dtype: str, instruction_set: str
) -> None:
    weight, wide = packed(DTYPES[dtype], numbers(88, 70)), numbers(5, 90, seed=1)
    wide[:, 70:] = np.nan  # behind each row: a neighbour's memory
    out = np.full((6, 100), 7, np.float32)
    assert weight.run(wide[:, :70], out[:5], (32, 88)) is None
    assert_same_bits(out[:5, 32:88], weight.product(np.ascontiguousarray(wide[:, :70]))[:, 32:])
    out[:5, 32:88] = 7
    assert (out == 7).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 63, 64, 99])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_poisoned_row_is_never_finite_and_touches_no_other(
    dtype: str, poison: float, place: int, instruction_set: str
) -> None:
    weight, x = packed(DTYPES[dtype], numbers(40, 100)), numbers(20, 100, seed=1)
    clean = weight.product(x)
    x[7, place] = poison
    poisoned = weight.product(x)
    assert not np.isfinite(poisoned[7]).any()
    assert dtype != "int8" or np.isnan(poisoned[7]).all()
    assert_same_bits(np.delete(poisoned, 7, 0), np.delete(clean, 7, 0))


def test_rows_of_zeros_and_rows_too_small_to_scale_give_zeros(instruction_set: str) -> None:
    w, x = 1e30 * numbers(40, 100), numbers(4, 100, seed=1)
    w[3], x[1], x[2] = 0, 0, 1e-38
    result = packed(I8, w).product(x)
    assert (result[1:3] == 0).all()
    assert (result[:, 3] == 0).all()
    assert np.isfinite(result).all()


def test_a_poisoned_weight_row_gives_nan_in_its_column_only(instruction_set: str) -> None:
    w, x = numbers(40, 100), numbers(4, 100, seed=1)
    clean = packed(I8, w).product(x)
    w[21, 5] = np.inf
    poisoned = packed(I8, w).product(x)
    assert np.isnan(poisoned[:, 21]).all()
    assert_same_bits(np.delete(poisoned, 21, 1), np.delete(clean, 21, 1))


# ---- what happens to a finished tile -------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 17])
def test_bias_comes_last_and_add_adds_to_what_was_there(
    num_rows: int, instruction_set: str
) -> None:
    w, x, bias = numbers(90, 130), numbers(num_rows, 130, seed=1), numbers(90, seed=2)
    residual = numbers(num_rows, 90, seed=3)
    weight, expected = packed(I8, w), exact_int8(x, w) + bias
    assert_same_bits(weight.product(x, bias), expected)
    out = residual.copy()
    assert weight.run(x, out, bias=bias, epilogue=ADD) is None
    assert_same_bits(out, residual + expected)


def silu(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 16, 17, 35])
def test_swiglu_multiplies_silu_of_the_gate_by_up(
    dtype: str, num_rows: int, instruction_set: str
) -> None:
    weight, x = packed(DTYPES[dtype], numbers(96, 130)), numbers(num_rows, 130, seed=1)
    groups = weight.product(x).astype(np.float64).reshape(num_rows, 3, 2, 16)
    expected = (silu(groups[:, :, 0]) * groups[:, :, 1]).reshape(num_rows, 48)
    result = weight.product(x, epilogue=SWIGLU)
    np.testing.assert_allclose(result, expected, rtol=6 * 2.0**-23, atol=1e-37)
    split = np.zeros_like(result)
    assert weight.run(x, split, (0, 32), epilogue=SWIGLU) is None
    assert weight.run(x, split, (32, 96), epilogue=SWIGLU) is None
    assert_same_bits(split, result)


def test_silu_is_right_to_a_few_units_from_minus_to_plus_infinity(instruction_set: str) -> None:
    gates = np.concatenate([np.linspace(-120, 120, 4001), np.geomspace(1e-30, 3e38, 200)])
    x = np.concatenate([gates, -gates]).astype(np.float32)[:, None]
    w = np.zeros((32, 1), np.float32)
    w[:16] = 1  # gates are x; ups are the bias, 1
    bias = np.repeat(np.array([0, 1], np.float32), 16)
    result = packed(F32, w).product(x, bias, SWIGLU)
    with np.errstate(over="ignore"):
        expected = silu(x.astype(np.float64))
    assert (result == result[:, :1]).all()  # every lane the same bits
    # from gates of -87.3 down 1 + exp(-x) nears the end of float32
    np.testing.assert_allclose(result[:, :1], expected, rtol=4 * 2.0**-23, atol=1.1e-36)


@pytest.mark.parametrize("names", [("amx", "avx512vnni"), ("avx2", "portable")], ids=str)
def test_int8_swiglu_has_the_same_bits_on_instruction_sets_with_the_same_silu(
    names: tuple[str, ...],
) -> None:
    weight, x = packed(I8, 8 * numbers(96, 130)), numbers(35, 130, seed=1)
    results = [
        weight.product(x, epilogue=SWIGLU) for name in available() if name in names and chosen(name)
    ]
    for result in results[1:]:
        assert_same_bits(result, results[0])


# ---- packing, choosing, refusing -----------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_slices_one_behind_the_other_is_packing_them_together(dtype: str) -> None:
    w = numbers(70, 90)
    slices = [packed(DTYPES[dtype], w[begin:end]) for begin, end in ((0, 16), (16, 64), (64, 70))]
    together = packed(DTYPES[dtype], w)
    np.testing.assert_array_equal(together.packed, np.concatenate([s.packed for s in slices]))


def test_the_instruction_set_in_use_is_named_and_unknown_ones_are_refused(
    instruction_set: str,
) -> None:
    assert in_use(I8) == instruction_set
    assert in_use(F32) == ("avx512vnni" if instruction_set == "amx" else instruction_set)
    assert not chosen("avx1024")
    assert in_use(I8) == instruction_set


@pytest.mark.parametrize(
    ("columns", "epilogue", "complaint"),
    [
        ((8, 64), STORE, "col_begin is 8, but must be a multiple of 16"),
        ((0, 40), STORE, "col_end is 40, but must be n or a multiple of 16"),
        ((0, 80), STORE, "col_end is 80, but the weight has 64 rows"),
        ((16, 64), SWIGLU, "col_begin is 16, but must be a multiple of 32"),
        ((0, 48), SWIGLU, "col_end is 48, but must be n or a multiple of 32"),
    ],
)
def test_column_ranges_that_would_write_elsewhere_are_refused(
    columns: tuple[int, int], epilogue: int, complaint: str
) -> None:
    out = np.zeros((2, 64), np.float32)
    weight = packed(I8, numbers(64, 64))
    assert complaint in (weight.run(numbers(2, 64), out, columns, epilogue=epilogue) or "")
    assert (out == 0).all()


def test_an_int8_weight_whose_sums_might_overflow_is_refused() -> None:
    at = aligned(64).ctypes.data
    complaint = gemm.specserve_gemm_pack(I8, 1, 65537, at, at, at).decode()
    assert complaint == "k is 65537, but int32 sums hold at most 65536: use bf16"

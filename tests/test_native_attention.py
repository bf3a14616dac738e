"""Native paged attention against the readable backend, and the promise that a row stands alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from specserve_kernels import PagedBatch, ReferenceBackend, native_library
from specserve_kernels.native_step import choose_row_kernels, paged_attention, row_kernels
from tests.test_attention import (
    RAGGED,
    SOME_HEADS,
    Heads,
    Problem,
    Segment,
    a_problem,
    rows_alone,
    some_segments,
)

pytestmark = pytest.mark.skipif(
    native_library.load() is None, reason=f"no native kernels: {native_library.why_not()}"
)

KV_DTYPES = [torch.float32, torch.bfloat16]
INSTRUCTION_SETS = ["portable", "avx2", "avx512", "amx"]


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    before = row_kernels()
    if not choose_row_kernels(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    choose_row_kernels(before)


@dataclass(frozen=True)
class NativeAttention:
    """The native attention behind the backends' interface, so that their tests can ask it.

    The KV of the batch's own rows is broken in the cache it is given: it must write them itself.
    """

    kv_dtype: torch.dtype
    threads: int = 2
    name: str = "native"

    def prepare(self, batch: PagedBatch) -> PagedBatch:
        return batch

    def paged_attention(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: PagedBatch,
        *,
        scale: float,
        sliding_window: int | None = None,
    ) -> Tensor:
        assert scale == query.shape[-1] ** -0.5
        slots = ReferenceBackend().slot_mapping(plan)
        caches, own = [], []
        for cache in (k_cache, v_cache):
            flat = cache.float().reshape(-1, *cache.shape[2:])
            own.append(flat[slots])
            flat = flat.index_fill(0, slots, torch.nan)
            caches.append(flat.view(cache.shape))
        return paged_attention(
            query.float(),
            *own,
            native_layout(*caches, self.kv_dtype),
            plan,
            threads=self.threads,
            window=sliding_window,
        )


def native_layout(keys: Tensor, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """keys and values [P, S, G, H] -> as the native cache holds them."""
    blocks, size, kv_heads, head_dim = keys.shape
    keys = keys.to(dtype).permute(0, 2, 3, 1)  # [P, G, H, S]
    if dtype == torch.bfloat16:
        keys = keys.reshape(blocks, kv_heads, head_dim // 2, 2, size).transpose(3, 4)
    return keys.contiguous(), values.to(dtype).transpose(1, 2).contiguous()


def rounded(problem: Problem, dtype: torch.dtype) -> Problem:
    """The same problem in fp32, its KV being numbers that the KV's dtype holds exactly."""
    return Problem(
        problem.query.float(),
        problem.keys.to(dtype).float(),
        problem.values.to(dtype).float(),
        problem.batch,
    )


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    segments=st.lists(some_segments(), min_size=1, max_size=5),
    heads=SOME_HEADS,
    window=st.sampled_from([None, 1, 5, 130]),
    block_size=st.sampled_from([1, 4, 16, 32]),
    seed=st.integers(0, 99),
)
def test_it_agrees_with_the_readable_backend_on_ragged_batches_with_trees_and_windows(
    instruction_set: str,
    kv_dtype: torch.dtype,
    segments: list[Segment],
    heads: Heads,
    window: int | None,
    block_size: int,
    seed: int,
) -> None:
    problem = rounded(a_problem(segments, heads, torch.float32, block_size, seed), kv_dtype)
    limit: Tensor | float = 1e-5
    if instruction_set == "amx" and kv_dtype == torch.bfloat16:
        # Queries are rounded to bf16, and weights: each is off by 2^-9 of itself at most, so their
        # sum as well, and the result by 2^-8 of what it would be were all values positive.
        problem = replace(problem, query=problem.query.bfloat16().float())
        positive = replace(problem, values=problem.values.abs())
        limit = 2**-8 * positive.attend(ReferenceBackend(), window) + 1e-5
    expected = problem.attend(ReferenceBackend(), window)
    actual = problem.attend(NativeAttention(kv_dtype), window)
    assert ((actual - expected).abs() <= limit).all(), (actual - expected).abs().max()


@pytest.mark.parametrize("window", [None, 40, 200])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "block_size"),
    [
        *((Heads(9, 3, 64), 16), (Heads(4, 4, 32), 16), (Heads(7, 1, 96), 32)),
        *((Heads(2, 2, 16), 16), (Heads(4, 1, 16), 4), (Heads(14, 2, 12), 5)),
    ],
    ids=str,
)
def test_a_row_has_the_same_bits_alone_and_among_any_others(
    instruction_set: str,
    window: int | None,
    kv_dtype: torch.dtype,
    heads: Heads,
    block_size: int,
) -> None:
    """Alone its ancestors are context: so a tree's node has the bits of the same token in a chain,
    a prompt's row those of a decoding one."""
    problem = rounded(a_problem(RAGGED, heads, torch.float32, block_size), kv_dtype)
    native = NativeAttention(kv_dtype)
    assert torch.equal(problem.attend(native, window), rows_alone(problem, native, window))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize(
    "segments",
    [
        [Segment(5000, 1)],
        [Segment(3000, 4)],
        [Segment(0, 300)],
        [Segment(2500, 9, (-1, 0, 0, 1, 1, 2, 3, 3, 6)), Segment(100, 1), Segment(700, 2)],
    ],
    ids=["one long row", "guesses", "prompt", "tree and others"],
)
def test_the_number_of_threads_changes_no_bit(
    instruction_set: str, kv_dtype: torch.dtype, segments: list[Segment]
) -> None:
    problem = rounded(a_problem(segments, Heads(6, 2, 64), torch.float32, 16), kv_dtype)
    one, *others = [
        problem.attend(NativeAttention(kv_dtype, threads), window)
        for window in (None, 333)
        for threads in (1, 2, 3, 4)
    ]
    for idx, other in enumerate(others[:3]):
        assert torch.equal(one, other), idx
    for idx, other in enumerate(others[4:]):
        assert torch.equal(others[3], other), idx


def test_more_query_heads_per_kv_head_than_one_item_takes() -> None:
    problem = a_problem([Segment(150, 3), Segment(0, 40)], Heads(100, 2, 8), torch.float32)
    expected = problem.attend(ReferenceBackend())
    actual = problem.attend(NativeAttention(torch.float32))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_hidden_keys_may_hold_anything_even_no_number(
    instruction_set: str, kv_dtype: torch.dtype, block_size: int, head_dim: int
) -> None:
    """Later guesses, siblings and other sequences are not multiplied by zero: they are not read."""
    segments = [Segment(37, 40), Segment(9, 3, (-1, 0, 0)), Segment(130, 4)]
    problem = a_problem(segments, Heads(4, 2, head_dim), torch.float32, block_size)
    native = NativeAttention(kv_dtype)
    before = problem.attend(native)
    slots = ReferenceBackend().slot_mapping(problem.batch)
    last = [39, 42, 46]  # nobody's ancestors
    broken = replace(problem, keys=problem.keys.clone(), values=problem.values.clone())
    for cache in (broken.keys, broken.values):
        cache.view(-1, 2, head_dim)[slots[last]] = torch.nan
    after = broken.attend(native)
    others = [row for row in range(len(before)) if row not in last]
    assert torch.equal(before[others], after[others])
    assert after[last].isnan().all()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
def test_only_the_rows_own_slots_are_written(kv_dtype: torch.dtype) -> None:
    problem = rounded(a_problem([Segment(5, 6), Segment(0, 3)], Heads(4, 2, 8)), kv_dtype)
    empty = torch.zeros_like(problem.keys)
    kv = native_layout(empty, empty, kv_dtype)
    slots = ReferenceBackend().slot_mapping(problem.batch)
    own = [cache.view(-1, 2, 8)[slots] for cache in (problem.keys, problem.values)]
    paged_attention(problem.query, *own, kv, problem.batch, threads=2)
    for cache, rows in zip((problem.keys, problem.values), own, strict=True):
        cache.zero_()
        cache.view(-1, 2, 8)[slots] = rows
    expected = native_layout(problem.keys, problem.values, kv_dtype)
    assert torch.equal(kv[0], expected[0])
    assert torch.equal(kv[1], expected[1])

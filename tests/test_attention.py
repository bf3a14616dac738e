"""Every attention backend against the readable one, and the promise that a row stands alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specserve_kernels import BACKENDS, Backend, PagedBatch, make_backend
from tests.paged_batches import Segment, a_paged_batch

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}
FAST = sorted(set(BACKENDS) - {"reference"})


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Problem:
    query: Tensor  # [T, N, H]
    keys: Tensor  # [P, S, G, H]
    values: Tensor
    batch: PagedBatch

    def attend(self, backend: Backend, window: int | None = None) -> Tensor:
        with torch.inference_mode():
            return backend.paged_attention(
                self.query,
                self.keys,
                self.values,
                backend.prepare(self.batch),
                scale=self.query.shape[-1] ** -0.5,
                sliding_window=window,
            )


def a_problem(
    segments: list[Segment],
    heads: Heads,
    dtype: torch.dtype = torch.float64,
    block_size: int = 4,
    seed: int = 0,
) -> Problem:
    """Random queries and KV over blocks in shuffled order; unused slots hold random numbers too."""
    generator = torch.Generator().manual_seed(seed)
    batch, num_blocks = a_paged_batch(segments, block_size, seed)
    kv_shape = (num_blocks, block_size, heads.num_kv_heads, heads.head_dim)
    query_shape = (batch.query_start_loc[-1], heads.num_heads, heads.head_dim)

    def random_tensor(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return Problem(
        query=random_tensor(query_shape),
        keys=random_tensor(kv_shape),
        values=random_tensor(kv_shape),
        batch=batch,
    )


@st.composite
def some_segments(draw: st.DrawFn) -> Segment:
    context_len = draw(st.one_of(st.integers(0, 40), st.sampled_from([126, 127, 128, 129, 300])))
    num_tokens = draw(st.one_of(st.integers(1, 9), st.sampled_from([23, 24, 63, 65, 140])))
    if draw(st.booleans()) and num_tokens <= 24:
        parents = tuple(draw(st.integers(-1, idx - 1)) for idx in range(num_tokens))
        return Segment(context_len, num_tokens, parents)
    return Segment(context_len, num_tokens)


SOME_HEADS = st.sampled_from([Heads(4, 2, 8), Heads(3, 1, 16), Heads(2, 2, 6), Heads(9, 3, 64)])


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(max_examples=25, deadline=None)
@given(
    segments=st.lists(some_segments(), min_size=1, max_size=5),
    heads=SOME_HEADS,
    window=st.sampled_from([None, 1, 5, 130]),
    block_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 99),
)
def test_backends_agree_on_ragged_batches_with_trees_and_windows(
    name: str,
    dtype: torch.dtype,
    segments: list[Segment],
    heads: Heads,
    window: int | None,
    block_size: int,
    seed: int,
) -> None:
    problem = a_problem(segments, heads, dtype, block_size, seed)
    expected = problem.attend(make_backend("reference"), window)
    worst = (problem.attend(make_backend(name), window) - expected).abs().max()
    assert worst <= TOLERANCE[dtype]


@pytest.mark.parametrize("name", BACKENDS)
def test_attention_is_the_textbook_formula(name: str) -> None:
    """One chain without context against torch's own causal attention."""
    problem = a_problem([Segment(0, 150)], Heads(4, 2, 8))
    table = torch.tensor(problem.batch.block_tables[0])
    keys = problem.keys[table].flatten(0, 1)[:150].repeat_interleave(2, dim=1)  # [T, N, H]
    values = problem.values[table].flatten(0, 1)[:150].repeat_interleave(2, dim=1)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(tensor.transpose(0, 1) for tensor in (problem.query, keys, values)), is_causal=True
    ).transpose(0, 1)
    torch.testing.assert_close(problem.attend(make_backend(name)), expected, rtol=0, atol=1e-12)


def rows_alone(problem: Problem, backend: Backend, window: int | None) -> Tensor:
    """[T, N, H]: each row computed in a batch of its own, its ancestors being context.

    Its path's KV is copied to where a chain would have it, in fresh blocks.
    """
    batch, size = problem.batch, problem.batch.block_size
    rows = []
    for segment_idx, context_len in enumerate(batch.context_lens):
        start, end = batch.query_start_loc[segment_idx : segment_idx + 2]
        parents = batch.parents[segment_idx]
        paths: list[list[int]] = []
        for token_idx in range(end - start):
            parent = token_idx - 1 if parents is None else parents[token_idx]
            paths.append([*(paths[parent] if parent >= 0 else []), token_idx])
        table = torch.tensor(batch.block_tables[segment_idx])
        for token_idx, path in enumerate(paths):
            index = torch.tensor([*range(context_len), *(context_len + i for i in path)])
            num_blocks = -(-len(index) // size)
            keys, values = (
                torch.full((num_blocks * size, *cache.shape[2:]), 7.0, dtype=cache.dtype)
                for cache in (problem.keys, problem.values)
            )
            keys[: len(index)] = problem.keys[table[index // size], index % size]
            values[: len(index)] = problem.values[table[index // size], index % size]
            alone = Problem(
                query=problem.query[start + token_idx : start + token_idx + 1],
                keys=keys.view(num_blocks, size, *keys.shape[1:]),
                values=values.view(num_blocks, size, *values.shape[1:]),
                batch=PagedBatch(
                    (0, 1), (len(index) - 1,), (tuple(range(num_blocks)),), (None,), size
                ),
            )
            rows.append(alone.attend(backend, window))
    return torch.cat(rows)


RAGGED = [
    Segment(0, 70),
    Segment(500, 4),
    Segment(127, 1),
    Segment(120, 12, (-1, 0, 0, 1, 1, 2, 3, 3, 6, -1, 9, 9)),
    Segment(0, 1),
    Segment(256, 5, (-1, -1, -1, 0, 3)),
    Segment(1300, 30),
    Segment(128, 8),
]


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("window", [None, 40, 200])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "heads", [Heads(9, 3, 64), Heads(2, 2, 8), Heads(4, 1, 16), Heads(14, 2, 12)], ids=str
)
def test_a_row_has_the_same_bits_alone_and_among_any_others(
    name: str, window: int | None, dtype: torch.dtype, heads: Heads
) -> None:
    problem = a_problem(RAGGED, heads, dtype)
    backend = make_backend(name)
    assert torch.equal(problem.attend(backend, window), rows_alone(problem, backend, window))


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_one_to_forty_batch_mates_and_any_number_of_threads_change_no_bit(
    name: str, dtype: torch.dtype
) -> None:
    shape = Heads(6, 2, 16)
    before = torch.get_num_threads()
    whole = a_problem([Segment(90 + 7 * idx, 1 + idx % 5) for idx in range(40)], shape, dtype)
    starts, batch = whole.batch.query_start_loc, whole.batch
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            backend = make_backend(name)
            expected = whole.attend(backend)
            for count in (1, 2, 3, 5, 8, 13, 17, 32, 39):
                first = Problem(
                    whole.query[: starts[count]],
                    whole.keys,
                    whole.values,
                    PagedBatch(
                        starts[: count + 1],
                        batch.context_lens[:count],
                        batch.block_tables[:count],
                        batch.parents[:count],
                        batch.block_size,
                    ),
                )
                assert torch.equal(first.attend(backend), expected[: starts[count]]), threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", BACKENDS)
def test_hidden_keys_weigh_exactly_nothing(name: str) -> None:
    """Guesses of the row's own segment and other sequences may hold anything finite."""
    problem = a_problem([Segment(5, 4), Segment(9, 3, (-1, 0, 0))], Heads(4, 2, 8))
    backend = make_backend(name)
    before = problem.attend(backend)
    slots = backend.slot_mapping(problem.batch)
    # The last token of each segment is nobody's ancestor
    for token_idx in (3, 6):
        problem.keys.view(-1, 2, 8)[slots[token_idx]] = 1e6
        problem.values.view(-1, 2, 8)[slots[token_idx]] = -1e6
    after = problem.attend(backend)
    others = [0, 1, 2, 4, 5]
    assert torch.equal(before[others], after[others])
    assert not torch.allclose(before[[3, 6]], after[[3, 6]])


@pytest.mark.parametrize("name", FAST)
def test_a_sequence_of_broken_numbers_spoils_no_other(name: str) -> None:
    problem = a_problem([Segment(130, 3), Segment(20, 4), Segment(7, 2)], Heads(4, 2, 8))
    backend = make_backend(name)
    before = problem.attend(backend)
    problem.keys[torch.tensor(problem.batch.block_tables[1])] = torch.nan
    problem.values[torch.tensor(problem.batch.block_tables[1])] = torch.nan
    after = problem.attend(backend)
    others = [0, 1, 2, 7, 8]
    assert torch.equal(before[others], after[others])
    assert after[3:7].isnan().all()


@pytest.mark.parametrize("name", FAST)
def test_one_plan_serves_layers_of_other_windows_and_dtypes(name: str) -> None:
    problem = a_problem([Segment(150, 3), Segment(3, 30)], Heads(4, 2, 8))
    backend = make_backend(name)
    plan = backend.prepare(problem.batch)
    for dtype in (torch.float64, torch.float32):
        for window in (None, 10, None, 140):
            query, keys, values = (
                tensor.to(dtype) for tensor in (problem.query, problem.keys, problem.values)
            )
            shared = backend.paged_attention(
                query, keys, values, plan, scale=0.3, sliding_window=window
            )
            fresh = backend.paged_attention(
                query,
                keys,
                values,
                backend.prepare(problem.batch),
                scale=0.3,
                sliding_window=window,
            )
            assert torch.equal(shared, fresh)


def test_an_unknown_backend_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'cuda9'.*reference"):
        make_backend("cuda9")


def test_auto_takes_a_backend_that_runs_here() -> None:
    assert make_backend("auto").name in BACKENDS

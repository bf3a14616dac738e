"""Paged attention in Triton against its readable twin, and the promise that a row stands alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specserve_kernels import PagedBatch, make_backend
from tests.interpreted_triton import ON_DEVICES
from tests.paged_batches import Segment, a_paged_batch

from specserve_kernels.triton_kernels import attention, reference  # isort: skip (needs triton)
from specserve_kernels.triton_kernels.attention_rows import TileSizes, attention_rows

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SMALL = TileSizes(tokens=8, keys=16, split=32)


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Options:
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True)
class Problem:
    query: Tensor  # [T, N, H]
    keys: Tensor  # [P, S, G, H]
    values: Tensor
    batch: PagedBatch
    kv_scales: tuple[float, float] = (1.0, 1.0)

    def attend(
        self, sizes: TileSizes = SMALL, fold: bool = False, options: Options | None = None
    ) -> Tensor:
        options = options or Options()
        rows = attention_rows(self.batch, self.keys.shape[2], sizes, self.query.device)
        return attention.paged_attention(
            *(self.query, self.keys, self.values, replace(rows, fold=fold)),
            scale=self.query.shape[-1] ** -0.5,
            window=options.window,
            soft_cap=options.soft_cap,
            k_scale=self.kv_scales[0],
            v_scale=self.kv_scales[1],
        )

    def expected(self, options: Options) -> Tensor:
        return reference.paged_attention(
            *(self.query, self.keys, self.values, self.batch),
            scale=self.query.shape[-1] ** -0.5,
            window=options.window,
            soft_cap=options.soft_cap,
            k_scale=self.kv_scales[0],
            v_scale=self.kv_scales[1],
        )


def a_problem(
    segments: list[Segment],
    heads: Heads,
    *,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    block_size: int = 4,
    seed: int = 0,
    device: str = "cpu",
) -> Problem:
    """Random queries and KV in shuffled blocks; what no row may see is not a number."""
    batch, num_blocks = a_paged_batch(segments, block_size, seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks * block_size, heads.num_kv_heads, heads.head_dim)
    caches = torch.randn(2, *shape, generator=generator)
    written = torch.zeros(shape[0], dtype=torch.bool)
    for segment, table in zip(segments, batch.block_tables, strict=True):
        index = torch.arange(segment.num_slots)
        written[torch.tensor(table)[index // block_size] * block_size + index % block_size] = True
    caches[:, ~written] = torch.nan
    keys, values = caches.view(2, num_blocks, block_size, *shape[1:]).to(kv_dtype or dtype)
    query = torch.randn(
        batch.query_start_loc[-1], heads.num_heads, heads.head_dim, generator=generator
    )
    return Problem(
        query.to(dtype).to(device),
        keys.to(device),
        values.to(device),
        batch,
        (1.0, 1.0) if kv_dtype is None else (0.5, 2.0),
    )


@st.composite
def some_segments(draw: st.DrawFn) -> Segment:
    context_len = draw(st.one_of(st.integers(0, 40), st.sampled_from([31, 32, 33, 64, 90])))
    num_tokens = draw(st.one_of(st.integers(1, 9), st.sampled_from([16, 19])))
    if draw(st.booleans()) and num_tokens <= 12:
        parents = tuple(draw(st.integers(-1, idx - 1)) for idx in range(num_tokens))
        return Segment(context_len, num_tokens, parents)
    return Segment(context_len, num_tokens)


def is_reference(
    device: str,
    dtype: torch.dtype,
    segments: list[Segment],
    heads: Heads,
    options: Options,
    narrow: bool,
    block_size: int,
    fold: bool,
    seed: int,
) -> None:
    kv_dtype = torch.float8_e4m3fn if narrow else None
    problem = a_problem(
        segments,
        heads,
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_size=block_size,
        seed=seed,
        device=device,
    )
    expected = problem.expected(options).double()
    error = (problem.attend(fold=fold, options=options).double() - expected).norm()
    assert error <= TOLERANCE[dtype] * expected.norm()


RAGGED_BATCHES = given(
    segments=st.lists(some_segments(), min_size=0, max_size=4),
    heads=st.sampled_from([Heads(4, 2, 16), Heads(3, 1, 16), Heads(2, 2, 32), Heads(8, 1, 20)]),
    options=st.builds(
        Options, st.sampled_from([None, None, 1, 5, 37]), st.sampled_from([None, None, 5.0])
    ),
    narrow=st.booleans(),
    block_size=st.sampled_from([1, 4, 16]),
    fold=st.booleans(),
    seed=st.integers(0, 999),
)


@ON_DEVICES
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(max_examples=25, deadline=None)
@RAGGED_BATCHES
def test_attention_is_its_reference(device: str, dtype: torch.dtype, **batch: object) -> None:
    is_reference(device, dtype, **batch)  # type: ignore[arg-type]


@pytest.mark.slow
@ON_DEVICES
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(max_examples=250, deadline=None)
@RAGGED_BATCHES
def test_attention_is_its_reference_on_many_batches(
    device: str, dtype: torch.dtype, **batch: object
) -> None:
    is_reference(device, dtype, **batch)  # type: ignore[arg-type]


MIXED = [
    Segment(0, 21),
    Segment(90, 4),
    Segment(31, 1),
    Segment(28, 9, (-1, 0, 0, 1, 1, 2, 3, -1, 7)),
    Segment(64, 5, (-1, -1, -1, 0, 3)),
    Segment(40, 8),
]


def rows_alone(problem: Problem, options: Options) -> Tensor:
    """[T, N, H]: each row in a batch of its own, its ancestors being context before it."""
    batch, size = problem.batch, problem.batch.block_size
    rows = []
    for segment_idx, context_len in enumerate(batch.context_lens):
        start, end = batch.query_start_loc[segment_idx : segment_idx + 2]
        table = torch.tensor(batch.block_tables[segment_idx])
        parents = batch.parents[segment_idx] or tuple(range(-1, end - start - 1))
        paths: list[list[int]] = []
        for token_idx, parent in enumerate(parents):
            paths.append([*(paths[parent] if parent >= 0 else []), token_idx])
            path = [*range(context_len), *(context_len + idx for idx in paths[-1])]
            num_blocks = -(-len(path) // size)
            index = torch.tensor(path)
            keys, values = torch.full(
                (2, num_blocks * size, *problem.keys.shape[2:]), 7.0, device=problem.query.device
            ).to(problem.keys.dtype)
            keys[: len(path)] = problem.keys[table[index // size], index % size]
            values[: len(path)] = problem.values[table[index // size], index % size]
            alone = Problem(
                problem.query[start + token_idx : start + token_idx + 1],
                keys.view(num_blocks, size, *keys.shape[1:]),
                values.view(num_blocks, size, *values.shape[1:]),
                PagedBatch((0, 1), (len(path) - 1,), (tuple(range(num_blocks)),), (None,), size),
            )
            rows.append(alone.attend(options=options))
    return torch.cat(rows)


@ON_DEVICES
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("options", [Options(), Options(window=20, soft_cap=5.0)], ids=str)
def test_a_row_has_the_same_bits_alone_and_among_any_others(
    device: str, dtype: torch.dtype, options: Options
) -> None:
    problem = a_problem(MIXED, Heads(4, 2, 16), dtype=dtype, device=device)
    alone = rows_alone(problem, options)
    assert torch.equal(problem.attend(options=options), alone)
    assert torch.equal(problem.attend(options=options, fold=True), alone)


@ON_DEVICES
@pytest.mark.parametrize("fold", [False, True])
def test_padding_to_a_capacity_changes_nothing(device: str, fold: bool) -> None:
    """What a captured graph needs: more tiles, rows, tree depth and splits than there are."""
    problem = a_problem(MIXED, Heads(4, 2, 16), device=device)
    rows = replace(attention_rows(problem.batch, 2, SMALL, device), fold=fold)
    assert rows.paths is not None

    def padded(tensor: Tensor, *more: int) -> Tensor:
        return torch.nn.functional.pad(tensor, more, value=-1)

    larger = replace(
        rows,
        tiles=padded(rows.tiles, 0, 0, 0, 3),
        positions=padded(rows.positions, 0, 5),
        paths=padded(rows.paths, 0, 2, 0, 5),
        num_splits=rows.num_splits + 2,
    )
    query = torch.nn.functional.pad(problem.query, (0, 0, 0, 0, 0, 5))
    out = attention.paged_attention(query, problem.keys, problem.values, larger, scale=0.25)
    assert torch.equal(out[:-5], problem.attend(fold=fold))


@ON_DEVICES
def test_layouts_that_are_not_contiguous_are_refused(device: str) -> None:
    problem = a_problem([Segment(3, 2)], Heads(4, 2, 16), device=device)
    with pytest.raises(ValueError, match="contiguous query"):
        replace(problem, query=problem.query.mT.contiguous().mT).attend()


def test_the_twin_is_the_engines_own_reference() -> None:
    problem = a_problem(MIXED, Heads(4, 2, 16), dtype=torch.float64)
    backend = make_backend("reference")
    expected = backend.paged_attention(
        *(problem.query, problem.keys, problem.values, backend.prepare(problem.batch)),
        scale=0.25,
        sliding_window=20,
    )
    actual = problem.expected(Options(window=20))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "tokens"),
    [(32, 32, 16), (16, 8, 8), (32, 8, 8), (9, 3, 8), (32, 4, 8), (64, 4, 4), (96, 1, 1)],
)
def test_a_tile_has_16_to_64_rows_or_one_token(
    num_heads: int, num_kv_heads: int, tokens: int
) -> None:
    assert TileSizes.of_heads(num_heads, num_kv_heads).tokens == tokens

"""KV compaction after a tree, in Triton, against the readable twin."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.interpreted_triton import ON_DEVICES, reachable
from tests.paged_batches import Segment, a_paged_batch

from specserve_kernels.triton_kernels import compaction, reference  # isort: skip (needs triton)

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


@st.composite
def some_trees(draw: st.DrawFn) -> tuple[Segment, list[int]]:
    """A segment and the accepted path in it: rising tokens, each from its own depth on."""
    num_tokens = draw(st.integers(1, 9))
    path = sorted(draw(st.sets(st.integers(0, num_tokens - 1), max_size=num_tokens)))
    return Segment(draw(st.integers(0, 20)), num_tokens), path


def compact(
    caches: list[Tensor], trees: list[tuple[Segment, list[int]]], block_size: int, seed: int
) -> list[Tensor]:
    """The caches as the kernel leaves them, compared with the twin's on the way."""
    batch, _ = a_paged_batch([segment for segment, _ in trees], block_size, seed)
    device = caches[0].device
    width = max(len(path) for _, path in trees)
    paths = [[*path, *[-1] * (width - len(path))] for _, path in trees]
    tables = torch.zeros(len(trees), max(map(len, batch.block_tables)), dtype=torch.int32)
    for row, table in zip(tables, batch.block_tables, strict=True):
        row[: len(table)] = torch.tensor(table)
    arguments = (
        torch.tensor(paths, dtype=torch.int32).view(len(trees), width).to(device),
        torch.tensor(batch.context_lens, dtype=torch.int32).to(device),
        tables.to(device),
    )
    expected = [cache.clone() for cache in caches]
    reference.compact_kv(expected, *arguments)
    with reachable(caches):
        compaction.compact_kv(compaction.cache_addresses(caches), *arguments)
    for cache, twin in zip(caches, expected, strict=True):
        assert torch.equal(cache.view(torch.uint8), twin.view(torch.uint8))
    return caches


@ON_DEVICES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=200, deadline=None)
@given(
    trees=st.lists(some_trees(), min_size=1, max_size=3),
    block_size=st.sampled_from([1, 4, 16]),
    num_caches=st.sampled_from([1, 4]),
    heads=st.sampled_from([(1, 8), (3, 8), (2, 16)]),
    seed=st.integers(0, 99),
)
def test_an_accepted_path_lies_where_a_chain_would(
    device: str,
    dtype: torch.dtype,
    trees: list[tuple[Segment, list[int]]],
    block_size: int,
    num_caches: int,
    heads: tuple[int, int],
    seed: int,
) -> None:
    _, num_blocks = a_paged_batch([segment for segment, _ in trees], block_size, seed)
    generator = torch.Generator().manual_seed(seed)
    shape = (num_caches, num_blocks, block_size, *heads)
    caches = torch.randn(shape, generator=generator).to(dtype).to(device)
    compact(list(caches), trees, block_size, seed)


@ON_DEVICES
def test_a_path_may_overlap_where_it_goes(device: str) -> None:
    cache = torch.arange(6.0, device=device).repeat_interleave(8).view(6, 1, 1, 8).clone()
    batch, num_blocks = a_paged_batch([Segment(0, 3)], 1, 0)
    assert num_blocks == 6
    [moved] = compact([cache], [(Segment(0, 3), [1, 2])], 1, 0)
    first, second, third = batch.block_tables[0]
    assert [moved[block, 0, 0, 0].item() for block in (first, second)] == [second, third]


@ON_DEVICES
def test_caches_of_several_kinds_or_odd_slots_are_refused(device: str) -> None:
    caches = [torch.zeros(2, 1, 1, 8, device=device), torch.zeros(2, 1, 1, 4, device=device)]
    with pytest.raises(ValueError, match="of one shape"):
        compaction.cache_addresses(caches)
    with pytest.raises(ValueError, match="multiples of 8"):
        compaction.cache_addresses([torch.zeros(2, 1, 1, 3, device=device)])

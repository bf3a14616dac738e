"""Memory that a step streams through: same contents, and never two owners at once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from specserve_kernels import huge_pages


def test_copies_are_equal_contiguous_and_aligned() -> None:
    tensors = {
        "bytes": torch.arange(7, dtype=torch.uint8),
        "turned": torch.randn(5, 3).T,
        "half": torch.randn(2, 3, 4).to(torch.bfloat16),
        "empty": torch.empty(0),
    }
    copies = huge_pages.copied(tensors)
    assert list(copies) == list(tensors)
    for name, copy in copies.items():
        assert torch.equal(copy, tensors[name])
        assert copy.dtype == tensors[name].dtype
        assert copy.is_contiguous()
        assert copy.data_ptr() % 64 == 0 or copy.numel() == 0


def test_zeros_are_zero_and_begin_on_a_huge_page() -> None:
    tensor = huge_pages.zeros((3, 1000, 7), torch.bfloat16)
    assert tensor.shape == (3, 1000, 7)
    assert not tensor.any()
    assert tensor.data_ptr() % (2 << 20) == 0


def test_memory_that_nobody_holds_is_used_again() -> None:
    recycled = huge_pages.Recycled()
    first = recycled.empty(4, 100)
    place = first.data_ptr()
    del first
    assert recycled.empty(3, 100).data_ptr() == place


@given(st.lists(st.tuples(st.integers(1, 5), st.sampled_from(["drop", "whole", "row", "numpy"]))))
def test_a_part_that_is_held_is_never_overwritten(uses: list[tuple[int, str]]) -> None:
    recycled = huge_pages.Recycled()
    held: list[tuple[object, float]] = []
    for mark, (num_rows, kind) in enumerate(uses, start=1):
        result = recycled.empty(num_rows, 8)
        result.fill_(mark)
        if kind == "whole":
            held.append((result, mark))
        elif kind == "row":
            held.append((result[num_rows - 1 :], mark))
        elif kind == "numpy":
            held.append((result.numpy()[:1], mark))
        del result
        for part, written in held:
            assert float(part.min()) == float(part.max()) == written  # type: ignore[attr-defined]

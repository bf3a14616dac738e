"""What a GPU's steps are padded to, what of its memory they may take, and what is said of both."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specserve.compose import check_options
from specserve.drafting import Draft, chain
from specserve.errors import ConfigError
from specserve.gpu.device_memory import budget_of, peak_while
from specserve.gpu.graphs import GraphedStep
from specserve.gpu.sizes import Buckets, Geometry, StepSizes
from specserve.gpu.staging import Staged
from specserve.memory import GIB, MIB
from specserve.options import EngineOptions
from specserve.packing import PackedStep, pack
from specserve.types import RowPlan
from tests.logit_rows import a_sampling_request

GEOMETRY = Geometry(tile_tokens=4, split=512, block_size=16)
BUCKETS = Buckets(GEOMETRY, max_sequences=32, max_guesses=7, max_blocks=256)


def a_decode_row(idx: int, known: int, guesses: int, *, samples: bool = True) -> RowPlan:
    return RowPlan(
        seq_id=idx,
        request=a_sampling_request((1,)),
        history=[1] * known,
        start=known - 1,
        num_tokens=1,
        max_draft_tokens=guesses,
        samples=samples,
        is_prefill=False,
        block_table=tuple(range(-(-(known + guesses) // 16))),
    )


def a_step(rows: list[tuple[int, int]], *, tree: bool = False) -> PackedStep:
    """rows: known tokens and guesses of each"""
    plans = [a_decode_row(idx, known, guesses) for idx, (known, guesses) in enumerate(rows)]
    drafts = [chain([2] * guesses) for _, guesses in rows]
    if tree:
        count = rows[0][1]
        drafts[0] = Draft(token_ids=(2,) * count, parents=(-1,) * count)
    return pack(plans, drafts, 16, vocab_size=64)


steps = st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 7)), min_size=1, max_size=32)


@given(steps, st.booleans())
def test_every_decode_step_within_the_limits_has_a_bucket_with_room_for_it(
    rows: list[tuple[int, int]], tree: bool
) -> None:
    packed = a_step(rows, tree=tree and rows[0][1] > 1)
    sizes = GEOMETRY.of_step(packed)
    bucket = BUCKETS.of(sizes, packed.num_logits)
    assert bucket is not None
    assert bucket.holds(sizes)
    assert bucket.tokens == bucket.sequences * (bucket.guesses + 1)
    assert BUCKETS.largest().holds(replace(bucket, path_width=0))


def test_many_steps_share_few_buckets() -> None:
    def bucket_of(*rows: tuple[int, int]) -> StepSizes | None:
        packed = a_step(list(rows))
        return BUCKETS.of(GEOMETRY.of_step(packed), packed.num_logits)

    assert bucket_of((100, 2), (400, 0), (9, 3)) == bucket_of(*[(500, 3)] * 4)
    assert bucket_of((100, 3)) != bucket_of((600, 3))  # more splits
    found = {bucket_of(*[(n, k)] * b) for n in (9, 3000) for k in range(8) for b in range(1, 33)}
    assert len(found) <= 2 * 5 * 8


def test_what_is_not_recorded_runs_in_its_own_size() -> None:
    packed = a_step([(100, 3)] * 4)
    sizes = GEOMETRY.of_step(packed)
    assert BUCKETS.of(replace(sizes, tokens=99), packed.num_logits) is None  # a prompt's chunk
    assert BUCKETS.of(sizes, [4, 4, 4, 0]) is None
    assert BUCKETS.of(replace(sizes, edits=4 * 4 * 8 + 1), packed.num_logits) is None
    assert BUCKETS.of(replace(sizes, mask_rows=1), packed.num_logits) is None
    crowd = a_step([(9, 0)] * 33)
    assert BUCKETS.of(GEOMETRY.of_step(crowd), crowd.num_logits) is None
    eager = a_step([(9, 8)])
    assert BUCKETS.of(GEOMETRY.of_step(eager), eager.num_logits) is None


def test_memory_is_profiled_with_the_largest_steps_of_both_kinds() -> None:
    largest = BUCKETS.largest()
    assert (largest.tokens, largest.guesses, largest.path_width) == (32 * 8, 7, 8)
    assert largest.splits * 512 >= 256 * 16
    prompts = BUCKETS.unrecorded(512)
    assert [sizes.tokens for sizes in prompts][:3] == [512, 256, 128]
    assert prompts[0].tiles == 128
    assert [sizes.logits for sizes in prompts][:3] == [384, 256, 128]  # 256 choose, 128 are scored


def test_a_step_without_graphs_is_called_every_time() -> None:
    calls: list[int] = []
    step = GraphedStep(lambda: calls.append(1), torch.device("cpu"))
    for _ in range(3):
        step()
    assert len(calls) == 3


def test_arrays_arrive_as_they_were_filled_each_at_a_multiple_of_16_bytes() -> None:
    fields = {
        "odd": (torch.int32, (3,)),
        "none": (torch.float32, (0, 5)),
        "seeds": (torch.int64, (2, 2)),
        "top_ps": (torch.float64, (1,)),
    }
    staged = Staged(fields, torch.device("cpu"))
    before = staged.tensors["odd"].data_ptr()
    staged.host["odd"][:] = [1, 2, 3]
    staged.host["seeds"][1] = [-5, 2**40]
    staged.host["top_ps"][0] = 0.1
    assert staged.tensors["odd"].tolist() == [0, 0, 0]
    staged.send()
    assert staged.tensors["odd"].tolist() == [1, 2, 3]
    assert staged.tensors["seeds"].tolist() == [[0, 0], [-5, 2**40]]
    assert staged.tensors["top_ps"].tolist() == [0.1]
    assert staged.tensors["none"].shape == (0, 5)
    assert staged.tensors["odd"].data_ptr() == before
    base = min(tensor.data_ptr() for tensor in staged.tensors.values())
    assert all((tensor.data_ptr() - base) % 16 == 0 for tensor in staged.tensors.values())


def test_chains_are_padded_to_sizes_with_room_for_two_known_tokens_per_row() -> None:
    buckets = Buckets(Geometry(tile_tokens=8, split=64, block_size=4), 6, 7, 100)
    sizes = buckets.of_chains(3, 2, 2, 70)
    assert (sizes.sequences, sizes.guesses, sizes.tokens, sizes.logits) == (4, 3, 8, 4)
    assert (sizes.tiles, sizes.splits, sizes.table_width, sizes.path_width) == (4, 4, 64, 0)
    assert buckets.of_chains(6, 7, 2, 400).sequences == 6
    assert buckets.of_chains(6, 7, 2, 400).table_width == 100


# ---- memory and its errors ---------------------------------------------------------------


def test_a_budget_is_a_part_of_the_device_less_what_others_hold() -> None:
    alone = budget_of(total=80 * GIB, free=64 * GIB, own=16 * GIB, utilization=0.9)
    assert alone == 72 * GIB
    shared = budget_of(total=80 * GIB, free=44 * GIB, own=16 * GIB, utilization=0.9)
    assert shared == 52 * GIB  # others hold 20
    # What the allocator holds but does not use is free for us: free + own may exceed what is there.
    assert budget_of(total=80 * GIB, free=80 * GIB, own=GIB, utilization=1.0) == 80 * GIB


def test_a_full_gpu_is_refused_with_what_is_on_it_and_the_way_out() -> None:
    with pytest.raises(
        ConfigError, match=r"80\.0 GiB, of which others hold 60\.0 and the weights 1"
    ):
        budget_of(total=80 * GIB, free=4 * GIB, own=16 * GIB, utilization=0.9)
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization 0\.1 leaves nothing"):
        budget_of(total=80 * GIB, free=64 * GIB, own=16 * GIB, utilization=0.1)


def test_a_step_that_does_not_fit_beside_the_weights_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def largest_step() -> None:
        raise torch.OutOfMemoryError("tried to allocate 3.00 GiB")

    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 700 * MIB)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 750 * MIB)
    with pytest.raises(ConfigError, match=r"700 MiB \(tried.*3\.00 GiB.*--max-num-batched-tokens"):
        peak_while(largest_step)
    assert peak_while(lambda: None) == 50 * MIB


@pytest.mark.parametrize("value", [0.0, -0.5, 1.01, float("nan")])
def test_a_utilization_that_is_no_part_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-utilization is"):
        check_options(EngineOptions(gpu_memory_utilization=value))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="--device cuda: Triton kernels cannot run here: "):
        check_options(EngineOptions(device="cuda"))
    with pytest.raises(ConfigError, match=r"backend 'native' runs on CPUs: on a GPU choose auto"):
        check_options(EngineOptions(device="cuda", backend="native"))
    with pytest.raises(ConfigError, match="--backend: Triton kernels cannot run here: "):
        check_options(EngineOptions(backend="triton"))

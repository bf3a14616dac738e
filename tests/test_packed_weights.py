"""Packed weights in the cache: made once, mapped whole, remade when what they come from changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specserve.packed_weights import ALIGNMENT, FILE_NAME, cached_at, packed_weights, read_packed
from specserve_kernels import native_library
from specserve_kernels.native_step import Dtype
from tests.tiny_models import random_weights, tiny_config

pytestmark = pytest.mark.skipif(native_library.load() is None, reason=str(native_library.why_not()))
CONFIG = tiny_config(vocab=37, hidden=40, heads=4, kv_heads=2, intermediate=50)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user cache of its own."""
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    write_weights(directory, seed=0)
    return directory


def write_weights(directory: Path, seed: int) -> None:
    weights = {name: tensor.float() for name, tensor in random_weights(CONFIG, seed).items()}
    save_file(weights, directory / "model.safetensors")


def packed_once(directory: Path, dtype: Dtype = "int8") -> tuple[dict[str, Tensor], list[str]]:
    """The weights, and what was said meanwhile."""
    said: list[str] = []
    return packed_weights(directory, CONFIG, dtype, said.append), said


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.parametrize("dtype", ["int8", "bf16", "fp32"])
def test_the_second_start_maps_what_the_first_packed(checkpoint: Path, dtype: Dtype) -> None:
    first, said = packed_once(checkpoint, dtype)
    assert said[0].startswith(f"packing weights as {dtype}, once")
    assert said[-1] == "packing weights: 100%"
    second, said = packed_once(checkpoint, dtype)
    assert said == []
    assert same(first, second)


@pytest.mark.parametrize("dtype", ["int8", "bf16", "fp32"])
def test_every_mapped_tensor_begins_at_a_whole_cache_line(checkpoint: Path, dtype: Dtype) -> None:
    packed, _ = packed_once(checkpoint, dtype)
    assert {tensor.data_ptr() % ALIGNMENT for tensor in packed.values()} == {0}
    assert any(tensor.nbytes % ALIGNMENT for tensor in packed.values())  # padding was needed


def test_the_file_is_safetensors_to_everybody_else(checkpoint: Path) -> None:
    packed, _ = packed_once(checkpoint)
    theirs = load_file(cached_at(checkpoint, "int8") / FILE_NAME)
    assert same(packed, {name: theirs[name] for name in packed})
    assert all(name.startswith("pad.") for name in theirs.keys() - packed.keys())


def test_another_checkpoint_in_the_same_place_is_packed_again_and_the_old_file_goes(
    checkpoint: Path,
) -> None:
    before, _ = packed_once(checkpoint)
    old = cached_at(checkpoint, "int8")
    write_weights(checkpoint, seed=1)
    os.utime(checkpoint / "model.safetensors", ns=(1, 1))
    after, said = packed_once(checkpoint)
    assert said
    assert not same(before, after)
    assert [entry.name for entry in old.parent.iterdir()] == [cached_at(checkpoint, "int8").name]
    assert before["head.packed"].sum() > 0  # who mapped the old one still has it


def test_dtypes_and_models_do_not_share_a_file(checkpoint: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "tiny"
    checkpoint.parent.joinpath("elsewhere").mkdir()
    other.mkdir()
    (other / "config.json").write_text("{}")
    write_weights(other, seed=2)
    places = {cached_at(where, d) for where in (checkpoint, other) for d in ("int8", "bf16")}
    assert len(places) == 4
    first, _ = packed_once(checkpoint)
    packed_once(other)
    again, said = packed_once(checkpoint)
    assert said == []
    assert same(first, again)


def test_a_damaged_file_is_packed_again(checkpoint: Path) -> None:
    first, _ = packed_once(checkpoint)
    path = cached_at(checkpoint, "int8") / FILE_NAME
    kept = {name: tensor.clone() for name, tensor in first.items()}
    path.write_bytes(path.read_bytes()[:1000])
    second, said = packed_once(checkpoint)
    assert "is damaged" in said[0]
    assert same(kept, second)
    assert same(kept, read_packed(path))


def test_without_a_cache_to_write_to_the_weights_stay_in_memory(
    checkpoint: Path, cache: Path
) -> None:
    cache.write_text("a file where the directory would be")
    packed, said = packed_once(checkpoint)
    assert "not kept" in said[-1]
    assert packed["head.packed"].data_ptr() % ALIGNMENT == 0

"""How many blocks fit: the arithmetic, and the measurement it starts from."""

from __future__ import annotations

import pytest
import torch

from specserve.errors import ConfigError
from specserve.kv_cache import kv_bytes_per_token
from specserve.memory import GIB, MIB, growth_while, plan_memory


@pytest.mark.parametrize(
    ("layers", "kv_heads", "dtype", "per_token"),
    [
        (22, 4, torch.float16, 22_528),  # TinyLlama-1.1B
        (30, 3, torch.bfloat16, 23_040),  # SmolLM2-135M
        (30, 3, torch.float32, 46_080),
    ],
)
def test_blocks_are_what_is_left_divided_by_what_one_takes(
    layers: int, kv_heads: int, dtype: torch.dtype, per_token: int
) -> None:
    found = kv_bytes_per_token(layers=layers, kv_heads=kv_heads, head_dim=64, dtype=dtype)
    assert found == per_token
    report = plan_memory(
        budget=2 * GIB,
        weights=500 * MIB,
        activation=100 * MIB,
        kv_bytes_per_token=found,
        block_size=16,
        kv_limit=8 * GIB,
    )
    assert report.num_blocks == (2048 - 600) * MIB // (16 * per_token)
    assert f"{16 * per_token // 1024} KiB per block" in " ".join(report.lines())


def test_a_limit_on_the_pool_is_kept_and_a_pool_of_nothing_is_refused() -> None:
    sizes = {"weights": 500 * MIB, "activation": 0, "kv_bytes_per_token": 23_040, "block_size": 16}
    report = plan_memory(budget=8 * GIB, kv_limit=GIB, **sizes)
    assert GIB - 16 * 23_040 < report.kv_bytes <= GIB
    with pytest.raises(ConfigError, match="--memory-gb"):
        plan_memory(budget=500 * MIB, kv_limit=GIB, **sizes)


def test_growth_is_what_the_work_held_at_its_peak() -> None:
    def work() -> None:
        held = torch.ones(64 * MIB, dtype=torch.uint8)
        held.add_(1)

    grown = growth_while(work)
    assert 60 * MIB <= grown <= 100 * MIB

"""KV arithmetic and the movement of slots."""

from __future__ import annotations

import pytest
import torch

from specserve.kv_cache import KVCache, kv_bytes_per_token
from specserve.models.config import parse_model_config
from specserve_kernels import BACKENDS, PagedBatch, make_backend
from tests.tiny_models import tiny_decoder

TINYLLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


@pytest.mark.parametrize(
    ("document", "dtype", "per_token"),
    [
        (TINYLLAMA, torch.float16, 22_528),
        (TINYLLAMA, torch.bfloat16, 22_528),
        (SMOLLM2, torch.bfloat16, 23_040),
        (SMOLLM2, torch.float32, 46_080),
    ],
)
def test_bytes_per_token_of_known_models(
    document: dict[str, object], dtype: torch.dtype, per_token: int
) -> None:
    config = parse_model_config(document)
    assert config.head_dim == 64
    assert per_token == kv_bytes_per_token(
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )


def test_a_tinyllama_block_of_16_tokens_takes_352_kib() -> None:
    per_token = kv_bytes_per_token(layers=22, kv_heads=4, head_dim=64, dtype=torch.float16)
    assert 16 * per_token == 352 * 1024


def test_the_pool_takes_what_the_arithmetic_says() -> None:
    decoder = tiny_decoder(layers=3, dtype=torch.float32)
    cache = decoder.new_kv_cache(num_blocks=10, block_size=16)
    assert cache.keys.nbytes + cache.values.nbytes == 10 * 16 * decoder.kv_bytes_per_token()


def a_cache_that_names_its_slots() -> KVCache:
    """Slot s of layer l holds 100*l + s in keys and its negative in values."""
    cache = KVCache(
        layers=2, num_blocks=4, block_size=3, kv_heads=1, head_dim=2, dtype=torch.float32
    )
    names = 100.0 * torch.arange(2)[:, None] + torch.arange(12)
    cache.keys.copy_(names.view(2, 4, 3, 1, 1).expand_as(cache.keys))
    cache.values.copy_(-cache.keys)
    return cache


def test_move_reads_all_sources_before_it_writes() -> None:
    cache = a_cache_that_names_its_slots()
    cache.move([4, 5, 9], [3, 4, 5])  # a chain of moves, as an accepted path with gaps needs
    expected = [0, 1, 2, 4, 5, 9, 6, 7, 8, 9, 10, 11]
    for layer in (0, 1):
        keys = cache.keys[layer].view(12, 2)
        assert keys[:, 0].tolist() == [100 * layer + slot for slot in expected]
        assert torch.equal(cache.values[layer], -cache.keys[layer])


def test_moving_nothing_changes_nothing() -> None:
    cache = a_cache_that_names_its_slots()
    cache.move([], [])
    assert torch.equal(cache.keys, a_cache_that_names_its_slots().keys)


@pytest.mark.parametrize("name", BACKENDS)
def test_kv_lands_in_the_slots_that_the_block_table_names(name: str) -> None:
    backend = make_backend(name)
    batch = PagedBatch(
        query_start_loc=(0, 3, 4),
        context_lens=(2, 5),
        block_tables=((3, 0), (1, 2)),
        parents=((-1, 0, 0), None),
        block_size=4,
    )
    slots = backend.slot_mapping(batch)
    assert slots.tolist() == [14, 15, 0, 9]
    key = torch.arange(4.0)[:, None, None].expand(4, 2, 5).contiguous()
    k_cache, v_cache = torch.full((2, 4, 4, 2, 5), -1.0)
    backend.write_kv(key, 10 * key, k_cache, v_cache, slots)
    written = k_cache.view(16, 10)
    assert [int(written[slot, 0]) for slot in (14, 15, 0, 9)] == [0, 1, 2, 3]
    assert int((k_cache != -1).sum()) == 4 * 10
    assert torch.equal(v_cache.view(16, 10)[slots], 10 * key.view(4, 10))

"""The demo model's logits against transformers' own implementation of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specserve.models.config import parse_model_config
from specserve.models.decoder import Decoder
from specserve.tokenizer import Tokenizer
from specserve.weights import load_weights, read_config
from specserve_kernels import make_backend
from specserve_kernels.interface import PagedBatch

pytestmark = [pytest.mark.demo, pytest.mark.timeout(600)]

TEXT = (
    "Repeat after me: the quick brown fox jumps over 13 lazy dogs.\ndef f(x):\n    return x ** 2\n"
)


def our_logits(directory: Path, ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """[T, V], computed in chunks over scattered blocks."""
    model = Decoder(
        parse_model_config(read_config(directory)),
        load_weights(directory),
        dtype=dtype,
        backend=make_backend("cpu"),
    )
    cache = model.new_kv_cache(num_blocks=32, block_size=4)
    table = tuple(range(31, -1, -1))
    parts = []
    with torch.inference_mode():
        for first in range(0, len(ids), 7):
            chunk = ids[first : first + 7]
            batch = PagedBatch(
                query_start_loc=(0, len(chunk)),
                context_lens=(first,),
                block_tables=(table,),
                parents=(None,),
                block_size=4,
            )
            positions = torch.arange(first, first + len(chunk))
            tokens = torch.tensor(chunk)
            parts.append(model.forward(tokens, positions, batch, cache, range(len(chunk))))
    return torch.cat(parts)


def test_logits_equal_transformers(demo_model_dir: Path) -> None:
    """In fp32, within 1e-5 of the largest logit (about 43; both sum in orders of their own)."""
    from transformers import AutoModelForCausalLM

    ids = Tokenizer.load(demo_model_dir).encode(TEXT)
    theirs = AutoModelForCausalLM.from_pretrained(
        demo_model_dir, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0]
    ours = our_logits(demo_model_dir, ids, torch.float32)
    difference = (ours - expected).abs().max().item()
    largest = expected.abs().max().item()
    print(f"largest difference {difference:.2e}, largest logit {largest:.1f}")
    assert difference <= 1e-5 * largest
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))

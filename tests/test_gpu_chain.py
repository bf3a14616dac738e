"""A draft's chain grown on the device against the same chain grown by forwards and the host.

In the interpreter with a small model; with -m gpu the same on a device.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from specserve.config import EngineConfig
from specserve.drafting import Draft, DraftRow, Outcome
from specserve.kv_cache import KVCache
from specserve.models.interface import ChainAsk, ChainGrower
from specserve.targets import make_chains
from specserve.types import Request
from specserve_drafts.draft_model import DraftModelDrafter
from tests.interpreted_triton import ON_DEVICES
from tests.logit_rows import a_sampling_request
from tests.tiny_models import random_weights, tiny_config

from specserve.gpu.chain import DeviceChains  # isort: skip (needs triton)
from specserve.gpu.decoder import TritonDecoder  # isort: skip

V, S, BLOCKS = 64, 4, 24
CONFIG = tiny_config(vocab=V, layers=1, hidden=32, heads=4, kv_heads=2)
ENGINE = EngineConfig(
    block_size=S,
    num_blocks=BLOCKS,
    max_model_len=32,
    max_num_seqs=3,
    max_num_batched_tokens=48,
    max_prefill_chunk=64,
    max_draft_tokens=4,
    enable_prefix_caching=True,
)


def a_decoder(device: str) -> TritonDecoder:
    weights = random_weights(CONFIG, 3)
    return TritonDecoder(CONFIG, weights, dtype=torch.float32, device=torch.device(device))


class Counting:
    """A grower that says how many chains it grew."""

    def __init__(self, inner: ChainGrower) -> None:
        self._inner, self.num_grown = inner, 0

    def takes(self, ask: ChainAsk) -> bool:
        return self._inner.takes(ask)

    def grow(self, asks: Seq[ChainAsk]) -> list[Draft]:
        self.num_grown += len(asks)
        return self._inner.grow(asks)


def two_drafters(device: str) -> tuple[DraftModelDrafter, DraftModelDrafter, Counting]:
    """By forwards, and with chains on the device."""
    decoder, counting = a_decoder(device), list[Counting]()

    def chains(kv_cache: KVCache) -> ChainGrower:
        counting.append(Counting(make_chains(ENGINE, decoder, V)(kv_cache)))
        return counting[0]

    plain = DraftModelDrafter(decoder, vocab_size=V, num_blocks=BLOCKS, block_size=S)
    grown = DraftModelDrafter(decoder, vocab_size=V, num_blocks=BLOCKS, block_size=S, chains=chains)
    return plain, grown, counting[0]


def a_row(seq_id: int, request: Request, history: Seq[int], most: int, **other: Any) -> DraftRow:
    return DraftRow(
        seq_id=seq_id,
        request=request,
        history=list(history),
        num_known=len(history),
        max_tokens=most,
        kv_len=0,
        block_table=tuple(range(8 * seq_id, 8 * seq_id + 8)),
        **other,
    )


def outcome(row: DraftRow, start: int, emitted: Seq[int], num_accepted: int) -> Outcome:
    return Outcome(
        seq_id=row.seq_id,
        request=row.request,
        start=start,
        token_ids=(*row.history[start:], *emitted),
        num_computed=len(row.history) - start + num_accepted,
        drafter="draft_model",
        num_drafted=len(emitted),
        num_accepted=num_accepted,
    )


def same(found: Seq[Draft], expected: Seq[Draft]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.parents, one.kv_len, one.probs) == (other.parents, other.kv_len, None)
        assert one.scores == pytest.approx(other.scores, rel=0.1, abs=1e-3)


REQUESTS = [
    a_sampling_request((5, 9, 5, 9, 5), seed=1, temperature=0.0),
    a_sampling_request((20, 21), seed=2, temperature=0.9),
    a_sampling_request((40, 41, 42, 43), seed=3, temperature=1.3, top_k=9, top_p=0.9, min_p=0.01),
]


# (guesses per row, how many of them are accepted)
STEPS = [((2, 3, 1), (2, 1, 0)), ((1, 4, 3), (0, 4, 3)), ((3, 3, 2), ())]


@ON_DEVICES
def test_chains_grown_on_the_device_are_those_of_forwards_step_after_step(device: str) -> None:
    """Ragged rooms, one and two known tokens, acceptance of all, some and none."""
    plain, grown, counting = two_drafters(device)
    histories = [list(request.prompt_ids) for request in REQUESTS]
    for step, (rooms, accepts) in enumerate(STEPS):
        rows = [
            a_row(idx, request, histories[idx], rooms[idx], sharpness=1.5 if idx == 2 else 1.0)
            for idx, request in enumerate(REQUESTS)
        ]
        expected, found = plain.propose(rows), grown.propose(rows)
        same(found, expected)
        assert [len(draft.token_ids) for draft in found] == list(rooms)
        # Prompts of 5 and 4 tokens are caught up by forwards, the one of 2 at once.
        assert counting.num_grown == (1, 4, 7)[step]
        outcomes = []
        for row, draft, num_accepted in zip(rows, found, accepts, strict=False):
            emitted = [*draft.token_ids[:num_accepted], (step + 60) % V]
            outcomes.append(outcome(row, len(row.history) - 1, emitted, num_accepted))
            histories[row.seq_id] += emitted
        plain.observe(outcomes)
        grown.observe(outcomes)


@ON_DEVICES
def test_what_the_device_cannot_grow_is_left_to_forwards(device: str) -> None:
    plain, grown, counting = two_drafters(device)
    history = (1, 2)
    rows = [
        a_row(0, a_sampling_request(history, seed=1), history, 3, width=2),
        a_row(1, a_sampling_request(history, seed=1, verify="block"), history, 1),
        a_row(2, a_sampling_request(history, seed=1, logit_bias={3: 5.0}), history, 1),
    ]
    for row in rows:
        [draft], [expected] = grown.propose([row]), plain.propose([row])
        assert draft.token_ids == expected.token_ids
        assert (draft.parents, draft.scores) == (expected.parents, expected.scores)
        assert (draft.probs is None) == (expected.probs is None)
    assert counting.num_grown == 0
    greedy = a_sampling_request(history, seed=1, verify="block", temperature=0.0)
    same(
        grown.propose([a_row(2, greedy, history, 1)]), plain.propose([a_row(2, greedy, history, 1)])
    )
    assert counting.num_grown == 1


@ON_DEVICES
def test_useless_logits_end_a_chain(device: str) -> None:
    head = {"model.embed_tokens.weight": torch.full((V, 32), torch.nan)}
    weights = random_weights(CONFIG, 3) | head
    decoder = TritonDecoder(CONFIG, weights, dtype=torch.float32, device=torch.device(device))
    chains = DeviceChains(
        decoder,
        decoder.new_kv_cache(BLOCKS, S),
        vocab_size=V,
        max_sequences=2,
        max_guesses=2,
        max_model_len=32,
    )
    [draft] = chains.grow([ChainAsk(a_row(0, REQUESTS[1], (20, 21), 2), 0, 2)])
    assert (draft.token_ids, draft.kv_len) == ((), 2)


@ON_DEVICES
def test_the_largest_chains_that_may_come_run_without_a_row(device: str) -> None:
    decoder = a_decoder(device)
    cache = decoder.new_kv_cache(1, S)
    cache.keys.fill_(3.0)
    chains = make_chains(ENGINE, decoder, V)(cache)
    assert isinstance(chains, DeviceChains)
    chains.run_largest()
    assert (cache.keys == 3.0).all()

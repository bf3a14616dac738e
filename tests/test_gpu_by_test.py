"""Guesses that are accepted by a test, judged on the device as the host judges them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from specserve.drafting import NO_DRAFT, Draft, chain
from specserve.packing import pack
from specserve.target import HostTarget, Judged, Target
from specserve.types import RowPlan
from tests.interpreted_triton import ON_DEVICES, reachable
from tests.logit_rows import a_sampling_request
from tests.tiny_models import random_weights, tiny_config

from specserve.gpu.decoder import TritonDecoder  # isort: skip (needs triton)
from specserve.gpu.target import DeviceTarget  # isort: skip
from specserve.gpu.wishes import wishes_of  # isort: skip

V, S = 64, 4
CONFIG = tiny_config(vocab=V, layers=1, hidden=32, heads=4, kv_heads=2)


def a_row(idx: int, *, samples: bool = True, **request: Any) -> RowPlan:
    history = [(7 * idx + at) % V for at in range(3 + idx % 2)]
    return RowPlan(
        seq_id=idx,
        request=a_sampling_request(history[:3], seed=50 + idx, **request),
        history=history,
        start=0,
        num_tokens=len(history),
        max_draft_tokens=3,
        samples=samples,
        is_prefill=False,
        block_table=(2 * idx, 2 * idx + 1),
    )


def a_drawn_chain(seed: int, length: int, plain: Judged) -> Draft:
    """Guesses drawn from laws that favour what the target says first."""
    assert plain.verdict is not None
    rng = np.random.default_rng(seed)
    laws = rng.random((length, V)).astype(np.float32)
    laws[0, plain.verdict.token_ids[0]] += 40
    laws /= laws.sum(1, keepdims=True)
    wide = laws.astype(np.float64)
    guesses = [int(rng.choice(V, p=law / law.sum())) for law in wide]
    return chain(guesses, probs=torch.from_numpy(laws))


def run_on(target: Target, rows: list[RowPlan], drafts: list[Draft]) -> list[Judged]:
    packed = pack(rows, drafts, S, vocab_size=V)
    return target.run(rows, drafts, packed, (), lambda: None).judged


ROWS = [
    a_row(0, verify="block", temperature=1.0),
    a_row(1, samples=False),
    a_row(2, verify="rejection", temperature=0.8, top_k=20, presence_penalty=0.5),
    a_row(3, temperature=0.9),
    a_row(4, verify="block", temperature=1.2, top_p=0.9, logprobs=1),
    a_row(5, verify="rejection", temperature=0.0),
    a_row(6, verify="rejection", temperature=1.0),
]


@ON_DEVICES
def test_chains_under_both_rules_get_the_hosts_verdicts_in_one_step(device: str) -> None:
    """Drawn and given guesses, edited rows, and between them rows that are not tested."""
    weights = random_weights(CONFIG, 3)
    decoder = TritonDecoder(CONFIG, weights, dtype=torch.float32, device=torch.device(device))
    host = HostTarget(decoder, num_blocks=16, block_size=S, vocab_size=V)
    target = DeviceTarget(
        decoder,
        num_blocks=16,
        block_size=S,
        vocab_size=V,
        max_sequences=8,
        max_guesses=3,
        max_model_len=12,
    )
    plain = run_on(host, ROWS, [NO_DRAFT] * len(ROWS))
    drafts = [
        a_drawn_chain(0, 3, plain[0]),
        NO_DRAFT,
        a_drawn_chain(10, 2, plain[2]),
        chain([5, 6]),
        chain([9, 70]),
        chain([plain[5].verdict.token_ids[0], 3]),  # type: ignore[union-attr]
        NO_DRAFT,
    ]
    num_logits = pack(ROWS, drafts, S, vocab_size=V).num_logits
    wishes = wishes_of(ROWS, drafts, num_logits, V)
    assert wishes.judged_apart == {0, 2, 4, 5}
    assert not wishes.judged_on_host
    assert len(wishes.kept) == 3  # row 4's, for its log-probabilities
    with reachable(target.kv_tensors):
        expected, found = run_on(host, ROWS, drafts), run_on(target, ROWS, drafts)
    assert found == expected
    paths = [len(judged.verdict.path) if judged.verdict else 0 for judged in found]
    assert paths[5] >= 1
    assert sum(paths) >= 2

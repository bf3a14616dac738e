"""Of `gpu.check`: chains of a draft, grown on the device, against one forward at a time."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import Final

import msgspec
import torch

from specserve.drafting import DraftRow
from specserve.gpu.chain import MOST_KNOWN, DeviceChains
from specserve.gpu.decoder import TritonDecoder
from specserve.models.interface import ChainAsk
from specserve.types import Request
from specserve_kernels.gpu_check.report import Correct
from specserve_kernels.interface import PagedBatch
from specserve_kernels.triton_kernels.reference_sampling import choose_token
from specserve_kernels.triton_kernels.rows import Row

_BLOCK: Final = 16
_CALLS: Final = 3  # as it is, recorded, replayed


def check_chains(decoder: TritonDecoder, requests: Seq[Request], most: int) -> Iterator[Correct]:
    """Guesses that differ, of rows that want 1 to `most` of them after 1 or 2 tokens."""
    rows = [_a_row(idx, request, 1 + idx % most) for idx, request in enumerate(requests)]
    chains = DeviceChains(
        decoder,
        decoder.new_kv_cache(len(rows), _BLOCK),
        vocab_size=decoder.vocab_size,
        max_sequences=len(rows),
        max_guesses=most,
        max_model_len=_BLOCK,
    )
    asks = [ChainAsk(row, 0, row.max_tokens) for row in rows]
    asks = [ask for ask in asks if chains.takes(ask)]
    expected = [_chain_by_forwards(decoder, ask) for ask in asks]
    wrong = 0
    for _ in range(_CALLS):
        found = [list(draft.token_ids) for draft in chains.grow(asks)]
        wrong += sum(one != other for one, other in zip(found, expected, strict=True))
    yield Correct("engine", "chains of a draft model", _CALLS * len(asks), wrong, 0)


def _a_row(idx: int, request: Request, num_guesses: int) -> DraftRow:
    history = list(request.prompt_ids[:MOST_KNOWN])
    request = msgspec.structs.replace(request, prompt_ids=tuple(history))
    return DraftRow(
        seq_id=idx,
        request=request,
        history=history,
        num_known=len(history),
        max_tokens=num_guesses,
        kv_len=0,
        block_table=(idx,),
    )


def _chain_by_forwards(decoder: TritonDecoder, ask: ChainAsk) -> list[int]:
    history, params, computed = list(ask.row.history), ask.row.request.params, 0
    cache = decoder.new_kv_cache(1, _BLOCK)
    while len(history) < len(ask.row.history) + ask.num_guesses:
        new = range(computed, len(history))
        batch = PagedBatch((0, len(new)), (computed,), ((0,),), (None,), _BLOCK)
        ids = torch.tensor([history[at] for at in new])
        logits = decoder.forward(ids, torch.tensor(new), batch, cache, [len(new) - 1])
        row = Row(
            seed=ask.row.request.seed,
            position=len(history),
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
        )
        computed = len(history)
        history.append(choose_token(logits[0].numpy(), row))
    return history[len(ask.row.history) :]

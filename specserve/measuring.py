"""What a forward of this model costs on this machine, by number of tokens: measured at start.

Rounds over all sizes, so that a busy moment of the machine meets all of them alike; the best of the
rounds counts, since whatever disturbs a measurement only ever makes it longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final, Protocol

import torch
from torch import Tensor

from specserve.kv_cache import KVCache
from specserve.speculation.costs import Profile, SizeCost
from specserve_kernels.interface import PagedBatch

# By what is most worth knowing: later ones are left out where the machine is too slow for them.
SIZES: Final = (1, 16, 8, 4, 32, 2, 17, 24, 12, 64, 33, 48, 128, 65, 96, 256, 192, 512)
_LEAST: Final = 4  # sizes that are measured however long it takes
_WITH_ONE: Final = (8, 16, 32, 64, 128)  # measured with one row of logits, too
_ROUNDS: Final = 4
_TOKENS_PER_SEQ: Final = 4
_CONTEXT: Final = 64
_LONG_CONTEXT: Final = 1024


class Measurable(Protocol):
    """As much of a CausalLM as is measured; `forward` returns once the work is done."""

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache: ...

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batch: PagedBatch,
        kv_cache: KVCache,
        logits_indices: Seq[int],
    ) -> Tensor: ...


def measure_profile(
    model: Measurable, *, block_size: int, max_tokens: int, budget_seconds: float = 3.0
) -> Profile:
    """max_tokens: the largest step. Takes about budget_seconds, and its own small KV cache."""
    started = time.perf_counter()
    forward = _forward_of(model, block_size, min(max_tokens, max(SIZES)))

    def spent() -> float:
        return time.perf_counter() - started

    sizes: list[int] = []
    best: dict[tuple[int, int, int], float] = {}
    for size in SIZES:  # the first round warms up, and finds out how many sizes there is time for
        if size > max_tokens or (len(sizes) >= _LEAST and spent() > budget_seconds / 3):
            continue
        forward(size, size, _CONTEXT)
        sizes.append(size)
    kinds = [(size, size, _CONTEXT) for size in sizes]
    kinds += [(size, 1, _CONTEXT) for size in _WITH_ONE if size in sizes]
    middle = min(16, max(sizes))
    kinds.append((middle, middle, _LONG_CONTEXT))
    for turn in range(_ROUNDS):
        for kind in kinds:
            if turn and spent() > budget_seconds:
                break
            before = time.perf_counter()
            forward(*kind)
            seconds = time.perf_counter() - before
            best[kind] = min(seconds, best.get(kind, seconds))
    more = best[middle, middle, _LONG_CONTEXT] - best[middle, middle, _CONTEXT]
    per_attended = max(0.0, more) / (middle * (_LONG_CONTEXT - _CONTEXT))
    return Profile(
        tuple(_size_cost(size, best, per_attended) for size in sorted(sizes)), per_attended
    )


def _size_cost(size: int, best: dict[tuple[int, int, int], float], per_attended: float) -> SizeCost:
    whole = best[size, size, _CONTEXT]
    head = 0.0
    known = [one for one in _WITH_ONE if (one, 1, _CONTEXT) in best]
    if known and size > 1:  # what the other rows of logits cost, at the nearest size that tells
        near = min(known, key=lambda one: abs(one - size))
        head = max(0.0, best[near, near, _CONTEXT] - best[near, 1, _CONTEXT])
        head *= (size - 1) / (near - 1)
    keys = size * _CONTEXT * per_attended
    floor = 0.1 * whole
    return SizeCost(size, max(whole - keys, floor), max(whole - head - keys, floor))


def _forward_of(model: Measurable, block_size: int, most: int) -> Callable[[int, int, int], None]:
    """(tokens, rows of logits, context) -> one forward over sequences of a few tokens each."""
    long_blocks = -(-(_LONG_CONTEXT + _TOKENS_PER_SEQ) // block_size)
    own_blocks = -(-most // _TOKENS_PER_SEQ) + 1
    cache = model.new_kv_cache(long_blocks + own_blocks, block_size)
    for tensor in (cache.keys, cache.values):
        tensor.zero_()

    @torch.inference_mode()
    def forward(num_tokens: int, num_logits: int, context: int) -> None:
        starts = [*range(0, num_tokens, _TOKENS_PER_SEQ), num_tokens]
        num_seqs = len(starts) - 1
        shared = tuple(range(-(-context // block_size)))
        positions = [
            context + at for seq in range(num_seqs) for at in range(starts[seq + 1] - starts[seq])
        ]
        batch = PagedBatch(
            query_start_loc=tuple(starts),
            context_lens=(context,) * num_seqs,
            # Contexts may be shared, nobody reads what they say; what is written is not.
            block_tables=tuple(
                (*shared, *[long_blocks + seq] * (_TOKENS_PER_SEQ + 1)) for seq in range(num_seqs)
            ),
            parents=(None,) * num_seqs,
            block_size=block_size,
        )
        model.forward(
            torch.zeros(num_tokens, dtype=torch.int64),
            torch.tensor(positions, dtype=torch.int64),
            batch,
            cache,
            range(num_tokens - num_logits, num_tokens),
        )

    return forward

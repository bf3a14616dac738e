"""A decoder as its costs are measured: what a recorded step takes, logits left on the device."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from specserve.gpu.decoder import TritonDecoder
from specserve.gpu.graphs import GraphedStep
from specserve.gpu.inputs import fill_forward, forward_fields
from specserve.gpu.staging import Staged
from specserve.kv_cache import KVCache
from specserve_kernels.interface import PagedBatch


class MeasuredDecoder:
    """Implements `specserve.measuring.Measurable`; forwards of one shape are told apart by nothing
    but their shape, so each must always be called with the same tokens and the same cache."""

    def __init__(self, decoder: TritonDecoder) -> None:
        self._decoder = decoder
        self._steps: dict[tuple[int, int, tuple[int, ...]], GraphedStep[Tensor]] = {}

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        return self._decoder.new_kv_cache(num_blocks, block_size)

    def forward(
        self,
        input_ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64
        batch: PagedBatch,
        kv_cache: KVCache,
        logits_indices: Seq[int],
    ) -> Tensor:  # [L, V] on the device, which has been waited for
        shape = len(input_ids), len(logits_indices), batch.context_lens
        if shape not in self._steps:
            decoder = self._decoder
            sizes = decoder.geometry(batch.block_size).of_batch(
                batch, num_logits=len(logits_indices)
            )
            staged = Staged(forward_fields(sizes), decoder.device)
            fill_forward(
                *(staged.host, input_ids.tolist(), positions.tolist(), batch, logits_indices),
                decoder.tile_sizes.tokens,
            )
            staged.send()
            inputs = decoder.inputs(staged.tensors, sizes, kv_cache)
            self._steps[shape] = GraphedStep(lambda: decoder.run(inputs), decoder.device)
        logits = self._steps[shape]()
        if self._decoder.device.type == "cuda":
            torch.cuda.synchronize()
        return logits

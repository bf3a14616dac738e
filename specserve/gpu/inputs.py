"""What the kernels of one step read, as arrays to fill and as tensors on the device.

Every array has room for `StepSizes`; what a step leaves of it is padding that writes nowhere: slot
and position -1, segment -1, sequences without rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.drafting import Draft
from specserve.gpu.sizes import StepSizes
from specserve.gpu.staging import Fields
from specserve.gpu.wishes import Wishes
from specserve.kv_cache import KVCache
from specserve.models.interface import Capture
from specserve.packing import PackedStep
from specserve.sampler.rows import GREEDY_BELOW
from specserve.types import Request, RowPlan
from specserve_kernels.interface import PagedBatch
from specserve_kernels.triton_kernels.attention_rows import (
    AttentionRows,
    TileSizes,
    folds,
    token_paths,
)
from specserve_kernels.triton_kernels.rows import Edits, Row, Rows

Host = dict[str, NDArray[Any]]
_INT, _LONG, _FLOAT, _DOUBLE = torch.int32, torch.int64, torch.float32, torch.float64


@dataclass(frozen=True)
class ForwardInputs:
    """Tensors of one forward on the device, int32.

    input_ids, slots: [T]; logits_indices: [L]
    """

    input_ids: Tensor
    slots: Tensor
    logits_indices: Tensor
    rows: AttentionRows
    kv_cache: KVCache
    capture: Capture | None = None


def forward_fields(sizes: StepSizes) -> Fields:
    T, B = sizes.tokens, sizes.sequences
    return {
        "input_ids": (_INT, (T,)),
        "positions": (_INT, (T,)),
        "slots": (_INT, (T,)),
        "logits_indices": (_INT, (sizes.logits,)),
        "tiles": (_INT, (sizes.tiles, 4)),
        "context_lens": (_INT, (B,)),
        "block_tables": (_INT, (B, sizes.table_width)),
        "paths": (_INT, (T, sizes.path_width)),
    }


def fill_forward(
    host: Host,
    input_ids: Seq[int],
    positions: Seq[int],
    batch: PagedBatch,
    logits_indices: Seq[int],
    tile_tokens: int,
) -> None:
    """tile_tokens: query tokens per tile, of the model's TileSizes"""
    num_tokens, S = len(input_ids), batch.block_size
    host["input_ids"][:num_tokens], host["input_ids"][num_tokens:] = input_ids, 0
    host["positions"][:num_tokens], host["positions"][num_tokens:] = positions, -1
    host["slots"][num_tokens:] = -1
    host["logits_indices"][: len(logits_indices)] = logits_indices
    host["logits_indices"][len(logits_indices) :] = 0
    host["paths"][:] = 0
    tiles: list[tuple[int, int, int, bool]] = []
    for b, (context_len, table) in enumerate(
        zip(batch.context_lens, batch.block_tables, strict=True)
    ):
        start, end = batch.query_start_loc[b : b + 2]
        last = context_len + end - start
        width = -(-last // S)
        host["context_lens"][b] = context_len
        blocks = host["block_tables"][b]
        blocks[:width] = table[:width]
        index = np.arange(context_len, last)
        host["slots"][start:end] = blocks[index // S] * S + index % S
        is_tree = batch.parents[b] is not None
        tiles += [
            (b, first, min(tile_tokens, end - first), is_tree)
            for first in range(start, end, tile_tokens)
        ]
        if host["paths"].shape[1]:
            for token, path in enumerate(token_paths(end - start, batch.parents[b]), start):
                host["paths"][token, : len(path)] = path
    host["tiles"][: len(tiles)], host["tiles"][len(tiles) :] = tiles, -1


def forward_inputs(
    tensors: dict[str, Tensor],
    sizes: StepSizes,
    tile_sizes: TileSizes,
    num_heads: int,
    kv_cache: KVCache,
    capture: Capture | None = None,
) -> ForwardInputs:
    """The arrays of `forward_fields` as the kernels take them."""
    num_kv_heads, head_dim = kv_cache.keys.shape[3:]
    num_parts = sizes.splits * sizes.tokens * num_heads * head_dim
    rows = AttentionRows(
        tiles=tensors["tiles"],
        positions=tensors["positions"],
        context_lens=tensors["context_lens"],
        block_tables=tensors["block_tables"],
        paths=tensors["paths"] if sizes.path_width else None,
        block_size=kv_cache.block_size,
        num_splits=sizes.splits,
        fold=folds(sizes.tiles, num_kv_heads, num_parts),
        sizes=tile_sizes,
    )
    return ForwardInputs(
        tensors["input_ids"], tensors["slots"], tensors["logits_indices"], rows, kv_cache, capture
    )


# ---- choices and verdicts ----------------------------------------------------------------


def param_fields(num_rows: int) -> Fields:
    """How rows are sampled; see rows.Rows."""
    L = num_rows
    return {
        "seeds": (_LONG, (L, 2)),
        "row_positions": (_LONG, (L,)),
        "temperatures": (_FLOAT, (L,)),
        "sharpness": (_FLOAT, (L,)),
        "top_ks": (_INT, (L,)),
        "top_ps": (_DOUBLE, (L,)),
        "min_weights": (_FLOAT, (L,)),
    }


def choice_fields(sizes: StepSizes, vocab_size: int) -> Fields:
    L, E = sizes.logits, sizes.edits
    return {
        **param_fields(L),
        "edit_starts": (_INT, (L + 1,)),
        "edit_ids": (_INT, (E,)),
        "edit_seen": (_INT, (E,)),
        "edit_counts": (_INT, (E,)),
        "edit_biases": (_FLOAT, (E,)),
        "repetition": (_FLOAT, (L,)),
        "frequency": (_DOUBLE, (L,)),
        "presence": (_FLOAT, (L,)),
        "mask_rows": (_INT, (L,)),
        "masks": (_INT, (sizes.mask_rows, -(-vocab_size // 32))),
        "guess_starts": (_INT, (sizes.sequences + 1,)),
        "guess_ids": (_INT, (L,)),
        "guess_parents": (_INT, (L,)),
        "known_ends": (_INT, (sizes.sequences,)),
    }


def fill_choices(
    host: Host,
    rows: Seq[RowPlan],
    drafts: Seq[Draft],
    packed: PackedStep,
    wishes: Wishes,
    vocab_size: int,
) -> None:
    num_logits = len(packed.logits_indices)
    positions = host["positions"][host["logits_indices"][:num_logits]]
    host["row_positions"][:num_logits] = positions + 1  # a row chooses what comes next
    starts, first = [0], 0
    for idx, (row, draft, count) in enumerate(zip(rows, drafts, packed.num_logits, strict=True)):
        mine = slice(first, first + count)
        first += count
        starts.append(first)
        host["known_ends"][idx] = row.start + row.num_tokens
        if not count:
            continue
        fill_params(host, mine, row.request)
        params = row.request.params
        host["repetition"][mine] = params.repetition_penalty
        host["frequency"][mine] = params.frequency_penalty
        host["presence"][mine] = params.presence_penalty
        host["guess_parents"][mine] = [-1, *(parent + 1 for parent in draft.parents)]
        # -1 agrees with no choice: of a row whose guesses are judged elsewhere, none is accepted.
        known = idx not in wishes.judged_apart
        host["guess_ids"][mine] = [
            -1,
            *(i if known and 0 <= i < vocab_size else -1 for i in draft.token_ids),
        ]
    host["guess_starts"][: len(starts)], host["guess_starts"][len(starts) :] = starts, num_logits
    _fill_edits(host, wishes, num_logits)
    for name, value in (("temperatures", 0), ("guess_ids", -1), ("guess_parents", -1)):
        host[name][num_logits:] = value
    for name in ("top_ps", "sharpness", "repetition"):
        host[name][num_logits:] = 1


def fill_params(host: Host, mine: slice | int, request: Request, sharpness: float = 1.0) -> None:
    """Of `param_fields` all but the positions."""
    params = request.params
    plain = Row(seed=request.seed)
    host["seeds"].view(np.uint64)[mine] = plain.key
    greedy = params.temperature < GREEDY_BELOW
    host["temperatures"][mine] = 0.0 if greedy else params.temperature
    host["sharpness"][mine] = sharpness
    host["top_ks"][mine] = min(params.top_k, 2**31 - 1)
    host["top_ps"][mine] = params.top_p
    with np.errstate(divide="ignore"):
        host["min_weights"][mine] = np.log(params.min_p)


def _fill_edits(host: Host, wishes: Wishes, num_logits: int) -> None:
    starts = host["edit_starts"]
    starts[: num_logits + 1] = wishes.edit_starts
    starts[num_logits + 1 :] = wishes.edit_starts[-1]
    names = ("edit_ids", "edit_seen", "edit_counts", "edit_biases")
    for name, column in zip(names, zip(*wishes.edits, strict=True), strict=False):
        host[name][: len(column)] = column
    host["mask_rows"][:num_logits], host["mask_rows"][num_logits:] = wishes.mask_rows, -1
    for at, mask in enumerate(wishes.masks):
        host["masks"][at] = mask


def rows_of(tensors: dict[str, Tensor]) -> Rows:
    return Rows(
        *(tensors[name] for name in ("seeds", "row_positions", "temperatures", "sharpness")),
        *(tensors[name] for name in ("top_ks", "top_ps", "min_weights")),
    )


def edits_of(tensors: dict[str, Tensor]) -> Edits:
    return Edits(
        *(tensors[f"edit_{name}"] for name in ("starts", "ids", "seen", "counts", "biases")),
        *(tensors[name] for name in ("repetition", "frequency", "presence")),
    )


def fill_nothing(host: Host) -> None:
    """Padding alone: the kernels of a step of that size, none of which has anything to do."""
    for array in host.values():
        array.fill(0)
    for name in ("positions", "slots", "tiles", "mask_rows", "guess_ids", "guess_parents"):
        if name in host:
            host[name].fill(-1)
    for name in ("top_ps", "sharpness", "repetition"):
        if name in host:
            host[name].fill(1)

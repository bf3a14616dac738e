"""A draft model's whole chain on a device: one copy there, one graph, one copy back.

    forward of the 1 or 2 tokens per row that have no KV yet -> choice, score
    forward of that choice -> choice, score                   ... as often as there are guesses

Nothing comes back in between: each choice becomes the next forward's input, with positions and
slots worked out there. Guesses are drawn from the draft's law with the target's own noise, as
`replay` wants them and as specserve_drafts.children draws them, but of the whole vocabulary.

Steps are padded up to a few sizes, as the target's are: one graph for each that occurs. A row that
wants fewer guesses than its neighbours is padding from there on.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from specserve.drafting import Draft, chain
from specserve.gpu.decoder import TritonDecoder
from specserve.gpu.graphs import GraphedStep
from specserve.gpu.inputs import (
    ForwardInputs,
    Host,
    fill_forward,
    fill_nothing,
    fill_params,
    forward_fields,
    param_fields,
    rows_of,
)
from specserve.gpu.sizes import Buckets, StepSizes
from specserve.gpu.staging import Staged
from specserve.kv_cache import KVCache
from specserve.models.interface import ChainAsk
from specserve.sampler import LogitsRow, needs_edits
from specserve_kernels.interface import PagedBatch
from specserve_kernels.triton_kernels import cuts, sampling, shares
from specserve_kernels.triton_kernels.attention_rows import AttentionRows, folds
from specserve_kernels.triton_kernels.choosing import Chooser
from specserve_kernels.triton_kernels.rows import Row as PlainRow
from specserve_kernels.triton_kernels.rows import Rows, pack_edits

MOST_KNOWN = 2  # the last token, and the guess before it where all were accepted


@dataclass(frozen=True)
class _Prepared:
    """Chains of these sizes: fill `staged`, send it, call `step`, read `found`.

    found: [2, B, K] int32: guesses, -1 where there is none; their scores, the bits of fp32
    """

    staged: Staged
    step: Callable[[], None]
    found: Tensor


class DeviceChains:
    """Implements `specserve.models.interface.ChainGrower`.

    As a graph it has never run: there was no device (kernels/MEASURED.md).
    """

    def __init__(
        self,
        decoder: TritonDecoder,
        kv_cache: KVCache,
        *,
        vocab_size: int,
        max_sequences: int,
        max_guesses: int,
        max_model_len: int,
    ) -> None:
        """kv_cache: whose blocks the rows' tables name; vocab_size: of the target"""
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._vocab_size = min(vocab_size, decoder.vocab_size)
        max_blocks = -(-max_model_len // kv_cache.block_size)
        geometry = decoder.geometry(kv_cache.block_size)
        self._buckets = Buckets(geometry, max_sequences, max_guesses, max_blocks)
        self._longest = max_model_len
        self._largest = max_sequences, max_guesses
        self._prepared: dict[StepSizes, _Prepared] = {}

    def takes(self, ask: ChainAsk) -> bool:
        """Chains of plain rows whose guesses are given, not drawn for a test."""
        row, request = ask.row, ask.row.request
        place = LogitsRow(request, row.history)
        return (
            row.width == 1
            and len(row.history) - ask.start <= MOST_KNOWN
            and (request.verify == "replay" or place.is_greedy)
            and request.constraint is None
            and not needs_edits(place)
        )

    def grow(self, asks: Seq[ChainAsk]) -> list[Draft]:
        if not asks:
            return []
        sizes = self._buckets.of_chains(
            len(asks),
            max(ask.num_guesses for ask in asks),
            MOST_KNOWN,
            max(len(ask.row.history) + ask.num_guesses for ask in asks),
        )
        if sizes not in self._prepared:
            self._prepared[sizes] = self._prepare(sizes)
        prepared = self._prepared[sizes]
        self._fill(prepared.staged, asks)
        prepared.staged.send()
        prepared.step()
        found = prepared.found.cpu()  # the one wait
        return [
            _draft(ask, ids, scores)
            for ask, ids, scores in zip(
                asks, found[0].tolist(), found[1].view(torch.float32).tolist(), strict=False
            )
        ]

    def run_largest(self) -> None:
        """A step without rows, as large as the largest that may come: what it takes of memory."""
        sizes = self._buckets.of_chains(*self._largest, MOST_KNOWN, self._longest)
        prepared = self._prepare(sizes)
        fill_nothing(prepared.staged.host)
        prepared.staged.send()
        for _ in range(2):  # the second call records: from then on its memory is kept
            prepared.step()

    # ---- on the host ---------------------------------------------------------------------

    def _fill(self, staged: Staged, asks: Seq[ChainAsk]) -> None:
        host, starts, ids, positions = staged.host, [0], list[int](), list[int]()
        for ask in asks:
            known = range(ask.start, len(ask.row.history))
            ids += [ask.row.history[at] for at in known]
            positions += known
            starts.append(len(ids))
        batch = PagedBatch(
            query_start_loc=tuple(starts),
            context_lens=tuple(ask.start for ask in asks),
            block_tables=tuple(ask.row.block_table for ask in asks),
            parents=(None,) * len(asks),
            block_size=self._kv_cache.block_size,
        )
        last = [end - 1 for end in starts[1:]]
        fill_forward(host, ids, positions, batch, last, self._decoder.tile_sizes.tokens)
        _fill_tables(host, asks, self._kv_cache.block_size)
        for idx, ask in enumerate(asks):
            fill_params(host, idx, ask.row.request, ask.row.sharpness)
            host["row_positions"][idx] = len(ask.row.history)
            host["rooms"][idx] = ask.num_guesses
        for name in ("rooms", "temperatures", "row_positions"):
            host[name][len(asks) :] = 0

    # ---- on the device -------------------------------------------------------------------

    def _prepare(self, sizes: StepSizes) -> _Prepared:
        decoder, device, B, K = self._decoder, self._decoder.device, sizes.sequences, sizes.guesses
        fields = {**forward_fields(sizes), **param_fields(B), "rooms": (torch.int32, (B,))}
        staged = Staged(fields, device)
        found = torch.empty(2, B, K, dtype=torch.int32, device=device)
        growing = _Growing(decoder, self._kv_cache, sizes, staged.tensors, self._vocab_size)
        first = decoder.inputs(staged.tensors, sizes, self._kv_cache)

        def step() -> None:
            logits = decoder.run(first)
            for place in range(K):
                token_ids, scores = growing.choose(logits, place)
                found[0, :, place] = token_ids
                found[1, :, place] = scores.view(torch.int32)
                if place + 1 < K:
                    logits = decoder.run(growing.next_inputs(token_ids, place))

        return _Prepared(staged, GraphedStep(step, device), found)


class _Growing:
    """What each place of a step's chains needs; called while a graph is recorded, too."""

    def __init__(
        self,
        decoder: TritonDecoder,
        kv_cache: KVCache,
        sizes: StepSizes,
        tensors: dict[str, Tensor],
        vocab_size: int,
    ) -> None:
        device, B = decoder.device, sizes.sequences
        self._decoder, self._kv_cache = decoder, kv_cache
        self._sizes, self._tensors, self._vocab_size = sizes, tensors, vocab_size
        width = 1 << (max(256, vocab_size) - 1).bit_length()
        self._tile = min(sampling.TILE, width)
        self._chooser = Chooser(
            *(B, vocab_size, decoder.dtype, device),
            tile=self._tile,
            capacity=min(cuts.CAPACITY, width),
            chunk=min(2048, width),
        )
        self._no_edits = pack_edits([PlainRow()] * B, device)
        self._sums = shares.make_sums(B, vocab_size, device, tile=self._tile)
        self._shares = torch.empty(B, device=device)
        self._index = torch.arange(B, dtype=torch.int32, device=device)
        one = torch.ones_like(self._index)
        self._tiles = torch.stack([self._index, self._index, one, one - 1], dim=1)

    def choose(self, logits: Tensor, place: int) -> tuple[Tensor, Tensor]:
        """[B, V] -> ([B] int32 guesses, -1 where a row wants none here or has none, [B] scores)."""
        rows = rows_of(self._tensors)
        rows = Rows(rows.seeds, rows.positions + place, *rows[2:])
        choices = self._chooser.choose(logits, rows, self._no_edits)
        shares.shares_of(
            *(logits, rows, self._chooser.cuts, choices, self._sums, self._shares),
            vocab_size=self._vocab_size,
            tile=self._tile,
        )
        return torch.where(self._tensors["rooms"] > place, choices.token_ids, -1), self._shares

    def next_inputs(self, token_ids: Tensor, place: int) -> ForwardInputs:
        """The guesses of `place` as the next forward's tokens; a row without one is padding."""
        tensors, S = self._tensors, self._kv_cache.block_size
        goes_on = (token_ids >= 0) & (tensors["rooms"] > place + 1)
        position = torch.where(goes_on, tensors["row_positions"] + place, 0).to(torch.int32)
        blocks = tensors["block_tables"].gather(1, (position // S)[:, None].long())[:, 0]
        positions = torch.where(goes_on, position, -1)
        tile_sizes = self._decoder.tile_sizes
        num_kv_heads, head_dim = self._kv_cache.keys.shape[3:]
        sizes, num_heads = self._sizes, self._decoder.config.num_heads
        rows = AttentionRows(
            tiles=torch.where(goes_on[:, None], self._tiles, -1),
            positions=positions,
            context_lens=position,
            block_tables=tensors["block_tables"],
            paths=None,
            block_size=S,
            num_splits=sizes.splits,
            fold=folds(
                sizes.sequences,
                num_kv_heads,
                sizes.splits * sizes.sequences * num_heads * head_dim,
            ),
            sizes=tile_sizes,
        )
        slots = torch.where(goes_on, blocks * S + position % S, -1)
        ids = token_ids.clamp(min=0)
        return ForwardInputs(ids, slots, self._index, rows, self._kv_cache)


def _fill_tables(host: Host, asks: Seq[ChainAsk], block_size: int) -> None:
    """Block tables up to the last guess: those of a forward end at its own last token."""
    host["block_tables"][len(asks) :] = 0
    for idx, ask in enumerate(asks):
        width = -(-(len(ask.row.history) + ask.num_guesses) // block_size)
        known = ask.row.block_table[:width]
        host["block_tables"][idx, : len(known)] = known


def _draft(ask: ChainAsk, ids: Seq[int], scores: Seq[float]) -> Draft:
    length = next((at for at, token_id in enumerate(ids) if token_id < 0), len(ids))
    return chain(ids[:length], kv_len=len(ask.row.history), scores=scores[:length])

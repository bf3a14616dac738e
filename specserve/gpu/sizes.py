"""How large a step's inputs are, and the few sizes that CUDA graphs are recorded for. Pure Python.

A graph's launches and addresses are fixed, so a step of decode rows is padded up to the next bucket
of (sequences, guesses per sequence, splits of the context, trees or not). Padding never shows: its
tokens have slot -1 and position -1, its tiles and sequences are empty. Steps with prompt chunks, or
with more edits than a bucket holds, are launched one by one in their own size.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from specserve.packing import PackedStep
from specserve.scheduler import MAX_SCORED_TOKENS
from specserve_kernels.interface import PagedBatch

_SEQUENCES: Final = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_GUESSES: Final = (0, 1, 3, 5, 7, 11, 15)
_SPLIT_STEP: Final = 4  # the splits of a bucket are a power of this
_EDITS_PER_ROW: Final = 8


@dataclass(frozen=True)
class StepSizes:
    """Room for one step, or what it takes of it. Letters as in interface.py.

    table_width: M; path_width: W, tokens of the longest segment where there is a tree, else 0
    splits: of the longest context; edits: of all rows of logits; mask_rows: rows with a mask
    """

    sequences: int
    tokens: int
    logits: int
    guesses: int
    tiles: int
    table_width: int
    path_width: int
    splits: int
    edits: int = 0
    mask_rows: int = 0

    def holds(self, other: StepSizes) -> bool:
        """Whether a step of that size has room here."""
        return all(
            getattr(self, name) >= getattr(other, name)  # of the same dataclass
            for name in StepSizes.__dataclass_fields__
        )


@dataclass(frozen=True)
class Geometry:
    """What sizes follow from besides the step: tokens per tile, keys per split, slots per block."""

    tile_tokens: int
    split: int
    block_size: int

    def of_batch(self, batch: PagedBatch, *, num_logits: int) -> StepSizes:
        """Of a forward alone."""
        starts = batch.query_start_loc
        lengths = [end - start for start, end in pairwise(starts)]
        ends = [c + n for c, n in zip(batch.context_lens, lengths, strict=True)]
        has_tree = any(parents is not None for parents in batch.parents)
        return StepSizes(
            sequences=len(lengths),
            tokens=starts[-1],
            logits=num_logits,
            guesses=0,
            tiles=sum(-(-length // self.tile_tokens) for length in lengths),
            table_width=-(-max(ends, default=0) // self.block_size),
            path_width=max(lengths, default=0) if has_tree else 0,
            splits=max(1, -(-max(ends, default=1) // self.split)),
        )

    def of_step(
        self, packed: PackedStep, *, num_edits: int = 0, num_mask_rows: int = 0
    ) -> StepSizes:
        return replace(
            self.of_batch(
                packed.batch, num_logits=len(packed.logits_indices) + len(packed.scored_indices)
            ),
            guesses=max((count - 1 for count in packed.num_logits if count), default=0),
            edits=num_edits,
            mask_rows=num_mask_rows,
        )


@dataclass(frozen=True)
class Buckets:
    """The sizes that are recorded. max_sequences, max_guesses: of the server's steps; max_blocks:
    of a sequence's table."""

    geometry: Geometry
    max_sequences: int
    max_guesses: int
    max_blocks: int

    def of(self, sizes: StepSizes, num_logits: Seq[int]) -> StepSizes | None:
        """The least bucket with room for the step; None: it is launched in its own size.

        num_logits: [B] rows of logits per sequence; a decode row has one per token
        """
        if sizes.tokens != sizes.logits or 0 in num_logits or sizes.mask_rows:
            return None
        sequences = _at_least(sizes.sequences, _SEQUENCES, self.max_sequences)
        guesses = _at_least(sizes.guesses, _GUESSES, self.max_guesses)
        if sequences is None or guesses is None:
            return None
        bucket = self._bucket(sequences, guesses, sizes.splits, sizes.path_width > 0)
        return bucket if bucket.holds(sizes) else None

    def of_chains(self, num_rows: int, num_guesses: int, num_known: int, longest: int) -> StepSizes:
        """A draft's forward of num_known tokens per row, and the guesses that follow it.

        longest: positions of the longest row, its guesses included
        """
        splits = -(-longest // self.geometry.split)
        bucket = self._bucket(
            _at_least(num_rows, _SEQUENCES, self.max_sequences) or num_rows,
            _at_least(num_guesses, _GUESSES, self.max_guesses) or num_guesses,
            *(splits, False),
        )
        rows = bucket.sequences
        return replace(
            bucket,
            tokens=rows * num_known,
            logits=rows,
            tiles=rows * -(-num_known // self.geometry.tile_tokens),
            edits=0,
        )

    def largest(self) -> StepSizes:
        longest = self.max_blocks * self.geometry.block_size
        splits = -(-longest // self.geometry.split)
        return self._bucket(self.max_sequences, self.max_guesses, splits, True)

    def unrecorded(self, num_tokens: int) -> list[StepSizes]:
        """Steps with prompts that take the most memory: the longest, and the longest halves of it,
        whose splits may be programs of their own."""
        largest, sizes = self.largest(), []
        while num_tokens:
            sizes.append(
                replace(
                    largest,
                    tokens=num_tokens,
                    logits=min(num_tokens, largest.logits + MAX_SCORED_TOKENS),
                    tiles=-(-num_tokens // self.geometry.tile_tokens),
                )
            )
            num_tokens //= 2
        return sizes

    def _bucket(self, sequences: int, guesses: int, splits: int, has_tree: bool) -> StepSizes:
        geometry, per_sequence = self.geometry, guesses + 1
        room = 1
        while room < splits:
            room *= _SPLIT_STEP
        return StepSizes(
            sequences=sequences,
            tokens=sequences * per_sequence,
            logits=sequences * per_sequence,
            guesses=guesses,
            tiles=sequences * -(-per_sequence // geometry.tile_tokens),
            table_width=min(self.max_blocks, -(-room * geometry.split // geometry.block_size)),
            path_width=per_sequence if has_tree else 0,
            splits=room,
            edits=sequences * per_sequence * _EDITS_PER_ROW,
        )


def _at_least(count: int, rungs: Seq[int], most: int) -> int | None:
    """The lowest rung that holds `count`, `most` being the last one."""
    if count > most:
        return None
    return min((rung for rung in rungs if count <= rung < most), default=most)

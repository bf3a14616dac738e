"""The target's step on a device: inputs in one copy, kernels, and one wait for the verdicts.

forward -> forbid -> edit, cut, race, decide -> walk, tests -> compaction. Logits stay there, but
for rows whose request wants log-probabilities, and of trees that are verified by a test: these
the host looks at, with the code that it has for every row without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specserve.drafting import Draft
from specserve.errors import EngineError
from specserve.gpu.by_test import Tested, tested_of, verdicts_by_rule
from specserve.gpu.decoder import TritonDecoder
from specserve.gpu.graphs import GraphedStep
from specserve.gpu.inputs import (
    choice_fields,
    edits_of,
    fill_choices,
    fill_forward,
    fill_nothing,
    forward_fields,
    rows_of,
)
from specserve.gpu.sizes import Buckets, StepSizes
from specserve.gpu.staging import Staged
from specserve.gpu.wishes import Wishes, wishes_of
from specserve.models.interface import Capture
from specserve.noise import Noise
from specserve.packing import PackedStep
from specserve.sampler import LogitsRow, RowError
from specserve.sampler.rows import check_best
from specserve.scheduler import MAX_SCORED_TOKENS
from specserve.target import Judged, TargetResult, failed, path_moves, verdict_logprobs, with_prompt
from specserve.types import RowPlan
from specserve.verifier import Verdict, verify
from specserve_kernels.triton_kernels import compaction, cuts, masks, sampling
from specserve_kernels.triton_kernels.choosing import Chooser
from specserve_kernels.triton_kernels.verification import Guesses, verify_replay

_CHUNK = 2048


@dataclass(frozen=True)
class _Outputs:
    """On the device. verdicts: [B, 2K+2] int32; bests: [L] f32; kept: [n, V]; states: [T, A, D];
    tested: [C, 2K+2] int32 by rule"""

    verdicts: Tensor
    bests: Tensor
    kept: Tensor | None
    states: Tensor | None
    tested: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Prepared:
    """A step of these sizes: fill `staged`, send it, call `step`."""

    staged: Staged
    step: Callable[[], _Outputs]


class DeviceTarget:
    """Implements `specserve.target.Target`."""

    def __init__(
        self,
        decoder: TritonDecoder,
        *,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        max_sequences: int,
        max_guesses: int,
        max_model_len: int,
    ) -> None:
        """max_sequences, max_guesses, max_model_len: steps within them are recorded as graphs."""
        self.block_size = block_size
        self.vocab_size = vocab_size
        self._decoder = decoder
        self._device = decoder.device
        self._geometry = decoder.geometry(block_size)
        max_blocks = -(-max_model_len // block_size)
        self._buckets = Buckets(self._geometry, max_sequences, max_guesses, max_blocks)
        self._recorded: dict[StepSizes, _Prepared] = {}
        self._noise = Noise()
        self._kv_cache = decoder.new_kv_cache(num_blocks, block_size)
        caches = [*self._kv_cache.keys, *self._kv_cache.values]
        self._addresses = compaction.cache_addresses(caches)
        self._width = 1 << (max(256, vocab_size) - 1).bit_length()
        self._chunk = min(_CHUNK, self._width)
        largest = self._buckets.largest()
        self._chooser = self._new_chooser(largest.logits, largest.edits)

    def run(
        self,
        rows: Seq[RowPlan],
        drafts: Seq[Draft],
        packed: PackedStep,
        hidden_layers: tuple[int, ...],
        forward_begins: Callable[[], None],
    ) -> TargetResult:
        if not packed.input_ids:
            return TargetResult([Judged() for _ in rows], None, time.time())
        wishes = wishes_of(rows, drafts, packed.num_logits, self.vocab_size)
        sizes = self._geometry.of_step(
            packed, num_edits=len(wishes.edits), num_mask_rows=len(wishes.masks)
        )
        try:
            tested = tested_of(
                *(rows, drafts, packed.num_logits, sizes.logits, self.vocab_size, self._device)
            )
            prepared = self._prepared(sizes, packed, wishes, hidden_layers, tested)
            host, tile_tokens = prepared.staged.host, self._decoder.tile_sizes.tokens
            fill_forward(
                *(host, packed.input_ids, packed.positions, packed.batch),
                packed.logits_indices + packed.scored_indices,
                tile_tokens,
            )
            fill_choices(host, rows, drafts, packed, wishes, self.vocab_size)
            prepared.staged.send()
            forward_begins()
            out = _brought_back(prepared.step())
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"the GPU ran out of memory in a step of {sizes.tokens} tokens with "
                f"{sizes.logits} rows of logits ({error}): lower --gpu-memory-utilization, "
                "--max-num-batched-tokens or --max-num-seqs"
            ) from error
        forward_end = time.time()
        places = {} if tested is None else tested.places
        judged = self._judge(rows, drafts, packed, wishes, places, out)
        states = None if out.states is None else out.states[: len(packed.input_ids)]
        return TargetResult(judged, states, forward_end)

    @property
    def kv_tensors(self) -> list[Tensor]:
        """Whose addresses compaction is given as numbers."""
        return [self._kv_cache.keys, self._kv_cache.values]

    def run_largest(self, num_tokens: int) -> None:
        """Steps without rows, as large as the largest that may come: what they take of memory.

        num_tokens: of the largest step
        """
        largest = self._buckets.largest()
        recorded = self._prepare(largest, (), [], self._chooser_for(largest))
        graphed = GraphedStep(recorded.step, self._device)
        fill_nothing(recorded.staged.host)
        recorded.staged.send()
        for _ in range(2):  # the second call records: from then on its memory is kept
            graphed()
        for sizes in self._buckets.unrecorded(num_tokens):
            kept = range(min(MAX_SCORED_TOKENS, sizes.logits))
            prepared = self._prepare(sizes, (), kept, self._chooser_for(sizes))
            fill_nothing(prepared.staged.host)
            prepared.staged.send()
            prepared.step()

    # ---- on the device -------------------------------------------------------------------

    def _prepared(
        self,
        sizes: StepSizes,
        packed: PackedStep,
        wishes: Wishes,
        hidden_layers: tuple[int, ...],
        tested: Tested | None,
    ) -> _Prepared:
        bucket = None
        if not wishes.kept and tested is None:
            bucket = self._buckets.of(sizes, packed.num_logits)
        if bucket is None:
            chooser = self._chooser_for(sizes)
            return self._prepare(sizes, hidden_layers, wishes.kept, chooser, tested)
        if bucket not in self._recorded:
            made = self._prepare(bucket, hidden_layers, [], self._chooser_for(bucket))
            step = GraphedStep(made.step, self._device)
            self._recorded[bucket] = _Prepared(made.staged, step)
        return self._recorded[bucket]

    def _prepare(
        self,
        sizes: StepSizes,
        hidden_layers: tuple[int, ...],
        kept: Seq[int],
        chooser: Chooser,
        tested: Tested | None = None,
    ) -> _Prepared:
        decoder, device = self._decoder, self._device
        fields = {**forward_fields(sizes), **choice_fields(sizes, self.vocab_size)}
        staged = Staged(fields, device)
        states = capture = None
        if hidden_layers:
            shape = sizes.tokens, len(hidden_layers), decoder.config.hidden_size
            states = torch.empty(shape, device=device)
            capture = Capture(hidden_layers, states)
        verdicts = torch.empty(
            sizes.sequences, 2 * sizes.guesses + 2, dtype=torch.int32, device=device
        )
        inputs = decoder.inputs(staged.tensors, sizes, self._kv_cache, capture)
        kept_rows = torch.tensor(kept, dtype=torch.int64).to(device)

        def step() -> _Outputs:
            logits = decoder.run(inputs)
            kept_logits = logits[kept_rows] if kept else None
            by_rule: Mapping[str, Tensor] = {}
            if sizes.logits:
                self._choose_and_walk(staged.tensors, sizes, logits, chooser, verdicts)
            if tested is not None:
                by_rule = verdicts_by_rule(
                    *(tested, logits, rows_of(staged.tensors), edits_of(staged.tensors), chooser),
                    vocab_size=self.vocab_size,
                    max_guesses=sizes.guesses,
                    chunk=self._chunk,
                )
            return _Outputs(verdicts, chooser.choices.bests, kept_logits, states, by_rule)

        return _Prepared(staged, step)

    def _choose_and_walk(
        self,
        tensors: dict[str, Tensor],
        sizes: StepSizes,
        logits: Tensor,
        chooser: Chooser,
        verdicts: Tensor,
    ) -> None:
        if sizes.mask_rows:
            masks.forbid(
                *(logits, tensors["masks"], tensors["mask_rows"]), vocab_size=self.vocab_size
            )
        choices = chooser.choose(logits, rows_of(tensors), edits_of(tensors))
        guesses = Guesses(tensors["guess_starts"], tensors["guess_ids"], tensors["guess_parents"])
        verify_replay(guesses, choices.token_ids, verdicts)
        if sizes.path_width:
            paths = verdicts[:, sizes.guesses + 2 :].contiguous()
            compaction.compact_kv(
                self._addresses, paths, tensors["known_ends"], tensors["block_tables"]
            )

    def _chooser_for(self, sizes: StepSizes) -> Chooser:
        if self._chooser.holds(sizes.logits, sizes.edits):
            return self._chooser
        return self._new_chooser(sizes.logits, sizes.edits)

    def _new_chooser(self, num_rows: int, num_edits: int) -> Chooser:
        """Tiles and lists no larger than the vocabulary: the tokens are the same with any."""
        width = self._width
        return Chooser(
            *(num_rows, self.vocab_size, self._decoder.dtype, self._device),
            num_edits=max(1, num_edits),
            tile=min(sampling.TILE, width),
            capacity=min(cuts.CAPACITY, width),
            chunk=self._chunk,
        )

    # ---- on the host ---------------------------------------------------------------------

    def _judge(
        self,
        rows: Seq[RowPlan],
        drafts: Seq[Draft],
        packed: PackedStep,
        wishes: Wishes,
        tested: Mapping[int, tuple[str, int]],
        out: _Outputs,
    ) -> list[Judged]:
        """tested: of sequences that a test has judged on the device: its rule, their place"""
        verdicts = out.verdicts.tolist()
        for idx, (rule, place) in tested.items():
            verdicts[idx] = out.tested[rule][place].tolist()
        places = {row: at for at, row in enumerate(wishes.kept)}

        def kept(first: int, count: int) -> Tensor | None:
            """[count, V] logits from row `first` on, where they were fetched."""
            if out.kept is None or first not in places:
                return None
            return out.kept[places[first] : places[first] + count]

        judged, first, scored = [], 0, len(packed.logits_indices)
        for idx, (row, draft, count) in enumerate(
            zip(rows, drafts, packed.num_logits, strict=True)
        ):
            mine, read = kept(first, count), kept(scored, row.num_scored)
            try:
                if not count:
                    found = Judged()
                elif idx in wishes.judged_on_host:
                    found = self._told(row, self._verified_here(row, draft, mine), mine)
                else:
                    verdict = _verdict(verdicts[idx])
                    if not verdict.token_ids:
                        _refuse(LogitsRow(row.request, row.history), first, wishes, out.bests)
                    found = self._told(row, verdict, mine)
                if read is not None:
                    found = with_prompt(row, found, read, vocab_size=self.vocab_size)
            except RowError as error:  # this row's own fault: its request fails alone
                found = failed(error)
            judged.append(found)
            first += count
            scored += row.num_scored
        return judged

    def _told(self, row: RowPlan, verdict: Verdict, kept: Tensor | None) -> Judged:
        """With log-probabilities, where the request wants them."""
        if kept is None:
            return Judged(verdict)
        return Judged(verdict, verdict_logprobs(row, verdict, kept, vocab_size=self.vocab_size))

    def _verified_here(self, row: RowPlan, draft: Draft, kept: Tensor | None) -> Verdict:
        """By a rule with a test, which needs the laws of target and draft."""
        assert kept is not None  # wishes_of keeps them
        verdict = verify(
            row.request,
            row.history,
            draft,
            kept,
            vocab_size=self.vocab_size,
            noise=self._noise,
        )
        moves = path_moves(row, verdict.path, self.block_size)
        if moves:
            self._kv_cache.move([source for source, _ in moves], [target for _, target in moves])
        return verdict


def _brought_back(out: _Outputs) -> _Outputs:
    """As copies on the CPU: the step's one wait."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.to("cpu", non_blocking=True, copy=True)

    here = _Outputs(
        copy(out.verdicts),
        copy(out.bests),
        None if out.kept is None else copy(out.kept),
        None if out.states is None else copy(out.states),
        {rule: copy(verdicts) for rule, verdicts in out.tested.items()},
    )
    if out.verdicts.device.type == "cuda":
        torch.cuda.synchronize()
    return here


def _verdict(numbers: Seq[int]) -> Verdict:
    """What verification.verify_replay says of one sequence."""
    num_tokens, num_places = numbers[0], len(numbers) // 2
    path = numbers[num_places + 1 : num_places + max(num_tokens, 1)]
    return Verdict(token_ids=tuple(numbers[1 : 1 + num_tokens]), path=tuple(path))


def _refuse(place: LogitsRow, first: int, wishes: Wishes, bests: Tensor) -> None:
    """Raises the RowError of a sequence whose first row of logits has nothing to choose."""
    if first in wishes.errors:
        raise wishes.errors[first]
    check_best(float(bests[first]), place)

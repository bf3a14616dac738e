"""An EAGLE-3 head in native code: the calls of native/head.h.

A call fills new slots of many sequences' KV and guesses a whole chain for some of them, or feeds
the guesses of one depth of trees. What could reach memory wrongly is asserted here (only a bug can
break it). A call releases the GIL. Imports torch, numpy and the library only.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from specserve_kernels import huge_pages
from specserve_kernels.native_abi import CHeads, CWeight, in_range, pointer
from specserve_kernels.native_head_abi import (
    CHeadMemory,
    CHeadModel,
    CHeadNodes,
    CHeadStep,
    HeadShape,
    library,
)
from specserve_kernels.native_sampler import RowSpec
from specserve_kernels.native_step import (
    DTYPE_CODES,
    KV_DTYPES,
    Dtype,
    StepShape,
    kv_shapes,
    pool_of,
)


class _Workspace:
    """Native buffers that grow to the largest call; freed with this object."""

    def __init__(self) -> None:
        self.handle: int = library().specserve_new_head_workspace()
        self._delete = library().specserve_delete_head_workspace

    def __del__(self) -> None:
        self._delete(self.handle)


@dataclass(frozen=True)
class HeadMemory:
    """keys, values: one layer's of `kv_shapes`; tails [P, H'] fp32; see native/head.h."""

    keys: Tensor
    values: Tensor
    tails: Tensor
    block_size: int

    @classmethod
    def of(cls, shape: HeadShape, dtype: Dtype, num_blocks: int, block_size: int) -> HeadMemory:
        kv_dtype, tails = KV_DTYPES[dtype], (num_blocks, shape.hidden_size)
        one_layer = StepShape(
            *(1, shape.hidden_size, shape.inner_size, 0, shape.num_heads, shape.num_kv_heads),
            *(shape.head_dim, 0.0, (None,)),
        )
        keys, values = kv_shapes(one_layer, kv_dtype, num_blocks, block_size)
        return cls(
            huge_pages.zeros(keys, kv_dtype),
            huge_pages.zeros(values, kv_dtype),
            torch.zeros(tails),
            block_size,
        )

    @property
    def num_blocks(self) -> int:
        return len(self.tails)


class Filling:
    """Sequences whose slots are filled, those that guess first, by falling K: native HeadStep.

    raw: addresses of [A, D] fp32, slot by slot where no state is given; their owners keep them
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.block_offsets, self.blocks = array("q"), array("i")
        self.first_seen, self.begin, self.count = array("q"), array("q"), array("q")
        self.given, self.raw, self.tokens = array("q"), array("q"), array("q")
        self.num_guesses = array("q")
        self.samplers: list[RowSpec] = []
        self.last_position = 0

    def add(
        self,
        block_table: Seq[int],
        first_seen: int,
        begin: int,
        tokens: Seq[int],
        given: int,
        num_guesses: int = 0,
    ) -> None:
        """Slots begin, begin + 1, ... of these tokens, then room for guesses.

        given: address of the fused state [H'] of the first slot; 0: it is raw, too
        """
        end = begin + len(tokens) + max(0, num_guesses - 1)  # the last guess is never fed
        assert end <= len(block_table) * self.block_size, "a block table is too short"
        assert 1 <= first_seen < begin + len(tokens) > begin, (first_seen, begin, len(tokens))
        self.last_position = max(self.last_position, end - 2)
        self.block_offsets.append(len(self.blocks))
        self.blocks.extend(block_table)
        self.first_seen.append(first_seen)
        self.begin.append(begin)
        self.count.append(len(tokens))
        self.tokens.extend(tokens)
        self.given.append(given)
        if num_guesses:
            self.num_guesses.append(num_guesses)


@dataclass(frozen=True, slots=True)
class Chains:
    """ids and scores [R * stride], of which num_found [R] of each row count."""

    ids: array[int]
    scores: array[float]
    num_found: array[int]
    stride: int

    def of(self, row: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        first = row * self.stride
        end = first + self.num_found[row]
        return tuple(self.ids[first:end]), tuple(self.scores[first:end])


class Nodes:
    """Guesses of one depth, fed sequence by sequence: native HeadNodes."""

    def __init__(self, depth: int, block_size: int) -> None:
        self.depth, self.block_size = depth, block_size
        self.block_offsets, self.blocks = array("q"), array("i")
        self.first_seen, self.num_known = array("q"), array("q")
        self.node_start = array("q", [0])
        self.states, self.tokens, self.paths = array("q"), array("q"), array("i")

    def begin(self, block_table: Seq[int], first_seen: int, num_known: int) -> None:
        """A sequence; its nodes follow."""
        assert 1 <= first_seen < num_known, (first_seen, num_known)
        self.block_offsets.append(len(self.blocks))
        self.blocks.extend(block_table)
        self.first_seen.append(first_seen)
        self.num_known.append(num_known)
        self.node_start.append(len(self.tokens))

    def add(self, state: int, token_id: int, path: Seq[int]) -> None:
        """A guess of the sequence begun last.

        state: address of its parent's feedback [H']
        path:  [depth] when its ancestors were fed in their sequence, itself last
        """
        num_slots = (len(self.blocks) - self.block_offsets[-1]) * self.block_size
        assert len(path) == self.depth, (path, self.depth)
        assert self.num_known[-1] + max(path) < num_slots, "a block table is too short"
        self.states.append(state)
        self.tokens.append(token_id)
        self.paths.extend(path)
        self.node_start[-1] = len(self.tokens)


class NativeHead:
    """A head's weights as native code reads them.

    packed:  "embedding" [V, H'] fp32 or bf16; "target_ids" [W] int64 ascending; norms fp32 by the
             names of `HeadShape.norm_sizes`, optional ones left out; per matrix M of MATRICES
             M.packed, with M.scales and M.bias [out] fp32 where there are any
    threads: of a call, the calling thread included
    """

    def __init__(
        self, shape: HeadShape, packed: Mapping[str, Tensor], dtype: Dtype, threads: int
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self._packed = packed
        self._pool = pool_of(threads)
        self._workspace = _Workspace()
        embedding = packed["embedding"]
        self._vocab_size = len(embedding)
        assert embedding.dtype in (torch.float32, torch.bfloat16), embedding.dtype
        assert embedding.shape[1] == shape.hidden_size, embedding.shape
        assert embedding.is_contiguous(), embedding.stride()
        ids = packed["target_ids"]
        assert (ids.dtype, tuple(ids.shape)) == (torch.int64, (shape.num_entries,)), ids.shape
        assert bool((ids[1:] > ids[:-1]).all()), "target ids must ascend"
        self._model = CHeadModel(
            num_states=shape.num_states,
            state_size=shape.state_size,
            hidden_size=shape.hidden_size,
            inner_size=shape.inner_size,
            num_entries=shape.num_entries,
            heads=CHeads(shape.num_heads, shape.num_kv_heads, shape.head_dim),
            norm_epsilon=shape.norm_epsilon,
            kv_is_bf16=KV_DTYPES[dtype] == torch.bfloat16,
            embedding_is_bf16=embedding.dtype == torch.bfloat16,
            norm_before_residual=shape.norm_before_residual,
            norm_output=shape.norm_output,
            embedding=embedding.data_ptr(),
            target_ids=ids.data_ptr(),
        )
        for name, size in shape.norm_sizes.items():
            setattr(self._model, name, self._vector(name, size))
        for name, (n, k) in shape.matrix_shapes.items():
            setattr(self._model, name, self._weight(name, n, k))

    def _vector(self, name: str, size: int) -> int | None:
        tensor = self._packed.get(name)
        if tensor is None:
            return None
        assert tensor.dtype == torch.float32, (name, tensor.dtype)
        assert tensor.is_contiguous(), name
        assert tensor.numel() == size, (name, tensor.shape, size)
        return tensor.data_ptr()

    def _weight(self, name: str, n: int, k: int) -> CWeight:
        code, packed = DTYPE_CODES[self.dtype], self._packed[f"{name}.packed"]
        assert packed.dtype == torch.uint8, (name, packed.dtype)
        assert packed.nbytes == library().specserve_gemm_packed_bytes(code, n, k), name
        assert packed.data_ptr() % 64 == 0, name
        scales, bias = self._vector(f"{name}.scales", n), self._vector(f"{name}.bias", n)
        assert (scales is not None) == (self.dtype == "int8"), name
        return CWeight(code, n, k, packed.data_ptr(), scales, bias)

    def fill(
        self, memory: HeadMemory, rope: tuple[Tensor, Tensor], filling: Filling, fused: Tensor
    ) -> Chains:
        """Fill slots, then guess: chains of num_guesses for the first len(samplers) sequences.

        rope:  cos and sin [positions, H/2] fp32
        fused: [len(filling.raw), H'] fp32, written
        """
        num_guessing = len(filling.samplers)
        stride = filling.num_guesses[0] if num_guessing else 0
        samplers = (RowSpec * num_guessing)(*filling.samplers)
        chains = Chains(
            array("q", bytes(8 * num_guessing * stride)),
            array("d", bytes(8 * num_guessing * stride)),
            array("q", bytes(8 * num_guessing)),
            stride,
        )
        step = self._step(memory, rope, filling, fused)
        step.num_guessing = num_guessing
        step.stride = stride
        step.num_guesses = pointer(filling.num_guesses)
        step.samplers = ctypes.addressof(samplers)
        step.ids, step.scores = chains.ids.buffer_info()[0], chains.scores.buffer_info()[0]
        step.num_found = pointer(chains.num_found)
        assert len(filling.num_guesses) == num_guessing, filling.num_guesses
        self._run_step(memory, rope, step)
        return chains

    def roots(
        self, memory: HeadMemory, rope: tuple[Tensor, Tensor], filling: Filling, fused: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Fill slots; logits [B, W] and feedback [B, H'] after the last slot of each sequence."""
        num_sequences = len(filling.begin)
        logits = torch.empty(num_sequences, self.shape.num_entries)
        feedback = torch.empty(num_sequences, self.shape.hidden_size)
        step = self._step(memory, rope, filling, fused)
        step.num_guessing = num_sequences
        step.stride = 1
        step.logits, step.feedback = logits.data_ptr(), feedback.data_ptr()
        self._run_step(memory, rope, step)
        return logits, feedback

    def feed(
        self, memory: HeadMemory, rope: tuple[Tensor, Tensor], nodes: Nodes
    ) -> tuple[Tensor, Tensor]:
        """Logits [n, W] and feedback [n, H'] after each of n nodes."""
        num_nodes = len(nodes.tokens)
        assert in_range(nodes.blocks, memory.num_blocks), "a block that the pool does not have"
        assert in_range(nodes.tokens, self._vocab_size), "an id outside the vocabulary"
        assert max(nodes.num_known) + nodes.depth - 2 < len(rope[0]), "beyond the rope tables"
        logits = torch.empty(num_nodes, self.shape.num_entries)
        feedback = torch.empty(num_nodes, self.shape.hidden_size)
        call = CHeadNodes(
            num_sequences=len(nodes.num_known),
            num_nodes=num_nodes,
            depth=nodes.depth,
            block_offsets=pointer(nodes.block_offsets),
            blocks=pointer(nodes.blocks),
            first_seen=pointer(nodes.first_seen),
            num_known=pointer(nodes.num_known),
            node_start=pointer(nodes.node_start),
            states=pointer(nodes.states),
            tokens=pointer(nodes.tokens),
            paths=pointer(nodes.paths),
            logits=logits.data_ptr(),
            feedback=feedback.data_ptr(),
        )
        library().specserve_head_nodes(
            *(byref(self._model), byref(_memory(memory, rope)), byref(call)),
            *(self._pool, self._workspace.handle),
        )
        return logits, feedback

    def _step(
        self,
        memory: HeadMemory,
        rope: tuple[Tensor, Tensor],
        filling: Filling,
        fused: Tensor,
    ) -> CHeadStep:
        num_sequences = len(filling.begin)
        assert num_sequences > 0, "a call for no sequence"
        assert len(filling.tokens) == len(filling.raw) + sum(map(bool, filling.given))
        assert in_range(filling.blocks, memory.num_blocks), "a block that the pool does not have"
        assert in_range(filling.tokens, self._vocab_size), "an id outside the vocabulary"
        assert filling.last_position < len(rope[0]), "beyond the rope tables"
        assert fused.is_contiguous(), fused.stride()
        assert fused.dtype == torch.float32, fused.dtype
        assert tuple(fused.shape) == (len(filling.raw), self.shape.hidden_size), fused.shape
        return CHeadStep(
            num_sequences=num_sequences,
            num_fused=len(filling.raw),
            block_offsets=pointer(filling.block_offsets),
            blocks=pointer(filling.blocks),
            first_seen=pointer(filling.first_seen),
            begin=pointer(filling.begin),
            count=pointer(filling.count),
            given=pointer(filling.given),
            raw=pointer(filling.raw),
            tokens=pointer(filling.tokens),
            fused=fused.data_ptr(),
        )

    def _run_step(self, memory: HeadMemory, rope: tuple[Tensor, Tensor], step: CHeadStep) -> None:
        library().specserve_head_step(
            *(byref(self._model), byref(_memory(memory, rope)), byref(step)),
            *(self._pool, self._workspace.handle),
        )


def _memory(memory: HeadMemory, rope: tuple[Tensor, Tensor]) -> CHeadMemory:
    return CHeadMemory(
        keys=memory.keys.data_ptr(),
        values=memory.values.data_ptr(),
        tails=memory.tails.data_ptr(),
        block_size=memory.block_size,
        cos=rope[0].data_ptr(),
        sin=rope[1].data_ptr(),
    )

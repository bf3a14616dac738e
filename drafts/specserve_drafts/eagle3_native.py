"""EAGLE-3 in native code: a whole chain of guesses for all rows in one call.

What costs on a CPU between two target steps is not arithmetic but Python, which finds none of its
own code in the caches there. So a step is one call where it can be: states are read where the
runner put them (by address), and chains whose rule is an argmax (greedy, or coupled to the target's
noise) are chosen in native code. Trees, drawn guesses and rows with penalties take one call per
depth and `children`.

The matrices are packed like the target's: int8 blocks are mixed before they are rounded, so a
checkpoint that is int8 already is rounded a second time, on another grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import msgspec
import numpy as np
import torch
from torch import Tensor

from specserve.drafting import Draft, chain
from specserve.kv_cache import kv_bytes_per_token
from specserve.models.linear import Weight
from specserve.models.native import alternate
from specserve.models.rope import cos_sin, inverse_frequencies
from specserve.noise import MAX_SEED, Ids, Purpose
from specserve.sampler import LogitsRow, needs_edits
from specserve_drafts.eagle3_files import Eagle3Config, Eagle3Weights, load_eagle3
from specserve_drafts.eagle3_states import State
from specserve_drafts.eagle3_work import Work, wish_of
from specserve_drafts.growing import Node, Vocabulary, grow
from specserve_drafts.head_files import NativeForm, TargetParts
from specserve_kernels import huge_pages
from specserve_kernels.native_head import Filling, HeadMemory, NativeHead, Nodes
from specserve_kernels.native_head_abi import HeadShape
from specserve_kernels.native_sampler import RowSpec
from specserve_kernels.native_step import GATE_UP_GROUP, KV_DTYPES, Dtype, pack_matrix

_LEAST_POSITIONS = 1024  # of the rope tables, which double when a later position comes


class NativeEagle3Weights:
    """A loaded checkpoint, packed; `head_files.Head`."""

    def __init__(self, config: Eagle3Config, weights: Eagle3Weights, form: NativeForm) -> None:
        """weights: fp32, matrices as `PlainMatrix`"""
        packed = pack_head(config, weights, form.dtype)
        if not weights.shares_embedding:
            packed["embedding"] = weights.embedding.to(KV_DTYPES[form.dtype]).contiguous()
        packed = huge_pages.copied(packed)
        self._nbytes = sum(own.nbytes for own in packed.values())
        if weights.shares_embedding:
            packed["embedding"] = weights.embedding
        self.config = config
        self.target_ids: Ids = packed["target_ids"].numpy()
        self.head = NativeHead(head_shape(config, weights), packed, form.dtype, form.threads)
        self._inv_freq, self._rope_factor = inverse_frequencies(
            config.layer.rope, config.layer.head_dim
        )

    @classmethod
    def load(
        cls, path: str, target: TargetParts, form: NativeForm, vocab_size: int
    ) -> NativeEagle3Weights:
        plain = msgspec.structs.replace(target, dtype=torch.float32, pack=PlainMatrix)
        return cls(*load_eagle3(path, plain, vocab_size=vocab_size), form)

    def weight_bytes(self) -> int:
        return self._nbytes

    def kv_bytes_per_token(self, block_size: int) -> int:
        """Keys and values, and the share of one fp32 state per block (rounded up)."""
        layer = self.config.layer
        return -(-layer.hidden_size * 4 // block_size) + kv_bytes_per_token(
            layers=1,
            kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            dtype=KV_DTYPES[self.head.dtype],
        )

    def rope_tables(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine [num_positions, H/2] fp32: the halves that `rotate` mirrors."""
        half = self.config.layer.head_dim // 2
        positions = torch.arange(num_positions)
        cos, sin = cos_sin(positions, self._inv_freq, self._rope_factor, torch.float32)
        return cos[:, 0, half:].contiguous(), sin[:, 0, half:].contiguous()


class NativeEagle3:
    """Implements `eagle3_work.Compute`."""

    dtype = torch.float32

    def __init__(
        self, weights: NativeEagle3Weights, *, vocab_size: int, num_blocks: int, block_size: int
    ) -> None:
        self._weights = weights
        self._head = weights.head
        self._vocabulary = Vocabulary(vocab_size, weights.target_ids)
        self._width = self._head.shape.hidden_size
        self._memory = HeadMemory.of(self._head.shape, self._head.dtype, num_blocks, block_size)
        self._rope = weights.rope_tables(_LEAST_POSITIONS)

    def tail(self, block_id: int) -> State:
        return State(self._memory.tails[block_id : block_id + 1].clone(), 0)

    def run(self, works: Seq[Work]) -> list[Draft]:
        chains = [idx for idx, work in enumerate(works) if work.depth and _is_argmax(work)]
        chains.sort(key=lambda idx: -works[idx].depth)
        plain = set(chains)
        others = [idx for idx in range(len(works)) if idx not in plain]
        drafts = [Draft()] * len(works)
        filled = [*chains, *(idx for idx in others if works[idx].num_slots)]
        if filled:
            found = self._fill([works[idx] for idx in filled], len(chains))
            for idx, draft in zip(chains, found, strict=True):
                drafts[idx] = draft
        grown = [idx for idx in others if works[idx].depth]
        if grown:
            for idx, draft in zip(grown, self._grow([works[i] for i in grown]), strict=True):
                drafts[idx] = draft
        return drafts

    def _fill(self, works: Seq[Work], num_chains: int) -> list[Draft]:
        """Fills slots, and guesses chains for the first num_chains rows."""
        filling = Filling(self._memory.block_size)
        taken: list[Tensor] = []  # kept alive during the call
        for idx, work in enumerate(works):
            is_chain = idx < num_chains
            _add_slots(filling, work, taken, work.depth if is_chain else 0)
            if is_chain:
                filling.samplers.append(_sampler(work))
        fused = torch.empty(len(filling.raw), self._width)
        found = self._head.fill(self._memory, self._tables(filling.last_position), filling, fused)
        _tell_tracks(works, fused)
        drafts = []
        for idx in range(num_chains):
            token_ids, scores = found.of(idx)
            drafts.append(chain(token_ids, scores=scores, kv_len=works[idx].track.claim))
        return drafts

    def _grow(self, works: Seq[Work]) -> list[Draft]:
        """Guesses for rows whose slots are filled, depth by depth."""
        filling = Filling(self._memory.block_size)
        for work in works:
            _add_slots(filling, work._replace(num_slots=0), [], 0)
        rope = self._tables(filling.last_position)
        logits, feedback = self._head.roots(
            self._memory, rope, filling, torch.empty(0, self._width)
        )
        feeding = _Feeding(self, works, feedback)
        return grow([wish_of(work) for work in works], logits, feeding.feed, self._vocabulary)

    def feed(self, nodes: Nodes) -> tuple[Tensor, Tensor]:
        """Logits [n, W] and feedback [n, H'] after n guesses."""
        rope = self._tables(max(nodes.num_known) + nodes.depth - 2)
        return self._head.feed(self._memory, rope, nodes)

    @property
    def block_size(self) -> int:
        return self._memory.block_size

    def _tables(self, last_position: int) -> tuple[Tensor, Tensor]:
        if last_position >= len(self._rope[0]):
            self._rope = self._weights.rope_tables(1 << last_position.bit_length())
        return self._rope


class _Feeding:
    """Guesses as they are fed, depth by depth."""

    def __init__(self, compute: NativeEagle3, works: Seq[Work], roots: Tensor) -> None:
        """roots: [R, H'] feedback of each row's last known token"""
        self._compute = compute
        self._works = works
        self._states = [State(roots, idx) for idx in range(len(works))]  # by row
        self._fed: dict[int, tuple[State, list[int]]] = {}  # by id(node): feedback, path
        self._num_fed = [0] * len(works)

    def feed(self, nodes: Seq[Node]) -> Tensor:
        """[n, W] logits after each of n nodes of one depth; of one row they stand together."""
        batch = Nodes(nodes[0].depth, self._compute.block_size)
        paths = []
        row_idx = -1
        for node in nodes:
            if node.row_idx != row_idx:
                row_idx = node.row_idx
                row, track, _, _ = self._works[row_idx]
                batch.begin(row.block_table, track.base, len(row.history))
            state, path = self._states[row_idx], list[int]()
            if node.parent is not None:
                state, path = self._fed[id(node.parent)]
            paths.append([*path, self._num_fed[row_idx]])
            self._num_fed[row_idx] += 1
            batch.add(_address(state), node.token_id, paths[-1])
        logits, feedback = self._compute.feed(batch)
        for idx, (node, path) in enumerate(zip(nodes, paths, strict=True)):
            self._fed[id(node)] = State(feedback, idx), path
        return logits


def _add_slots(filling: Filling, work: Work, taken: list[Tensor], num_guesses: int) -> None:
    """A row's new slots; where it has none, its last one again: guessing starts from it."""
    row, track, num_slots, _ = work
    state = track.carry
    if not num_slots:
        state = track.last
        begin, count, num_raw = track.end - 1, 1, 0
    else:
        begin, count, num_raw = track.end, num_slots, num_slots - (state is not None)
    tokens = row.history[begin : begin + count]
    given = 0 if state is None else _address(state)
    filling.add(row.block_table, track.base, begin, tokens, given, num_guesses)
    for chunk in track.take(num_raw):
        assert chunk.is_contiguous(), chunk.stride()
        taken.append(chunk)
        first, stride = chunk.data_ptr(), 4 * chunk.stride(0)
        filling.raw.extend(range(first, first + len(chunk) * stride, stride))


def _tell_tracks(works: Seq[Work], fused: Tensor) -> None:
    """fused: [F, H'] states of all new slots but those of cached blocks"""
    at = 0
    for _, track, num_slots, _ in works:
        if not num_slots:
            continue
        num_raw = num_slots - (track.carry is not None)
        at += num_raw
        last = State(fused, at - 1) if num_raw else track.carry
        assert last is not None
        track.filled(num_slots, last)


def _address(state: State) -> int:
    """Of a contiguous fp32 row."""
    return state.rows.data_ptr() + 4 * state.idx * state.rows.shape[1]


def _is_argmax(work: Work) -> bool:
    """Whether native code knows the rule by which this row's guesses are chosen."""
    row = work.row
    place = LogitsRow(row.request, row.history)
    if row.width > 1 or needs_edits(place):
        return False
    return place.is_greedy or row.request.verify == "replay"


def _sampler(work: Work) -> RowSpec:
    """What is wanted of the first guess."""
    row = work.row
    if LogitsRow(row.request, row.history).is_greedy:
        return RowSpec()
    params = row.request.params
    return RowSpec(
        seed_low=row.request.seed & MAX_SEED,
        seed_is_negative=row.request.seed < 0,
        position=len(row.history),
        purpose=Purpose.TARGET,
        top_p=params.top_p,
        temperature=params.temperature,
        sharpness=row.sharpness,
        min_weight=math.log(params.min_p) if params.min_p > 0 else -math.inf,
        top_k=min(max(params.top_k, 0), 2**31 - 1),
    )


# ---- packing -----------------------------------------------------------------------------


class PlainMatrix:
    """A matrix [out, in] as it is: what `pack_head` packs."""

    is_packed = False
    is_exact = False

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.shape = (matrix.shape[0], matrix.shape[1])
        self.dtype = matrix.dtype
        self.nbytes = matrix.nbytes

    def apply(self, x: Tensor) -> Tensor:
        """x [M, in] -> [M, out]"""
        return torch.nn.functional.linear(x, self.matrix)


def head_shape(config: Eagle3Config, weights: Eagle3Weights) -> HeadShape:
    layer = config.layer
    return HeadShape(
        num_states=len(config.hidden_layers),
        state_size=config.target_hidden_size,
        hidden_size=layer.hidden_size,
        inner_size=-(-layer.intermediate_size // GATE_UP_GROUP) * GATE_UP_GROUP,
        num_entries=len(weights.target_ids),
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        norm_epsilon=layer.rms_norm_eps,
        norm_before_residual=config.norm_before_residual,
        norm_output=config.norm_output,
    )


def pack_head(config: Eagle3Config, weights: Eagle3Weights, dtype: Dtype) -> dict[str, Tensor]:
    """All that `NativeHead` needs but the embedding. Entries stand by rising target id."""
    order = np.argsort(weights.target_ids)
    down = _plain(weights.down)
    padding = -down.shape[1] % GATE_UP_GROUP
    matrices = {
        "fc": _plain(weights.fc),
        "qkv": torch.cat([_plain(weights.query), _plain(weights.key_value)]),
        "out": _plain(weights.out),
        "gate_up": alternate(*_plain(weights.gate_up).chunk(2)),
        "down": torch.nn.functional.pad(down, (0, padding)),
        "head": _plain(weights.head)[torch.from_numpy(order)],
    }
    packed = {
        f"{name}.{part}": own
        for name, matrix in matrices.items()
        for part, own in pack_matrix(matrix, dtype).items()
    }
    optional = _optional(weights)
    packed |= {name: own.float() for name, own in optional.items() if own is not None}
    for name in ("embed_norm", "hidden_norm", "mlp_norm"):
        packed[name] = getattr(weights, name).float()  # fields of the struct
    packed["final_norm"] = weights.norm.float()
    packed["target_ids"] = torch.from_numpy(weights.target_ids[order].astype(np.int64))
    return packed


def _optional(weights: Eagle3Weights) -> dict[str, Tensor | None]:
    qkv_bias = gate_up_bias = None
    if weights.query_bias is not None and weights.key_value_bias is not None:
        qkv_bias = torch.cat([weights.query_bias, weights.key_value_bias])
    if weights.gate_up_bias is not None:
        gate_up_bias = alternate(*weights.gate_up_bias.chunk(2))
    query_norm, key_norm = weights.qk_norm or (None, None)
    return {
        "input_norm": weights.input_norm,
        "fc_norms": torch.cat(weights.fc_norms) if weights.fc_norms else None,
        "query_norm": query_norm,
        "key_norm": key_norm,
        "qkv.bias": qkv_bias,
        "out.bias": weights.out_bias,
        "gate_up.bias": gate_up_bias,
        "down.bias": weights.down_bias,
    }


def _plain(weight: Weight) -> Tensor:
    assert isinstance(weight, PlainMatrix), weight
    return weight.matrix

"""The fast CPU backend: paged attention whose bits depend on nothing but the row itself.

A row's keys are cut at fixed logical positions into splits of `_SPLIT` keys. One *item* is (a tile
of query rows, one split): its keys are gathered in logical order and one fused softmax(QK)V of a
fixed shape is taken over it, hidden keys being exactly -inf. The partial results of a row are then
added by the online-softmax rule in a binary tree over the split index, in which absent splits are
exact zeros. So the order of every sum is set by the row's own length: not by batch mates, tile
mates, prompt chunking, or whether it sits in a tree (where splits that reach into the segment are
gathered per row, ancestors in order of depth, instead of masking holes).

The GQA group is folded into the query rows, so that a KV head is read once. Measured with torch
2.13: row counts that are multiples of 4 agree bit for bit; `_agreeing_tile_rows` checks it anyway
on the first call of each shape, and falls back to the small tile alone where it does not hold.
Rejected: batched products and softmax instead of the fused call. It took the same time (2.6 ms a
layer for 16 rows at 500 tokens, two cores: gathering cold keys is what costs), and MKL splits the
products themselves when there are fewer than threads, which changed bits in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from specserve_kernels.interface import AttentionPlan, PagedBatch

_SPLIT = 128  # logical positions per split: 64 took 1.6 times as long, 256 no less
_SMALL_TILE = 4  # query rows: a decode row and its guesses
_LARGE_TILE = 64  # query rows of a prefill chunk, which share one gather of keys
_LARGE_FROM = 24  # rows left in a segment from which a large tile, even padded, is cheaper
_GROUP_ITEMS = 64  # items computed together: bounds memory to a few MB per layer, in cache


@dataclass(frozen=True)
class _Group:
    """Items computed together. I items, R rows per tile, C = _SPLIT, g = N / G, U rows of output.

    query_rows: [I*R] int64  packed row at each place of each item
    key_slots:  [I*C] int64  flat KV slot of each key
    mask:       [I, 1, R*g, C] 0 or -inf, in the compute dtype
    out_rows:   [U] int64    packed rows this group finishes
    parts:      [U*W] int64  which (item, place) holds each of a row's splits; W is a power of two
    absent:     [U, W, 1]    -inf where a row has no such split, else 0
    """

    query_rows: Tensor
    key_slots: Tensor
    mask: Tensor
    out_rows: Tensor
    parts: Tensor
    absent: Tensor


@dataclass(frozen=True)
class CpuPlan:
    """A batch, and the item lists derived from it, one per kind of layer that asked."""

    batch: PagedBatch
    groups: dict[tuple[object, ...], list[_Group]] = field(default_factory=dict)


class CpuBackend:
    """See `specserve_kernels.interface.Backend` for shapes."""

    name = "cpu"

    def __init__(self) -> None:
        self._tile_rows: dict[tuple[object, ...], tuple[int, ...]] = {}

    def prepare(self, batch: PagedBatch) -> CpuPlan:
        return CpuPlan(batch)

    def slot_mapping(self, batch: PagedBatch) -> Tensor:
        """[T] int64, as the interface says."""
        slots: list[int] = []
        size = batch.block_size
        for segment_idx, table in enumerate(batch.block_tables):
            start, end = batch.query_start_loc[segment_idx : segment_idx + 2]
            first = batch.context_lens[segment_idx]
            slots += [table[i // size] * size + i % size for i in range(first, first + end - start)]
        return torch.tensor(slots, dtype=torch.int64)

    def write_kv(
        self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
    ) -> None:
        k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slots, key)
        v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slots, value)

    def paged_attention(
        self,
        query: Tensor,  # [T, N, H]
        k_cache: Tensor,  # [P, S, G, H]
        v_cache: Tensor,  # [P, S, G, H]
        plan: AttentionPlan,
        *,
        scale: float,
        sliding_window: int | None = None,
    ) -> Tensor:  # [T, N, H]
        plan = cast(CpuPlan, plan)
        num_tokens, num_heads, head_dim = query.shape
        num_kv_heads = k_cache.shape[2]
        fold = num_heads // num_kv_heads
        compute = torch.promote_types(query.dtype, torch.float32)
        tile_rows = self._agreeing_tile_rows(compute, num_kv_heads, fold, head_dim)
        key = (compute, fold, sliding_window, tile_rows)
        if key not in plan.groups:
            plan.groups[key] = list(
                _build_groups(plan.batch, compute, fold, sliding_window, tile_rows)
            )
        # Row by row the group comes before the KV head, so that a tile's rows fold without a copy.
        folded = query.reshape(num_tokens, num_kv_heads, fold, head_dim).transpose(1, 2)
        flat_query = folded.to(compute).reshape(num_tokens, num_heads * head_dim)
        flat_keys = k_cache.view(-1, num_kv_heads * head_dim)  # [P*S, G*H]
        flat_values = v_cache.view(-1, num_kv_heads * head_dim)
        out = torch.empty_like(flat_query)
        for group in plan.groups[key]:
            shape = (-1, group.mask.shape[2], num_kv_heads, head_dim)
            tiles = flat_query.index_select(0, group.query_rows).view(shape)  # [I, R*g, G, H]
            shape = (-1, _SPLIT, num_kv_heads, head_dim)
            keys = flat_keys.index_select(0, group.key_slots).to(compute).view(shape)
            values = flat_values.index_select(0, group.key_slots).to(compute).view(shape)
            part, weight = _attend(tiles, keys, values, group.mask, scale)
            part = part.reshape(-1, num_heads, head_dim)  # [I*R, g*G, H]
            _combine(part, weight.reshape(-1, num_heads), group, out)
        out = out.to(query.dtype).view(num_tokens, fold, num_kv_heads, head_dim)
        return out.transpose(1, 2).reshape(num_tokens, num_heads, head_dim)

    def _agreeing_tile_rows(
        self, dtype: torch.dtype, num_kv_heads: int, fold: int, head_dim: int
    ) -> tuple[int, ...]:
        """Tile sizes that give a row the same bits: the small one, and the large if it agrees."""
        key = (dtype, num_kv_heads, fold, head_dim, torch.get_num_threads())
        if key not in self._tile_rows:
            generator = torch.Generator().manual_seed(0)
            shape = (1, _LARGE_TILE * fold, num_kv_heads, head_dim)
            query = torch.randn(shape, generator=generator, dtype=dtype)
            keys, values = torch.randn(
                (2, 1, _SPLIT, num_kv_heads, head_dim), generator=generator, dtype=dtype
            )
            mask = torch.zeros(1, 1, _LARGE_TILE * fold, _SPLIT, dtype=dtype)
            large, _ = _attend(query, keys, values, mask, head_dim**-0.5)
            num_small = _LARGE_TILE // _SMALL_TILE
            small, _ = _attend(
                query.view(num_small, _SMALL_TILE * fold, num_kv_heads, head_dim),
                keys.expand(num_small, -1, -1, -1),
                values.expand(num_small, -1, -1, -1),
                mask.view(num_small, 1, _SMALL_TILE * fold, _SPLIT),
                head_dim**-0.5,
            )
            agrees = torch.equal(large.view_as(query), small.reshape(query.shape))
            self._tile_rows[key] = (_SMALL_TILE, _LARGE_TILE) if agrees else (_SMALL_TILE,)
        return self._tile_rows[key]


def _attend(
    tiles: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """softmax(QK)V of each item over its own keys, and the log of each softmax's denominator.

    tiles [I, R*g, G, H], keys and values [I, C, G, H], mask [I, 1, R*g, C]
    returns [I, R*g, G, H] and [I, R*g, G]
    """
    if tiles.shape[0] * tiles.shape[2] == 1:
        # A lone (item, head) would run outside the parallel region, where the GEMM may split.
        tiles, keys, values, mask = (
            tensor.expand(2, -1, -1, -1) for tensor in (tiles, keys, values, mask)
        )
        part, weight = _attend(tiles, keys, values, mask, scale)
        return part[:1], weight[:1]
    part, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        tiles.transpose(1, 2),
        keys.transpose(1, 2),
        values.transpose(1, 2),
        0.0,
        False,
        attn_mask=mask,
        scale=scale,
    )
    return part.transpose(1, 2), weight.transpose(1, 2)


def _combine(part: Tensor, log_weight: Tensor, group: _Group, out: Tensor) -> None:
    """Add up each row's splits and write them to its row of out.

    part [I*R, N, H], log_weight [I*R, N]; out [T, N*H]
    """
    num_rows, width = group.absent.shape[:2]
    part = part.index_select(0, group.parts)  # [U*W, N, H]
    if width > 1:
        shape = (num_rows, width, *part.shape[1:])
        log_weight = log_weight.index_select(0, group.parts).view(shape[:3]) + group.absent
        # amax has no order, and exp gives a number the same bits anywhere in a tensor.
        weight = torch.exp(log_weight - log_weight.amax(1, keepdim=True))[..., None]
        part = _tree_sum(part.view(shape) * weight) / _tree_sum(weight)  # [U, N, H]
    out.index_copy_(0, group.out_rows, part.view(num_rows, -1))


def _tree_sum(x: Tensor) -> Tensor:
    """[U, W, ...] -> [U, ...], neighbours first: zeros appended up to any W change no bit."""
    while x.shape[1] > 1:
        x = x[:, 0::2] + x[:, 1::2]
    return x[:, 0]


@dataclass
class _Items:
    """Host lists of the items of one group, before they become tensors."""

    segment: list[int] = field(default_factory=list)  # [I]
    split: list[int] = field(default_factory=list)  # [I]
    lone_row: list[int] = field(default_factory=list)  # [I] the only row that counts, or -1
    rows: list[list[int]] = field(default_factory=list)  # [I][R] packed row at each place
    out_rows: list[int] = field(default_factory=list)  # [U]
    parts: list[list[int]] = field(default_factory=list)  # [U][splits of the row]


def _build_groups(
    batch: PagedBatch,
    dtype: torch.dtype,
    fold: int,
    window: int | None,
    tile_rows: tuple[int, ...],
) -> Iterator[_Group]:
    paths = [_Paths(batch, segment_idx) for segment_idx in range(len(batch.context_lens))]
    open_items = {size: _Items() for size in tile_rows}
    for path in paths:
        first, end = path.start, path.start + path.num_tokens
        while first < end:
            large = path.parents is None and end - first >= _LARGE_FROM
            size = tile_rows[-1] if large else tile_rows[0]
            items = open_items[size]
            _add_tile(items, path, range(first, min(first + size, end)), size, window)
            first += size
            if len(items.split) >= _GROUP_ITEMS:
                yield _finish_group(items, paths, batch, dtype, fold, window)
                open_items[size] = _Items()
    for items in open_items.values():
        if items.split:
            yield _finish_group(items, paths, batch, dtype, fold, window)


class _Paths:
    """One segment's rows: which slot index holds each logical position that a row sees."""

    def __init__(self, batch: PagedBatch, segment_idx: int) -> None:
        self.segment_idx = segment_idx
        self.start = batch.query_start_loc[segment_idx]
        self.num_tokens = batch.query_start_loc[segment_idx + 1] - self.start
        self.context_len = batch.context_lens[segment_idx]
        self.parents = batch.parents[segment_idx]
        self.ancestors: list[list[int]] = []  # of each token, itself last; trees only
        for token_idx, parent in enumerate(self.parents or ()):
            above = self.ancestors[parent] if parent >= 0 else []
            self.ancestors.append([*above, token_idx])

    def position(self, row: int) -> int:
        """The logical position of packed row `row`."""
        token_idx = row - self.start
        depth = token_idx if self.parents is None else len(self.ancestors[token_idx]) - 1
        return self.context_len + depth


def _add_tile(items: _Items, path: _Paths, rows: range, size: int, window: int | None) -> None:
    """Append the items of one tile and say where each of its rows finds its splits."""
    last_splits = [path.position(row) // _SPLIT for row in rows]
    first_splits = [
        0 if window is None else max(0, path.position(row) - window + 1) // _SPLIT for row in rows
    ]
    places = [*rows, *[rows[-1]] * (size - len(rows))]  # [R] padding repeats the last row
    # Splits wholly inside the context are one sight for all rows, and so is a chain's own part.
    shared_end = max(last_splits) + 1
    if path.parents is not None:
        shared_end = min(shared_end, path.context_len // _SPLIT)
    parts: list[list[int]] = [[] for _ in rows]

    def add_item(split: int, lone_row: int, readers: range) -> None:
        for place in readers:
            if first_splits[place] <= split <= last_splits[place]:
                parts[place].append(len(items.split) * size + place)
        items.segment.append(path.segment_idx)
        items.split.append(split)
        items.lone_row.append(lone_row)
        items.rows.append(places)

    for split in range(min(first_splits), shared_end):
        add_item(split, -1, range(len(rows)))
    for place, row in enumerate(rows):
        for split in range(max(shared_end, first_splits[place]), last_splits[place] + 1):
            add_item(split, row, range(place, place + 1))
    items.out_rows += rows
    items.parts += parts


def _finish_group(
    items: _Items,
    paths: list[_Paths],
    batch: PagedBatch,
    dtype: torch.dtype,
    fold: int,
    window: int | None,
) -> _Group:
    num_items, size = len(items.split), len(items.rows[0])
    key_positions = torch.tensor(items.split)[:, None] * _SPLIT + torch.arange(_SPLIT)  # [I, C]
    row_positions = torch.tensor(
        [
            [paths[segment].position(row) for row in rows]
            for segment, rows in zip(items.segment, items.rows, strict=True)
        ]
    )[:, :, None]  # [I, R, 1]
    sees = key_positions[:, None] <= row_positions  # [I, R, C]
    if window is not None:
        sees &= key_positions[:, None] > row_positions - window
    # A place that sees no key of its item is never read; let it see all, for a softmax of nothing
    # is not a number.
    sees |= ~sees.any(-1, keepdim=True)
    mask = torch.zeros(sees.shape, dtype=dtype).masked_fill_(~sees, -torch.inf)
    absent, parts = _align_parts(items, dtype)
    return _Group(
        query_rows=torch.tensor(items.rows).view(-1),
        key_slots=_key_slots(items, paths, batch, key_positions).view(-1),
        mask=mask.repeat_interleave(fold, dim=1).view(num_items, 1, size * fold, _SPLIT),
        out_rows=torch.tensor(items.out_rows),
        parts=parts,
        absent=absent,
    )


def _align_parts(items: _Items, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """absent [U, W, 1] and parts [U*W]: each row's splits, counted from the first it sees."""
    width = 1
    while width < max(len(parts) for parts in items.parts):
        width *= 2
    absent = torch.zeros(len(items.parts), width, 1, dtype=dtype)
    table = []
    for row_idx, parts in enumerate(items.parts):
        absent[row_idx, len(parts) :] = -torch.inf
        # Absent splits read a part of the same row, times exactly zero.
        table.append(parts + [parts[0]] * (width - len(parts)))
    return absent, torch.tensor(table).view(-1)


def _key_slots(
    items: _Items, paths: list[_Paths], batch: PagedBatch, key_positions: Tensor
) -> Tensor:
    """[I, C] int64: the flat slot of the key at each logical position of each item.

    Positions past the segment's end read its last key: masked, and never another sequence's.
    """
    longest = max(len(table) for table in batch.block_tables)
    tables = torch.tensor([(*table, *[0] * (longest - len(table))) for table in batch.block_tables])
    segment = torch.tensor(items.segment)
    ends = torch.tensor([path.context_len + path.num_tokens - 1 for path in paths])
    index = torch.minimum(key_positions, ends[segment][:, None])  # [I, C] slot index
    for item_idx, row in enumerate(items.lone_row):
        if row < 0:
            continue
        path = paths[items.segment[item_idx]]
        # Logical position context_len + depth of this row's path sits where that ancestor sits.
        ancestors = torch.tensor(path.ancestors[row - path.start]) + path.context_len
        depth = key_positions[item_idx] - path.context_len  # [C]
        on_path = ancestors[depth.clamp(0, len(ancestors) - 1)]
        index[item_idx] = torch.where(depth >= 0, on_path, index[item_idx])
    blocks = tables[segment].gather(1, index // batch.block_size)
    return blocks * batch.block_size + index % batch.block_size

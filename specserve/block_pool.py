"""The pool of KV blocks that every model shares, and the prefix cache in it.

A block is free (no content), cached (content of accepted tokens, owned by nobody, evictable) or
live (owned by one or more sequences). Rule: free + cached + live == total, always.
One block id names the same slots in every model's KV tensors, so a block also records which
drafters have filled it: a prefix hit never feeds a draft model garbage.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq


def _field(data: bytes) -> bytes:
    # Length-prefixed, so that no two lists of fields ever read the same.
    return len(data).to_bytes(8, "little") + data


def chain_root(*, cache_salt: str, adapter_id: str = "") -> bytes:
    """Where a hash chain starts; sequences with another salt or adapter never share a block."""
    return hashlib.sha256(_field(cache_salt.encode()) + _field(adapter_id.encode())).digest()


def chain_hash(parent: bytes, token_ids: Iterable[int]) -> bytes:
    """sha-256 over the parent's hash and one full block of token ids."""
    ids = b"".join(token.to_bytes(8, "little", signed=True) for token in token_ids)
    return hashlib.sha256(_field(parent) + _field(ids)).digest()


class BlockPool:
    """Reference-counted blocks; unreferenced hashed ones stay as cache until evicted, LRU."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_total = num_blocks
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._ref_count = [0] * num_blocks
        self._hash: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._filled_by: list[set[str]] = [set() for _ in range(num_blocks)]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_live(self) -> int:
        return self.num_total - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Blocks that a sequence may get, evicting cached ones."""
        return self.num_free + self.num_cached

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks, free ones first, then the least recently used cached ones.

        The caller has checked num_available (or num_free, where nothing may be evicted).
        """
        assert num_blocks <= self.num_available
        taken = []
        for _ in range(num_blocks):
            if not self._free:
                self._evict_oldest()
            block_id = self._free.pop()
            self._ref_count[block_id] = 1
            taken.append(block_id)
        return taken

    def release(self, block_ids: Seq[int]) -> None:
        """Give up one reference to each block of a chain, given head first."""
        # Reversed: the tail of a chain is useless without its head, so let it be evicted first.
        for block_id in reversed(block_ids):
            assert self._ref_count[block_id] > 0
            self._ref_count[block_id] -= 1
            if self._ref_count[block_id]:
                continue
            if self._hash[block_id] is None:
                self._filled_by[block_id].clear()
                self._free.append(block_id)
            else:
                self._cached[block_id] = None

    def acquire_cached(self, block_ids: Iterable[int]) -> None:
        """Take one more reference to each block of a prefix hit."""
        for block_id in block_ids:
            self._cached.pop(block_id, None)
            self._ref_count[block_id] += 1

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """The longest run of blocks, from the first hash on, whose content is in the pool."""
        found = []
        for block_hash in hashes:
            block_id = self._by_hash.get(block_hash)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def num_evictable(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks count towards num_available now."""
        return sum(1 for block_id in block_ids if block_id in self._cached)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Enter a full block of accepted tokens into the prefix cache.

        When two sequences computed the same block, the first keeps the name.
        """
        if self._hash[block_id] is None and block_hash not in self._by_hash:
            self._hash[block_id] = block_hash
            self._by_hash[block_hash] = block_id

    def mark_filled(self, block_ids: Iterable[int], drafter: str) -> None:
        for block_id in block_ids:
            self._filled_by[block_id].add(drafter)

    def num_filled(self, block_ids: Seq[int]) -> dict[str, int]:
        """By drafter: how many blocks, from the first on, it has filled; missing if none."""
        counts: dict[str, int] = {}
        for count, block_id in enumerate(block_ids):
            still = [name for name in self._filled_by[block_id] if counts.get(name, 0) == count]
            if not still:
                break
            counts.update(dict.fromkeys(still, count + 1))
        return counts

    def _evict_oldest(self) -> None:
        block_id, _ = self._cached.popitem(last=False)
        block_hash = self._hash[block_id]
        assert block_hash is not None
        del self._by_hash[block_hash]
        self._hash[block_id] = None
        self._filled_by[block_id].clear()
        self._free.append(block_id)

    def check(self, owned: Iterable[Seq[int]]) -> None:
        """Raise AssertionError unless the pool agrees with the block tables that own it.

        For tests and for the idle engine; raised explicitly so that `python -O` keeps it.
        """
        counts = [0] * self.num_total
        for table in owned:
            for block_id in table:
                counts[block_id] += 1
        if counts != self._ref_count:
            raise AssertionError(f"reference counts {self._ref_count} but owners hold {counts}")
        live = sum(1 for count in counts if count)
        if self.num_free + self.num_cached + live != self.num_total:
            raise AssertionError(
                f"free {self.num_free} + cached {self.num_cached} + live {live} "
                f"!= total {self.num_total}"
            )
        if set(self._free) & set(self._cached) or len(set(self._free)) != len(self._free):
            raise AssertionError("a block is in the free list twice, or both free and cached")
        for block_hash, block_id in self._by_hash.items():
            if self._hash[block_id] != block_hash:
                raise AssertionError(f"hash index and block {block_id} disagree")

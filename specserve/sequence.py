"""A running request: its tokens, its blocks, how much of it is computed. Written by Scheduler."""

from __future__ import annotations

from enum import Enum

from specserve.block_pool import chain_hash, chain_root
from specserve.types import Request


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """num_computed_tokens (the target's KV length) catches up with num_tokens; nothing else does.

    Prefill, decode, recompute after preemption are all the same catching up.
    """

    def __init__(self, seq_id: int, request: Request, arrival_idx: int) -> None:
        self.seq_id = seq_id
        self.request = request
        self.arrival_idx = arrival_idx
        self.status = Status.WAITING
        self.token_ids: list[int] = list(request.prompt_ids)
        self.num_prompt_tokens = len(request.prompt_ids)
        self.num_computed_tokens = 0
        self.draft_kv_lens: dict[str, int] = {}  # by drafter; a missing one has none
        self.block_table: list[int] = []
        self.num_cached_tokens = 0  # of the prompt, at first admission
        self.num_preemptions = 0
        self._hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_unscored_tokens(self) -> int:
        """Tokens still to be computed whose logits tell what a prompt's token was worth."""
        if self.request.params.prompt_logprobs is None or self.num_output_tokens:
            return 0  # with output there, all of the prompt has been computed once
        return max(0, self.num_prompt_tokens - 1 - self.num_computed_tokens)

    @property
    def is_decoding(self) -> bool:
        """All known tokens but the last are computed, and the last one was emitted."""
        return self.num_uncomputed_tokens == 1 and self.num_output_tokens > 0

    @property
    def num_remaining_tokens(self) -> int:
        """How many more tokens it may emit."""
        return self.request.max_tokens - self.num_output_tokens

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: lower priority value, then earlier arrival."""
        return (self.request.priority, self.arrival_idx)

    def block_hashes(self, num_blocks: int, block_size: int) -> list[bytes]:
        """Hash chain of the first num_blocks full blocks of known tokens; computed once each."""
        while len(self._hashes) < num_blocks:
            at = len(self._hashes)
            parent = self._hashes[-1] if at else chain_root(cache_salt=self.request.cache_salt)
            block = self.token_ids[at * block_size : (at + 1) * block_size]
            assert len(block) == block_size
            self._hashes.append(chain_hash(parent, block))
        return self._hashes[:num_blocks]

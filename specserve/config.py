"""Configuration of one engine: frozen, documented per field, never edited after start."""

from __future__ import annotations

from typing import Literal

import msgspec

from specserve.types import VerifyRule

DType = Literal["auto", "int8", "bf16", "fp32", "fp64"]
SpeculationMode = Literal["auto", "fixed", "off"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    block_size: int = 16  # S: token slots per KV block
    num_blocks: int = 512  # P: blocks in the pool, shared by every model
    max_model_len: int = 2048  # tokens per sequence, prompt and output together
    max_num_seqs: int = 32  # sequences in one step
    max_num_batched_tokens: int = 512  # token budget of one step: decode, prefill and guesses
    max_prefill_chunk: int = 512  # most prompt tokens one sequence computes in one step
    max_waiting: int = 1024  # requests queued before new ones get 429
    enable_prefix_caching: bool = True
    default_drafter: str = "none"
    default_draft_tokens: int = 3  # K where a request names a drafter and no K
    max_draft_tokens: int = 15  # the largest K a request may ask for
    default_verify: VerifyRule = "replay"

"""What is kept of each request: raw enough that every measure can be computed afterwards."""

from __future__ import annotations

from typing import Literal

import msgspec

from specserve_loadgen.engines import Timings
from specserve_loadgen.wire import SpecserveMetrics, SpeculativeDecoding

CountedBy = Literal["token_ids", "usage", "timings", "chunks"]


class Output(msgspec.Struct, frozen=True):
    """What a reply said. token_ids: None where some chunk did not tell them"""

    text: str
    token_ids: tuple[int, ...] | None


class Chunk(msgspec.Struct, frozen=True):
    """One stream event with text or tokens in it."""

    seconds: float  # when the read that completed it returned
    num_tokens: int  # 0: text that was held back until now


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request has no result.

    kind: http_<status> | connection | connection_lost | timeout | stream_error | truncated |
          malformed | not_a_stream | cancelled (by this client: not the server's error)
    """

    kind: str
    message: str
    retry_after: str | None = None  # the header, as sent


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """Which request it is, and when it should leave."""

    request_idx: int
    session_idx: int | None = None  # of its conversation; None: a warm-up request
    turn_idx: int = 0
    scheduled: float | None = None  # None: when the user is ready


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times are seconds on the run's clock, which starts with the measured load."""

    request_idx: int
    session_idx: int | None = None
    turn_idx: int = 0
    prompt_id: str
    category: str
    scheduled: float | None  # open loop: when it should have been sent
    sent: float
    ended: float  # [DONE] arrived, or the failure was seen
    first_text: float | None
    chunks: tuple[Chunk, ...]
    counted_by: CountedBy  # the weakest way in which a chunk's tokens had to be counted
    num_output_tokens: int  # from the final usage where there is one, else the chunks' sum
    num_prompt_tokens: int | None
    num_cached_tokens: int | None  # prompt tokens found in the server's prefix cache
    finish_reason: str | None
    speculative: SpeculativeDecoding | None
    specserve: SpecserveMetrics | None
    malformed_metrics: str | None = None  # `metrics` was sent but has another shape
    failure: Failure | None = None
    timings: Timings | None = None  # llama.cpp's own
    output: Output | None = None  # kept on request

    @property
    def succeeded(self) -> bool:
        return self.failure is None

    @property
    def num_chunk_tokens(self) -> int:
        return sum(chunk.num_tokens for chunk in self.chunks)

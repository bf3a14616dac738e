"""Usage and speculation of one reply, added up over its sequences.

Identities that readers of these numbers check: sum(histogram) = steps, sum(j * histogram[j]) =
accepted, accepted <= drafted, len(histogram) = K + 1. A reply without speculation has zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from msgspec import UNSET, UnsetType

from specserve.live import at_each_position
from specserve.server.replies import (
    CachedTokens,
    Metrics,
    ReasoningTokens,
    SpecserveMetrics,
    SpeculativeDecoding,
    Usage,
)
from specserve.types import SpecStats, TokenChunk


class Tally:
    """The newest chunk of each sequence. choice index = prompt index * n + i."""

    def __init__(
        self, prompt_lens: Seq[int], n: int, *, detailed: bool, keep_texts: bool = False
    ) -> None:
        """prompt_lens: tokens of each prompt; each counts once, however many texts it gets.
        keep_texts: each sequence's text so far is asked for"""
        self._num_prompt_tokens = sum(prompt_lens)
        self._n = n
        self._detailed = detailed
        self._last: list[TokenChunk | None] = [None] * (len(prompt_lens) * n)
        self._open = len(self._last)
        self._num_reasoning_tokens: dict[int, int] = {}
        self._texts: list[list[str]] | None = [[] for _ in self._last] if keep_texts else None

    def add(self, idx: int, chunk: TokenChunk) -> None:
        self._last[idx] = chunk
        if self._texts is not None:
            self._texts[idx].append(chunk.text)
        if chunk.finish_reason is not None:
            self._open -= 1

    @property
    def texts(self) -> list[str]:
        """Of each sequence, so far; none where they were not kept."""
        return ["".join(parts) for parts in self._texts or []]

    def add_reasoning(self, idx: int, num_tokens: int) -> None:
        """How many of a finished sequence's tokens were reasoning, where anybody can tell."""
        self._num_reasoning_tokens[idx] = num_tokens

    @property
    def complete(self) -> bool:
        return self._open == 0

    @property
    def finish_reasons(self) -> list[str]:
        return [chunk.finish_reason for chunk in self._last if chunk and chunk.finish_reason]

    def usage(self) -> Usage:
        completion = sum(chunk.num_output_tokens for chunk in self._last if chunk is not None)
        cached = sum(chunk.num_cached_tokens for chunk in self._last[:: self._n] if chunk)
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=completion,
            total_tokens=self._num_prompt_tokens + completion,
            prompt_tokens_details=CachedTokens(cached),
            completion_tokens_details=self._reasoning(),
        )

    def _reasoning(self) -> ReasoningTokens | UnsetType:
        known = self._num_reasoning_tokens
        return ReasoningTokens(sum(known.values())) if len(known) == len(self._last) else UNSET

    def metrics(self) -> Metrics:
        chunks = [chunk for chunk in self._last if chunk is not None]
        stats = [chunk.stats for chunk in chunks if chunk.stats is not None]
        times = [chunk.times for chunk in chunks if chunk.times is not None]
        drafted = [count for one in stats for count in one.per_step_drafted]
        accepted = [count for one in stats for count in one.per_step_accepted]
        num_positions = max(drafted, default=0)
        return Metrics(
            _speculative_decoding(stats, self._detailed),
            SpecserveMetrics(
                drafters=list(dict.fromkeys(name for one in stats for name in one.drafters)),
                drafted_per_position=list(at_each_position(drafted, num_positions)),
                accepted_per_position=list(at_each_position(accepted, num_positions)),
                queue_seconds=_longest((one.arrival, one.scheduled) for one in times),
                prefill_seconds=_longest((one.scheduled, one.first_token) for one in times),
                decode_seconds=_longest((one.first_token, one.finished) for one in times),
                preemptions=sum(chunk.num_preemptions for chunk in chunks),
                steps=sum(one.num_steps for one in stats),
                lossy=any(one.lossy for one in stats),
            ),
        )


def _speculative_decoding(stats: Seq[SpecStats], detailed: bool) -> SpeculativeDecoding:
    accepted = [count for one in stats for count in one.per_step_accepted]
    drafted = [count for one in stats for count in one.per_step_drafted]
    steps = len(accepted)
    emitted = sum(one.num_spec_emitted_tokens for one in stats)
    num_spec_tokens = max((one.max_draft_tokens for one in stats), default=0)
    histogram = [0] * (num_spec_tokens + 1)
    for count in accepted:
        histogram[count] += 1
    return SpeculativeDecoding(
        mean_acceptance_length=emitted / steps if steps else 0.0,
        draft_acceptance_rate=sum(accepted) / sum(drafted) if steps else 0.0,
        acceptance_histogram=histogram,
        num_spec_steps=steps,
        num_accepted_draft_tokens=sum(accepted),
        num_draft_tokens=sum(drafted),
        num_spec_tokens=num_spec_tokens,
        per_step_accepted=accepted if detailed else UNSET,
        per_step_drafted=drafted if detailed else UNSET,
    )


def _longest(spans: Iterable[tuple[float | None, float | None]]) -> float | None:
    """Seconds of the longest span that has both ends; None if none has."""
    seconds = [end - start for start, end in spans if start is not None and end is not None]
    return max(seconds, default=None)

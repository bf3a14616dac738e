"""From emitted token ids to text that may leave: stop conditions, token by token.

Text never shows a partial UTF-8 sequence, nor any character that may turn out to begin a stop
string. The first condition that holds ends the sequence; what follows it vanishes everywhere.
An EOS or stop token counts as an output token (in token_ids and usage) but has no text.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from specserve.types import FinishReason, Request


class StreamDecoder(Protocol):
    """Incremental detokenizer: text that is certain, never part of a character."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str: ...


class Stop(msgspec.Struct, frozen=True):
    finish_reason: FinishReason
    stop_reason: str | int | None = None


def longest_stop_prefix(text: str, stops: tuple[str, ...]) -> int:
    """How many characters at the end of text begin a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


class OutputProcessor:
    """One sequence's text. push() each emitted token in order until it returns a Stop."""

    def __init__(self, request: Request, decoder: StreamDecoder) -> None:
        self._request = request
        self._decoder = decoder
        self._held = ""  # decoded, but may begin a stop string
        self._ready: list[str] = []
        self.num_output_tokens = 0

    def push(self, token_id: int) -> Stop | None:
        params = self._request.params
        self.num_output_tokens += 1
        may_stop = self.num_output_tokens > params.min_tokens
        if token_id in self._request.stop_ids and may_stop:
            if params.include_stop_str_in_output:
                self._held += self._decoder.push(token_id)
            self._finish_text()
            is_eos = token_id in self._request.eos_ids
            return Stop("stop", None if is_eos else token_id)
        stop = self._push_text(self._decoder.push(token_id), may_stop)
        if stop is None and self.num_output_tokens >= self._request.max_tokens:
            stop = self._stop_string_in(self._decoder.finish(), may_stop)
            if stop is None:
                self._release(len(self._held))
                stop = Stop("length")
        return stop

    def take_text(self) -> str:
        """Text that became ready since the last call."""
        text = "".join(self._ready)
        self._ready.clear()
        return text

    def _push_text(self, text: str, may_stop: bool) -> Stop | None:
        stop = self._stop_string_in(text, may_stop)
        if stop is None:
            held = longest_stop_prefix(self._held, self._request.params.stop) if may_stop else 0
            self._release(len(self._held) - held)
        return stop

    def _stop_string_in(self, text: str, may_stop: bool) -> Stop | None:
        """Add text; if a stop string is complete, release what precedes it and say so."""
        self._held += text
        if not may_stop:
            return None
        # The one that begins first; of two beginning together, the shorter is complete first.
        found = [
            (at, len(stop), stop)
            for stop in self._request.params.stop
            if (at := self._held.find(stop)) >= 0
        ]
        if not found:
            return None
        at, length, stop = min(found)
        self._release(at + length if self._request.params.include_stop_str_in_output else at)
        self._held = ""
        return Stop("stop", stop)

    def _finish_text(self) -> None:
        self._held += self._decoder.finish()
        self._release(len(self._held))

    def _release(self, length: int) -> None:
        if length:
            self._ready.append(self._held[:length])
            self._held = self._held[length:]

"""How much prompt has been taken in and not been computed: a queue bounded in tokens.

A bound in requests alone lets a thousand long prompts wait as easily as a thousand short ones,
which take a hundred times the time and memory. Counted on the server's side, from submission to a
sequence's first chunk: queue and prefill, the part of the wait that a newcomer can shorten by
going elsewhere.
"""

from __future__ import annotations

from specserve.errors import RequestError


class Backlog:
    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._num_tokens = 0

    def add(self, num_tokens: int) -> None:
        """RequestError 429 where that would be too many; then nothing is added."""
        if self._num_tokens + num_tokens > self._max_tokens:
            raise RequestError(
                f"{self._num_tokens} prompt tokens wait already and this request has "
                f"{num_tokens}, the limit is {self._max_tokens} (--max-waiting-tokens): "
                "try again later",
                code="queue_full",
                status=429,
            )
        self._num_tokens += num_tokens

    def remove(self, num_tokens: int) -> None:
        self._num_tokens -= num_tokens
        assert self._num_tokens >= 0

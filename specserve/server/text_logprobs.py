"""Log-probabilities by stretches of text, for /v1/responses.

A token belongs to the stretch in which its text begins: tokens of reasoning, of calls and of their
marks are in none. However a reply is cut into chunks, each stretch gets the same ones.
"""

from __future__ import annotations

from collections import deque

from specserve.server.logprobs import chat_logprobs
from specserve.server.replies import TokenLogprob
from specserve.tokenizer import Tokenizer
from specserve.types import TokenChunk


class TextLogprobs:
    """One choice's tokens, taken out as its text is."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.stream_decoder(skip_special_tokens)
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()  # with where its text begins
        self._next_at = 0
        self._num_chars = 0  # of text that the choice has; what a stop string cut off is none

    def push(self, chunk: TokenChunk) -> None:
        told = chat_logprobs(self._tokenizer, chunk.token_ids, chunk.logprobs).content
        for token_id, entry in zip(chunk.token_ids, told, strict=True):
            self._waiting.append((self._next_at, entry))
            self._next_at += len(self._decoder.push(token_id))
        self._num_chars += len(chunk.text)

    def take(self, at: int, length: int) -> list[TokenLogprob]:
        """Of the text from `at` on. What was before it belongs to no text."""
        self._skip(at)
        taken = []
        while self._waiting and self._waiting[0][0] < at + length:
            taken.append(self._waiting.popleft()[1])
        return taken

    def take_end(self) -> list[TokenLogprob]:
        """Of what ended the reply and is not shown: EOS, or a stop string."""
        self._skip(self._num_chars)
        return [entry for _, entry in self._waiting]

    def _skip(self, at: int) -> None:
        while self._waiting and self._waiting[0][0] < at:
            self._waiting.popleft()

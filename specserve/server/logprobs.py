"""Log-probabilities in OpenAI's two shapes, and of prompts in vLLM's.

JSON has no infinity: -inf is written as -9999.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from msgspec import UNSET, UnsetType

from specserve.server.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobList,
    TokenLogprob,
    TopLogprob,
)
from specserve.tokenizer import Tokenizer
from specserve.types import PromptLogprobs, TokenLogprobs

FLOOR = -9999.0


def finite(logprob: float) -> float:
    """NaN cannot come from a normalized distribution; were one to, the floor says "impossible"."""
    return logprob if logprob > FLOOR else FLOOR


def _num_chars_begun(raw: bytes) -> int:
    """UTF-8 characters whose first byte is here, so that split characters count once."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)


def output_offsets(tokenizer: Tokenizer, token_ids: Seq[int], first: int) -> tuple[list[int], int]:
    """Where each token's text begins, in characters, and where that of the next one will.

    first: where the first one's does
    """
    offsets: list[int] = []
    for token_id in token_ids:
        offsets.append(first)
        first += _num_chars_begun(tokenizer.token_bytes(token_id))
    return offsets, first


def echo_offsets(tokenizer: Tokenizer, prompt_ids: Seq[int], echo: str) -> list[int]:
    """Where each token of a prompt begins in the text that repeats it. What the tokenizer added
    around the prompt is not in that text."""
    offsets: list[int] = []
    at = 0
    for token_id in prompt_ids:
        offsets.append(at)
        text = tokenizer.token_text(token_id)
        if echo.startswith(text, at):
            at += len(text)
        elif token_id not in tokenizer.special_ids:  # part of a character, or a first space
            hidden = at == 0 and tokenizer.strips_first_space and text.startswith(" ")
            at += _num_chars_begun(tokenizer.token_bytes(token_id)) - hidden
    return offsets


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Seq[int],
    logprobs: Seq[TokenLogprobs | None],
    text_offsets: list[int],
    num_top: int,
) -> CompletionLogprobs:
    """logprobs: None of a prompt's first token. num_top: alternatives shown."""
    return CompletionLogprobs(
        tokens=[tokenizer.token_text(token_id) for token_id in token_ids],
        token_logprobs=[None if entry is None else finite(entry.logprob) for entry in logprobs],
        top_logprobs=[
            None if entry is None else _top_by_text(tokenizer, token_id, entry, num_top)
            for token_id, entry in zip(token_ids, logprobs, strict=True)
        ],
        text_offset=text_offsets,
    )


def _top_by_text(
    tokenizer: Tokenizer, token_id: int, entry: TokenLogprobs, num_top: int
) -> dict[str, float]:
    top: dict[str, float] = {}
    for other_id, logprob in entry.top[:num_top]:
        # Two ids may share a text; the better one comes first.
        top.setdefault(tokenizer.token_text(other_id), finite(logprob))
    top.setdefault(tokenizer.token_text(token_id), finite(entry.logprob))
    return top


def prompt_logprobs(
    tokenizer: Tokenizer,
    prompt_ids: Seq[int],
    logprobs: Seq[PromptLogprobs],
    num_top: int | None,
) -> PromptLogprobList | UnsetType:
    """logprobs: of the second token on. num_top: alternatives shown; None: nothing was asked for"""
    if num_top is None:
        return UNSET
    shaped: PromptLogprobList = [None]
    for token_id, entry in zip(prompt_ids[1:], logprobs, strict=True):
        own = PromptLogprob(finite(entry.logprob), entry.rank, tokenizer.token_text(token_id))
        by_id = {str(token_id): own}
        for idx, (other_id, logprob) in enumerate(entry.top[:num_top]):
            other = PromptLogprob(finite(logprob), idx + 1, tokenizer.token_text(other_id))
            by_id.setdefault(str(other_id), other)
        shaped.append(by_id)
    return shaped


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Seq[int], logprobs: Seq[TokenLogprobs]
) -> ChatLogprobs:
    return ChatLogprobs(
        [
            _token_logprob(tokenizer, token_id, entry)
            for token_id, entry in zip(token_ids, logprobs, strict=True)
        ]
    )


def _token_logprob(tokenizer: Tokenizer, token_id: int, entry: TokenLogprobs) -> TokenLogprob:
    chosen = _top(tokenizer, token_id, entry.logprob)
    return TokenLogprob(
        token=chosen.token,
        logprob=chosen.logprob,
        bytes=chosen.bytes,
        top_logprobs=[_top(tokenizer, other_id, logprob) for other_id, logprob in entry.top],
    )


def _top(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    raw = tokenizer.token_bytes(token_id)
    return TopLogprob(raw.decode(errors="replace"), finite(logprob), list(raw))

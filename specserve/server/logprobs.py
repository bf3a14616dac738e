"""TokenLogprobs in OpenAI's two shapes. JSON has no infinity: -inf is written as -9999."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specserve.server.replies import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from specserve.tokenizer import Tokenizer
from specserve.types import TokenLogprobs

FLOOR = -9999.0


def finite(logprob: float) -> float:
    """NaN cannot come from a normalized distribution; were one to, the floor says "impossible"."""
    return logprob if logprob > FLOOR else FLOOR


def _num_chars_begun(raw: bytes) -> int:
    """UTF-8 characters whose first byte is here, so that split characters count once."""
    return sum(byte & 0xC0 != 0x80 for byte in raw)


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Seq[int],
    logprobs: Seq[TokenLogprobs],
    text_offset: int,
) -> tuple[CompletionLogprobs, int]:
    """text_offset: characters of the text before the first of these tokens. Also returns that of
    the token that comes next."""
    tokens: list[str] = []
    offsets: list[int] = []
    tops: list[dict[str, float]] = []
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        token = tokenizer.token_text(token_id)
        tokens.append(token)
        offsets.append(text_offset)
        text_offset += _num_chars_begun(tokenizer.token_bytes(token_id))
        top: dict[str, float] = {}
        for other_id, logprob in entry.top:
            # Two ids may share a text; the better one comes first.
            top.setdefault(tokenizer.token_text(other_id), finite(logprob))
        top.setdefault(token, finite(entry.logprob))
        tops.append(top)
    shaped = CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[finite(entry.logprob) for entry in logprobs],
        top_logprobs=tops,
        text_offset=offsets,
    )
    return shaped, text_offset


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

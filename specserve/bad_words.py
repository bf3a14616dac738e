"""Texts that must not be put out, as the token sequences that would put them out. As in vLLM."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specserve.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Seq[str]) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands and as a word of its own, behind a space; equal ones once.

    Only these sequences are kept out: a text that spells a word with other tokens is not.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if token_ids:
                found[token_ids] = None
    return tuple(found)

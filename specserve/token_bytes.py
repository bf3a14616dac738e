"""Which bytes each token of a vocabulary stands for."""

from __future__ import annotations

import json
import re
from typing import Any  # the JSON form of a tokenizer

import msgspec
import tokenizers

SPACE_MARK = "▁"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(msgspec.Struct, frozen=True):
    of: dict[int, bytes]  # by token id
    strips_first_space: bool  # the text's first space marks its start and is not part of it


def token_bytes_table(backend: tokenizers.Tokenizer) -> TokenBytes | None:
    """Bytes of every token; None where the decoder is not a plain mapping of tokens to bytes."""
    decoder = json.loads(backend.to_str()).get("decoder")
    steps = _steps(decoder)
    kinds = [step["type"] for step in steps]
    vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    if kinds == ["ByteLevel"]:
        table = {token_id: _byte_level(token) for token, token_id in vocab.items()}
        return TokenBytes(table, strips_first_space=False)
    if kinds == ["Metaspace"]:
        scheme = steps[0].get("prepend_scheme", "always")
        table = {token_id: _spaced(token) for token, token_id in vocab.items()}
        return TokenBytes(table, strips_first_space=scheme != "never")
    if _is_sentencepiece(steps):
        has_bytes = "ByteFallback" in kinds
        table = {
            token_id: _byte_fallback(token) if has_bytes else _spaced(token)
            for token, token_id in vocab.items()
        }
        return TokenBytes(table, strips_first_space="Strip" in kinds)
    return None


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _is_sentencepiece(steps: list[dict[str, Any]]) -> bool:
    """Replace(mark, space), then any of ByteFallback, Fuse, Strip(one space at the start)."""
    if not steps or steps[0]["type"] != "Replace":
        return False
    if steps[0].get("pattern") != {"String": SPACE_MARK} or steps[0].get("content") != " ":
        return False
    for step in steps[1:]:
        if step["type"] == "Strip":
            if (step["content"], step["start"], step["stop"]) != (" ", 1, 0):
                return False
        elif step["type"] not in ("ByteFallback", "Fuse"):
            return False
    return True


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return alphabet | {chr(0x100 + idx): byte for idx, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([BYTE_OF[char] for char in token])
    except KeyError:  # an added token with a character outside the alphabet is plain text
        return token.encode()


def _spaced(token: str) -> bytes:
    return token.replace(SPACE_MARK, " ").encode()


def _byte_fallback(token: str) -> bytes:
    match = BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else _spaced(token)

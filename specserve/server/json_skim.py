"""JSON in a call's arguments, skimmed a token at a time while it arrives.

`skim` is a short cut: it takes tokens that are whole and right, and stops before anything that
needs a closer look, be it cut, odd or wrong. Whoever calls it takes that character by character.
"""

from __future__ import annotations

import re
from typing import Final, Literal

MAX_DEPTH: Final = 64
MAX_SCALAR_CHARS: Final = 400
MIN_WINDOW: Final = 48
MAX_WINDOW: Final = 384  # so that no scalar in one has more than MAX_SCALAR_CHARS

Expected = Literal["object", "first key", "key", "colon", "first value", "value", "next"]

NUMBER: Final = r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
IN_STRING: Final = r'(?:[^"\\]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))'
_SCALAR = rf"(?:{NUMBER}|true|false|null)(?=[^-+.0-9a-zE])"
# Of what comes behind the last whole token, findall gives "": a string or scalar that may go on
# behind the window, or no JSON.
_TOKEN = re.compile(rf'([\[\]{{}}:,]|"{IN_STRING}*+"|[ \t\r\n]+|{_SCALAR})|(?s:.+)')
_SHORT = zip("\n\t\r\b\f", "ntrbf", strict=True)
_MENDED = {code: f"\\u{code:04x}" for code in range(32)}
_MENDED |= {ord(char): f"\\{letter}" for char, letter in _SHORT}


def _table() -> dict[Expected, dict[str, Expected]]:
    """What is expected -> the first character of the next token -> what is expected then."""
    value: dict[str, Expected] = {'"': "next", "{": "first key", "[": "first value"}
    value |= dict.fromkeys("-0123456789tfn", "next")
    table: dict[Expected, dict[str, Expected]] = {
        "first key": {'"': "colon", "}": "next"},
        "key": {'"': "colon"},
        "colon": {":": "value"},
        "first value": {**value, "]": "next"},
        "value": value,
        "next": {",": "key", "}": "next", "]": "next"},  # behind a comma in a list: value
    }
    for expected, after in table.items():
        after |= dict.fromkeys(" \t\r\n", expected)
    return table


_AFTER = _table()
_OPENED_BY = {"}": "{", "]": "["}


def mended(text: str) -> str:
    """Part of a string, its control characters as JSON spells them."""
    return text if text.isprintable() else text.translate(_MENDED)


def skim(
    text: str, at: int, end: int, expected: Expected, stack: list[str], sink: list[str] | None
) -> tuple[int, Expected]:
    """Reads text[at:end], at most MAX_WINDOW characters; where it stopped, what is expected there.

    stack: brackets that are open, two at least. It is changed, but never to fewer than two
    sink:  is given what was read
    """
    begin = at
    for token in _TOKEN.findall(text, at, end):
        char = token[:1]
        after = _AFTER[expected].get(char)
        if after is None:
            break
        if char in "{[":
            if len(stack) >= MAX_DEPTH:
                break
            stack.append(char)
        elif char in "}]":
            if len(stack) == 2 or _OPENED_BY[char] != stack[-1]:
                break
            stack.pop()
        elif char == ",":
            after = "key" if stack[-1] == "{" else "value"
        elif char == '"' and sink is not None and not token.isprintable():
            sink.append(text[begin:at])
            sink.append(token.translate(_MENDED))
            begin = at + len(token)
        expected = after
        at += len(token)
    if sink is not None and at > begin:
        sink.append(text[begin:at])
    return at, expected

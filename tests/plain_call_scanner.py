"""The readable form of specserve/server/call_scanner.py, which says the same in less time.

JSON is checked character by character, so that it is known at once, not at the end, that a text is
no call, and so that arguments can leave while they are written. The one thing that is mended: raw
line breaks and tabs in strings, which small models write, leave as JSON spells them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

import msgspec

MAX_DEPTH = 64
ARGUMENT_KEYS = frozenset({"arguments", "parameters"})

_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_SPACE = re.compile(r"[ \t\r\n]+")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_SCALAR_CHARS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_MAX_SCALAR_CHARS = 400
_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}

Expected = Literal["object", "first key", "key", "colon", "first value", "value", "next"]


class PlainCallScanner:
    """`state` says how far it is; `name` and `begun` are set as soon as they are certain."""

    def __init__(self, names: Collection[str], keys: Collection[str] | None) -> None:
        """names: of functions that may be called; keys: that a call may have; None: any"""
        self.state: Literal["open", "whole", "broken"] = "open"
        self.name: str | None = None
        self.arguments_whole = False
        self._names = names
        self._keys = keys
        self._expected: Expected = "object"
        self._stack: list[str] = []
        self._string: Literal["key", "value"] | None = None  # the string that is being read
        self._escape = ""  # of a string: what of an escape was read
        self._scalar = ""
        self._seen: set[str] = set()  # keys of the call itself
        self._sink: list[str] | None = None  # where what is read is kept, too
        self._key: list[str] = []
        self._name: list[str] = []
        self._arguments: list[str] = []
        self._has_arguments = False

    @property
    def begun(self) -> bool:
        """It is a call for certain: its function is known and its arguments have begun."""
        return self.name is not None and (self._has_arguments or self.state == "whole")

    def take_arguments(self) -> str:
        """What was read of the arguments since the last time."""
        if self.state == "whole" and not self._has_arguments:
            self._has_arguments = self.arguments_whole = True
            return "{}"
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def push(self, text: str, at: int = 0) -> int:
        """Reads from text[at]; where it stopped: the end, behind the call, or at what breaks it."""
        while at < len(text) and self.state == "open":
            at = self._step(text, at)
        return at

    def _step(self, text: str, at: int) -> int:
        if self._string is not None:
            return self._in_string(text, at)
        char = text[at]
        if self._scalar or (char in _SCALAR_CHARS and self._expected in ("value", "first value")):
            return self._in_scalar(char, at)
        if space := _SPACE.match(text, at):
            self._keep(space[0])
            return space.end()
        if not self._structure(char):
            self.state = "broken"
            return at
        return at + 1

    def _keep(self, text: str) -> None:
        if self._sink is not None:
            self._sink.append(text)

    # ---- strings and scalars ---------------------------------------------------------------

    def _in_string(self, text: str, at: int) -> int:
        char = text[at]
        if self._escape:
            return self._in_escape(char, at)
        if run := _RUN.match(text, at):
            self._keep(run[0])
            return run.end()
        if char == "\\":
            self._escape = char
            self._keep(char)
        elif char == '"':
            self._keep(char)
            self._string_ends()
        else:
            self._keep(_ESCAPES.get(char, f"\\u{ord(char):04x}"))
        return at + 1

    def _in_escape(self, char: str, at: int) -> int:
        unicode = self._escape.startswith("\\u")
        if char not in ("0123456789abcdefABCDEF" if unicode else '"\\/bfnrtu'):
            self.state = "broken"
            return at
        self._keep(char)
        self._escape += char
        if self._escape != "\\u" and (not unicode or len(self._escape) == 6):
            self._escape = ""
        return at + 1

    def _string_ends(self) -> None:
        if self._string == "value":
            self._string = None
            self._value_ends()
            return
        self._string = None
        self._expected = "colon"
        if len(self._stack) == 1:
            self._sink = None
            key = _decoded("".join(self._key))
            if key is None or key in self._seen or (self._keys and key not in self._keys):
                self.state = "broken"
                return
            self._seen.add(key)
            self._key = [key]

    def _in_scalar(self, char: str, at: int) -> int:
        if char in _SCALAR_CHARS and len(self._scalar) < _MAX_SCALAR_CHARS:
            if not self._scalar and not self._value_begins(char):
                self.state = "broken"
                return at
            self._scalar += char
            self._keep(char)
            return at + 1
        if not _SCALAR.fullmatch(self._scalar):
            self.state = "broken"
            return at
        self._scalar = ""
        self._value_ends()
        return at  # the character behind it is read next

    # ---- structure -------------------------------------------------------------------------

    def _structure(self, char: str) -> bool:
        """Takes one character between strings and scalars; whether it may stand here."""
        match self._expected:
            case "object":
                return char == "{" and self._opens(char)
            case "first key" | "key":
                return self._key_begins(char) or (
                    self._expected == "first key" and char == "}" and self._closes(char)
                )
            case "colon":
                if char != ":":
                    return False
                self._keep(char)
                self._expected = "value"
                return True
            case "first value" if char == "]":
                return self._closes(char)
            case "first value" | "value":
                return self._value_begins(char) and self._opens(char)
            case "next" if char == ",":
                self._keep(char)
                self._expected = "key" if self._stack[-1] == "{" else "value"
                return True
            case "next":
                return char == {"{": "}", "[": "]"}[self._stack[-1]] and self._closes(char)

    def _key_begins(self, char: str) -> bool:
        if char != '"':
            return False
        if len(self._stack) == 1:
            self._key = []
            self._sink = self._key
        self._keep(char)
        self._string = "key"
        return True

    def _value_begins(self, char: str) -> bool:
        """Before its first character is kept; whether that may begin it."""
        if len(self._stack) != 1:
            return True
        key = self._key[0]
        if key == "name":
            self._sink = self._name
            return char == '"'
        if key in ARGUMENT_KEYS:
            if self._has_arguments or char != "{":
                return False
            self._has_arguments = True
            self._sink = self._arguments
        return True

    def _opens(self, char: str) -> bool:
        """A string, an object or a list; whether it is one."""
        self._keep(char)
        if char == '"':
            self._string = "value"
            return True
        if char not in "{[" or len(self._stack) >= MAX_DEPTH:
            return False
        self._stack.append(char)
        self._expected = "first key" if char == "{" else "first value"
        return True

    def _closes(self, char: str) -> bool:
        self._keep(char)
        self._stack.pop()
        if self._stack:
            self._value_ends()
            return True
        self.state = "broken" if self.name is None else "whole"
        return self.name is not None

    def _value_ends(self) -> None:
        self._expected = "next"
        if len(self._stack) != 1:
            return
        if self._sink is self._name:
            self.name = _decoded("".join(self._name))
            if self.name not in self._names:
                self.name, self.state = None, "broken"
        elif self._sink is self._arguments:
            self.arguments_whole = True
        self._sink = None


def _decoded(raw: str) -> str | None:
    """The string that a JSON literal spells; None for a lone surrogate."""
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError:
        return None

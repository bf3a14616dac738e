"""One call of a function, `{"name": …, "arguments": {…}}`, read strictly while it arrives.

JSON is checked as it comes, so that it is known at once, not at the end, that a text is no call,
and so that arguments can leave while they are written. The one thing that is mended: raw line
breaks and tabs in strings, which small models write, leave as JSON spells them.

Everything can be read character by character, as tests/plain_call_scanner.py does; what is nested
in a call is skimmed as far as that goes, which takes a tenth of the time.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

import msgspec

from specserve.server.json_skim import (
    IN_STRING,
    MAX_DEPTH,
    MAX_SCALAR_CHARS,
    MAX_WINDOW,
    MIN_WINDOW,
    NUMBER,
    Expected,
    mended,
    skim,
)

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})

_RUN = re.compile(IN_STRING + "++")
_SPACES = r"[ \t\r\n]*+"
_SPACE = re.compile(r"[ \t\r\n]+")
_HEAD = re.compile(rf'{_SPACES}\{{{_SPACES}"name"{_SPACES}:{_SPACES}"([^"\\\x00-\x1f]*+)"')
_KEY = re.compile(rf'{_SPACES}"([^"\\\x00-\x1f]*+)"{_SPACES}:')
_SCALAR = re.compile(NUMBER + "|true|false|null")
_SCALAR_RUN = re.compile("[-+.0-9a-zE]+")
_SCALAR_CHARS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")


class CallScanner:
    """`state` says how far it is; `name` and `begun` are set as soon as they are certain."""

    def __init__(self, names: Collection[str], keys: Collection[str] | None) -> None:
        """names: of functions that may be called; keys: that a call may have; None: any"""
        self.state: Literal["open", "whole", "broken"] = "open"
        self.name: str | None = None
        self.arguments_whole = False
        self._names = names
        self._keys = keys
        self._expected: Expected = "object"
        self._window = MIN_WINDOW  # characters to skim next
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
        if self._expected == "object":
            at = self._head(text, at)
        while at < len(text) and self.state == "open":
            if self._string is None and not self._scalar and len(self._stack) >= 2:
                at, to_the_end = self._skim(text, at)
                if to_the_end:
                    continue
            at = self._step(text, at)
        return at

    def _head(self, text: str, at: int) -> int:
        """What most calls begin with, at once."""
        found = _HEAD.match(text, at)
        if found is None:
            return at
        self._stack.append("{")
        self._seen.add("name")
        self._key = ["name"]
        self._expected = "next"
        self._is_named(found[1])
        return found.end()

    def _skim(self, text: str, at: int) -> tuple[int, bool]:
        """Where it stopped, and whether that is only the end of what it looked at."""
        end = min(len(text), at + self._window)
        at, self._expected = skim(text, at, end, self._expected, self._stack, self._sink)
        # A stop halfway through costs what is left of the window.
        self._window = min(2 * self._window, MAX_WINDOW) if at == end else MIN_WINDOW
        return at, at == end

    def _step(self, text: str, at: int) -> int:
        if self._string is not None:
            return self._in_string(text, at)
        if self._expected in ("first key", "key") and len(self._stack) == 1:
            key = _KEY.match(text, at)
            if key is not None:
                return key.end() if self._has_key(key[1], "value") else key.end(1) + 1
        char = text[at]
        if self._scalar or (char in _SCALAR_CHARS and self._expected in ("value", "first value")):
            return self._in_scalar(text, at)
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
        if self._escape:
            return self._in_escape(text[at], at)
        if run := _RUN.match(text, at):
            self._keep(mended(run[0]))
            at = run.end()
            if at == len(text):
                return at
        self._keep(text[at])
        if text[at] == '"':
            self._string_ends()
        else:
            self._escape = text[at]
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
            self._has_key(_decoded("".join(self._key)), "colon")

    def _has_key(self, key: str | None, expected: Expected) -> bool:
        """One of the call's own; whether it may. expected: behind it"""
        if key is None or key in self._seen or (self._keys and key not in self._keys):
            self.state = "broken"
            return False
        self._seen.add(key)
        self._key = [key]
        self._expected = expected
        return True

    def _in_scalar(self, text: str, at: int) -> int:
        run = _SCALAR_RUN.match(text, at, at + MAX_SCALAR_CHARS - len(self._scalar))
        if run is not None:
            if not self._scalar and not self._value_begins(text[at]):
                self.state = "broken"
                return at
            self._scalar += run[0]
            self._keep(run[0])
            at = run.end()
            if at == len(text):
                return at
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
            self._is_named(_decoded("".join(self._name)))
        elif self._sink is self._arguments:
            self.arguments_whole = True
        self._sink = None

    def _is_named(self, name: str | None) -> None:
        if name in self._names:
            self.name = name
        else:
            self.state = "broken"


def _decoded(raw: str) -> str | None:
    """The string that a JSON literal spells; None for a lone surrogate."""
    try:
        return msgspec.json.decode(raw, type=str)
    except msgspec.DecodeError:
        return None

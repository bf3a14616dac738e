"""Calls of functions in a reply's text, found while it arrives.

What turns out not to be a call stays text, marks included. A call of a function that nobody offered
is text, too: clients cannot make it. White space around calls belongs to the format; all other
text around them stays. A call counts once its arguments are whole, whatever its end looks like.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection
from typing import Literal

import msgspec

from specserve.output import longest_stop_prefix
from specserve.server.call_scanner import ARGUMENT_KEYS, CallScanner
from specserve.server.parts import CallArguments, CallStart, Part, Text

_SPACE = re.compile(r"\s+")


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How a model writes calls.

    opens:  what stands before a call
    closes: what may stand behind one
    bare:   a reply that begins with an object may be a call, without `opens`
    keys:   that a call may have; None: any
    before, after, between: as the model itself writes calls, between two of them
    arguments: the key of the arguments, likewise
    """

    opens: str
    closes: str
    bare: bool
    keys: frozenset[str] | None
    before: str
    after: str
    between: str
    arguments: str


CALL_FORMATS: dict[str, CallFormat] = {
    # <tool_call>{"name": …, "arguments": {…}}</tool_call>, of Hermes, Qwen 2.5 and Qwen 3
    "hermes": CallFormat(
        opens="<tool_call>",
        closes="</tool_call>",
        bare=False,
        keys=None,
        before="<tool_call>\n",
        after="\n</tool_call>",
        between="\n",
        arguments="arguments",
    ),
    # {"name": …, "parameters": {…}}, separated by ";", perhaps behind a tag, of Llama 3.1 and 3.2
    "llama3_json": CallFormat(
        opens="<|python_tag|>",
        closes=";",
        bare=True,
        # Without marks an object is all there is to go by: the first odd key shows it is no call.
        keys=ARGUMENT_KEYS | {"name", "type", "id"},
        before="",
        after="",
        between="; ",
        arguments="parameters",
    ),
}


class CallReader:
    """names: of the functions that may be called; max_calls: further ones are left out

    Of a pushed text, `_given` characters are dealt with; behind them comes what is known to be
    text, from `_begin` on what may be a call (or white space before one), and from `_at` on what
    was not read. What may be a call may have begun in earlier pushes: those are in `_kept`.
    `_first` characters were pushed before `_text`.
    """

    reasoning_bytes = 0

    def __init__(
        self, layout: CallFormat, names: Collection[str], max_calls: int | None = None
    ) -> None:
        self._format = layout
        self._opening = _opening(layout.opens)
        self._names = names
        self._max_calls = max_calls
        # start: only white space so far. behind: nothing but that since a call.
        self._place: Literal["start", "text", "behind"] = "start"
        self._kept: list[str] = []
        self._text = ""
        self._first = self._given = self._begin = self._at = 0
        self._scanner: CallScanner | None = None
        self._lead = 0  # of a call that has not begun: characters from _begin to its object
        self._started = False
        self._num_calls = 0
        self._cut = False

    @property
    def calls(self) -> bool:
        return self._num_calls > 0 and not self._cut

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        self._take(text, first=self._first + len(self._text))
        if self._scanner is None and self._kept:
            if text.isspace() and self._kept[-1].isspace():
                self._kept.append(text)
                return parts
            self._read_kept_again()
        while self._advance(parts):
            pass
        self._give_text(parts, self._begin)
        if undecided := self._text[self._begin :]:
            self._kept.append(undecided)
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._scanner is not None and self._started:
            self._call_ends(self._scanner)
        self._scanner = None
        held = "".join(self._kept)
        self._kept.clear()
        if self._place == "behind" and self._format.closes.startswith(held.strip()):
            return parts
        if held:
            parts.append(Text(held, self._first + len(self._text) - len(held)))
        return parts

    def _take(self, text: str, *, first: int) -> None:
        self._text, self._first = text, first
        self._given = self._begin = self._at = 0

    def _read_kept_again(self) -> None:
        kept = "".join(self._kept)
        self._kept.clear()
        self._take(kept + self._text, first=self._first - len(kept))

    def _advance(self, parts: list[Part]) -> bool:
        """Reads on; whether there may be more to read."""
        if self._scanner is not None:
            return self._in_call(self._scanner, parts)
        if self._place == "text":
            return self._in_text()
        return self._between()

    def _in_text(self) -> bool:
        found = self._opening.search(self._text, self._at)
        if found is None:
            opens = self._format.opens
            end = self._text[max(self._at, len(self._text) - len(opens)) :]
            self._begin = self._at = len(self._text) - longest_stop_prefix(end, (opens,))
            return False
        self._begin = found.start()
        self._expect_call(found.end())
        return True

    def _between(self) -> bool:
        """White space, marks, or the first sign of text."""
        text, closes, opens = self._text, self._format.closes, self._format.opens
        first = _end_of_space(text, self._at)
        behind = self._place == "behind"
        if behind and text.startswith(closes, first):
            self._is_dealt_with(first + len(closes))
            return True
        if text.startswith(opens, first):
            self._expect_call(first + len(opens))
            return True
        rest = text[first : first + max(len(opens), len(closes))]
        if opens.startswith(rest) or (behind and closes.startswith(rest)):
            return False
        if rest[0] == "{" and (behind or self._format.bare):
            self._expect_call(first)
            return True
        self._place = "text"
        return True

    def _expect_call(self, at: int) -> None:
        """at: where its object must begin"""
        self._scanner = CallScanner(self._names, self._format.keys)
        self._lead = at - self._begin
        self._at = at
        self._started = False

    def _in_call(self, scanner: CallScanner, parts: list[Part]) -> bool:
        self._at = scanner.push(self._text, self._at)
        if scanner.begun:
            self._give_call(scanner, parts)
        if scanner.state == "open":
            return False
        if self._started:
            self._call_ends(scanner)
            return True
        # No call: what stood before it is text, the rest is looked at again.
        self._scanner, self._place = None, "text"
        if self._kept:
            self._read_kept_again()
        self._at = self._begin + max(1, self._lead)
        return True

    def _give_call(self, scanner: CallScanner, parts: list[Part]) -> None:
        call_idx = self._num_calls
        wanted = self._max_calls is None or call_idx < self._max_calls
        if not self._started:
            self._give_text(parts, self._begin)
            self._kept.clear()
            if wanted:
                assert scanner.name is not None
                parts.append(CallStart(call_idx, f"call_{secrets.token_hex(12)}", scanner.name))
        self._started = True
        self._is_dealt_with(self._at)
        if (text := scanner.take_arguments()) and wanted:
            parts.append(CallArguments(call_idx, text))

    def _call_ends(self, scanner: CallScanner) -> None:
        self._num_calls += 1
        self._cut = self._cut or not scanner.arguments_whole
        self._place = "behind" if scanner.arguments_whole else "text"
        self._scanner = None

    def _is_dealt_with(self, end: int) -> None:
        self._given = self._begin = self._at = end

    def _give_text(self, parts: list[Part], end: int) -> None:
        if end > self._given:
            parts.append(Text(self._text[self._given : end], self._first + self._given))
            self._given = end


def _opening(mark: str) -> re.Pattern[str]:
    """The mark where an object with a key may follow: most marks that open no call fail here."""
    space = "[ \\t\\r\\n]*+"
    return re.compile(rf'{re.escape(mark)}(?={space}(?:\Z|\{{{space}(?:\Z|")))')


def _end_of_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()

"""The readable form of specserve/server/call_reader.py, which says the same in less time.

What turns out not to be a call stays text, marks included. A call of a function that nobody offered
is text, too: clients cannot make it. White space around calls belongs to the format; all other
text around them stays. A call counts once its arguments are whole, whatever its end looks like.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from typing import Literal

from specserve.output import longest_stop_prefix
from specserve.server.call_reader import CallFormat
from specserve.server.parts import CallArguments, CallStart, Part, Text
from tests.plain_call_scanner import PlainCallScanner


class PlainCallReader:
    """names: of the functions that may be called; max_calls: further ones are left out"""

    reasoning_bytes = 0

    def __init__(
        self, layout: CallFormat, names: Collection[str], max_calls: int | None = None
    ) -> None:
        self._format = layout
        self._names = names
        self._max_calls = max_calls
        # start: only white space so far. behind: nothing but that since a call.
        self._place: Literal["start", "text", "behind"] = "start"
        self._held = ""  # not known yet what it is
        self._num_pushed = 0  # characters
        self._scanner: PlainCallScanner | None = None
        self._lead = 0  # of a call that has not begun: how much of what is held stands before it
        self._scanned = 0  # how much of what is held the scanner has read
        self._started = False
        self._num_calls = 0
        self._cut = False

    @property
    def calls(self) -> bool:
        return self._num_calls > 0 and not self._cut

    def push(self, text: str) -> list[Part]:
        self._held += text
        self._num_pushed += len(text)
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return parts

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._scanner is not None and self._started:
            self._call_ends(self._scanner)
        held, self._held, self._scanner = self._held, "", None
        if self._place == "behind" and self._format.closes.startswith(held.strip()):
            return parts
        if held:
            parts.append(Text(held, self._num_pushed - len(held)))
        return parts

    def _advance(self, parts: list[Part]) -> bool:
        """Takes what it can from what is held; whether there may be more to take."""
        if self._scanner is not None:
            return self._in_call(self._scanner, parts)
        if self._place == "text":
            return self._in_text(parts)
        return self._between()

    def _in_text(self, parts: list[Part]) -> bool:
        opens = self._format.opens
        at = self._held.find(opens)
        if at < 0:
            at = len(self._held) - longest_stop_prefix(self._held, (opens,))
            self._give_text(parts, at)
            return False
        self._give_text(parts, at)
        self._expect_call(len(opens))
        return True

    def _between(self) -> bool:
        """White space, marks, or the first sign of text."""
        rest = self._held.lstrip()
        skipped = len(self._held) - len(rest)
        closes, opens = self._format.closes, self._format.opens
        if self._place == "behind" and rest.startswith(closes):
            self._held = rest[len(closes) :]
            return True
        if rest.startswith(opens):
            self._expect_call(skipped + len(opens))
            return True
        if opens.startswith(rest) or (self._place == "behind" and closes.startswith(rest)):
            return False
        if rest[0] == "{" and (self._place == "behind" or self._format.bare):
            self._expect_call(skipped)
            return True
        self._place = "text"
        return True

    def _expect_call(self, lead: int) -> None:
        """lead: characters of what is held that stand before the object"""
        self._scanner = PlainCallScanner(self._names, self._format.keys)
        self._lead = self._scanned = lead
        self._started = False

    def _in_call(self, scanner: PlainCallScanner, parts: list[Part]) -> bool:
        self._scanned = scanner.push(self._held, self._scanned)
        if scanner.begun:
            self._give_call(scanner, parts)
        if scanner.state == "open":
            return False
        if not self._started:  # no call: what stood before it is text, the rest is looked at again
            self._scanner, self._place = None, "text"
            self._give_text(parts, max(1, self._lead))
            return True
        self._call_ends(scanner)
        return True

    def _give_call(self, scanner: PlainCallScanner, parts: list[Part]) -> None:
        call_idx = self._num_calls
        wanted = self._max_calls is None or call_idx < self._max_calls
        if not self._started and wanted:
            assert scanner.name is not None
            parts.append(CallStart(call_idx, f"call_{uuid.uuid4().hex[:24]}", scanner.name))
        self._started = True
        self._held = self._held[self._scanned :]
        self._scanned = 0
        if (text := scanner.take_arguments()) and wanted:
            parts.append(CallArguments(call_idx, text))

    def _call_ends(self, scanner: PlainCallScanner) -> None:
        self._num_calls += 1
        self._cut = self._cut or not scanner.arguments_whole
        self._place = "behind" if scanner.arguments_whole else "text"
        self._scanner = None

    def _give_text(self, parts: list[Part], length: int) -> None:
        if length:
            parts.append(Text(self._held[:length], self._num_pushed - len(self._held)))
            self._held = self._held[length:]

"""The reasoning that a reply begins with, told from what follows it, while it arrives."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Literal

from specserve.output import longest_stop_prefix
from specserve.server.parts import Part, Reader, Reasoning, Text
from specserve.tokenizer import Tokenizer

OPENS = "<think>"
CLOSES = "</think>"

Place = Literal["start", "inside", "behind"]


class ThinkReader:
    """Reasoning stands at the beginning or nowhere; what comes behind it is another reader's.

    Marks are left out and all else stays, white space too. Calls in reasoning are not made.
    """

    def __init__(self, then: Reader, *, opened: bool) -> None:
        """opened: the prompt ends with the opening mark, which a model may repeat"""
        self._then = then
        self._opened = opened
        self._place: Place = "start"
        self._blank: list[str] = []  # white space that the reply begins with, joined once
        self._held = ""  # not known yet what it is
        self._num_taken = 0  # characters of reasoning and its marks
        self.reasoning_bytes = 0

    @property
    def calls(self) -> bool:
        return self._then.calls

    def push(self, text: str) -> list[Part]:
        if self._place == "behind":
            return self._behind(self._then.push(text))
        if self._place == "start" and not self._held and not text.strip():
            self._blank.append(text)
            return []
        self._hold(text)
        if self._place == "start":
            self._place = self._beginning()
        return self._read()

    def finish(self) -> list[Part]:
        self._hold("")
        if self._place == "start":
            self._place = "inside" if self._opened else "behind"
        parts = self._read()
        if self._place == "inside":
            parts += self._reasoning(len(self._held))
        return parts + self._behind(self._then.finish())

    def _hold(self, text: str) -> None:
        self._held = "".join([*self._blank, self._held, text])
        self._blank.clear()

    def _beginning(self) -> Place:
        rest = self._held.lstrip()
        if rest.startswith(OPENS):
            self._take(len(self._held) - len(rest) + len(OPENS))
            return "inside"
        if OPENS.startswith(rest):
            return "start"
        return "inside" if self._opened else "behind"

    def _read(self) -> list[Part]:
        parts: list[Part] = []
        if self._place == "inside":
            at = self._held.find(CLOSES)
            if at < 0:
                at = len(self._held) - longest_stop_prefix(self._held, (CLOSES,))
                return self._reasoning(at)
            parts += self._reasoning(at)
            self._take(len(CLOSES))
            self._place = "behind"
        if self._place == "behind":
            text, self._held = self._held, ""
            parts += self._behind(self._then.push(text)) if text else []
        return parts

    def _behind(self, parts: list[Part]) -> list[Part]:
        """The other reader's, where they are in what this one was given."""
        if not self._num_taken:
            return parts
        return [
            Text(part.text, part.at + self._num_taken) if isinstance(part, Text) else part
            for part in parts
        ]

    def _reasoning(self, length: int) -> list[Part]:
        text = self._take(length)
        return [Reasoning(text)] if text else []

    def _take(self, length: int) -> str:
        """What is reasoning, or its mark."""
        text, self._held = self._held[:length], self._held[length:]
        self._num_taken += length
        self.reasoning_bytes += len(text.encode())
        return text


def reasoning_tokens(tokenizer: Tokenizer, token_ids: Seq[int], num_bytes: int) -> int:
    """How many of a reply's tokens its reasoning took.

    num_bytes: of the text, in UTF-8, that the reasoning and its marks took
    """
    num_tokens = 0
    for token_id in token_ids:
        if num_bytes <= 0:
            break
        num_tokens += 1
        num_bytes -= len(tokenizer.token_bytes(token_id))
    return num_tokens

"""Server-sent events, parsed from bytes as they arrive.

Works on bytes, so a multi-byte character split over two reads needs no care: only a line end can
end an event, and no line end occurs inside a UTF-8 sequence. Follows the WHATWG rules for LF, CR
and CRLF, comments, several data lines and the byte order mark. An event that the stream ends in
the middle of is dropped, as the standard says; the reader notices the missing [DONE].
"""

from __future__ import annotations

import msgspec

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseEvent(msgspec.Struct, frozen=True):
    event: str  # "" when the server named none, which means "message"
    data: bytes  # the data lines joined by LF, undecoded


class SseParser:
    """Feed it reads of any size; it returns the events that each read completes."""

    def __init__(self) -> None:
        self._partial_line: list[bytes] = []  # parts, so that one huge event costs O(n), not O(n²)
        self._data: list[bytes] = []
        self._event = ""
        self._at_start = True
        self._skip_lf = False  # the last read ended in CR: an LF now belongs to the same line end

    def feed(self, data: bytes) -> list[SseEvent]:
        if self._skip_lf and data:
            data = data.removeprefix(b"\n")
            self._skip_lf = False
        if not data:
            return []
        if b"\r" in data:
            self._skip_lf = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        if b"\n" not in data:
            self._partial_line.append(data)
            return []
        first, *rest = data.split(b"\n")
        lines = [b"".join((*self._partial_line, first)), *rest]
        last = lines.pop()
        self._partial_line = [last] if last else []
        return self._take_lines(lines)

    def _take_lines(self, lines: list[bytes]) -> list[SseEvent]:
        if self._at_start:
            lines[0] = lines[0].removeprefix(BYTE_ORDER_MARK)
            self._at_start = False
        events = []
        for line in lines:
            if line:
                self._take_field(line)
            elif self._data:
                events.append(SseEvent(self._event, b"\n".join(self._data)))
                self._data, self._event = [], ""
            else:
                self._event = ""  # an event without data is no event
        return events

    def _take_field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
        elif name == b"event":
            self._event = value.removeprefix(b" ").decode(errors="replace")
        # An empty name is a comment; id and retry are for clients that reconnect.

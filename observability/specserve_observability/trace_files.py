"""A trace file read once, or followed while it grows and is rotated.

Rotation renames FILE to FILE.1, FILE.1 to FILE.2 and so on. A file is known by its inode and kept
open while it is in the folder, so that none is read twice or left half read, whatever it is called
by then, and so that no new file can take an inode that we still remember. A file that shrinks was
cut off in place, and is read again from its beginning.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .otlp_reading import TraceFileError, read_spans

MAX_LINE_BYTES = 64 * 2**20
_READ_BYTES = 2**20
_MAX_OPEN_FILES = 256
_CHECKED_LINES = 64

Inode = tuple[int, int]  # device, inode


class TraceFile:
    """Lines of one file and of those that were rotated away from it, oldest first.

    Raises OSError where `path` is not there or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[Inode, _OpenFile] = {}
        path.open("rb").close()

    def new_lines(self) -> Iterator[bytes]:
        """Every line that has come to its end since the last call."""
        present: set[Inode] = set()
        for path in rotated_files(self.path):
            try:
                one = self._opened(path)
            except OSError:  # renamed or removed between the listing and now
                continue
            present.add(one.inode)
            one.num_missed = 0
            yield from one.new_lines()
        for inode in self._open.keys() - present:
            yield from self._look_back(self._open[inode])

    def _look_back(self, one: _OpenFile) -> Iterator[bytes]:
        """Renamed while the folder was listed, or gone: the next look will tell."""
        one.num_missed += 1
        yield from one.new_lines()
        if one.num_missed > 1:
            del self._open[one.inode]
            yield from one.unfinished()
            one.close()

    def unfinished(self) -> Iterator[bytes]:
        """What stands behind the last line end, for whoever reads no further."""
        for one in self._open.values():
            yield from one.unfinished()

    def close(self) -> None:
        for one in self._open.values():
            one.close()
        self._open.clear()

    def _opened(self, path: Path) -> _OpenFile:
        file = path.open("rb")
        one = _OpenFile(file)
        known = self._open.get(one.inode)
        if known is not None:
            one.close()
            return known
        self._open[one.inode] = one
        return one


class _OpenFile:
    def __init__(self, file: BinaryIO) -> None:
        status = os.fstat(file.fileno())
        self.inode: Inode = (status.st_dev, status.st_ino)
        self.num_missed = 0  # looks in a row in which it was not in the folder
        self._file = file
        self._begun = b""  # a line whose end has not come
        self._skipping = False  # inside a line that is longer than any should be

    def new_lines(self) -> Iterator[bytes]:
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
            self._begun = b""
        while data := self._file.read(_READ_BYTES):
            *ended, rest = (self._begun + data).split(b"\n")
            if self._skipping and ended:
                ended[0] = b"(too long)"
                self._skipping = False
            yield from ended
            if len(rest) > MAX_LINE_BYTES or self._skipping:
                rest = b""
                self._skipping = True
            self._begun = rest

    def unfinished(self) -> Iterator[bytes]:
        if self._begun.strip():
            yield self._begun
        self._begun = b""

    def close(self) -> None:
        self._file.close()


def rotated_files(path: Path) -> list[Path]:
    """FILE.9 … FILE.1, FILE: what is there, oldest first."""
    pattern = re.compile(re.escape(path.name) + r"\.(\d{1,4})")
    numbered = [
        (int(match[1]), other)
        for other in path.parent.iterdir()
        if (match := pattern.fullmatch(other.name)) and other.is_file()
    ]
    newest = sorted(numbered)[:_MAX_OPEN_FILES]
    return [*(other for _, other in reversed(newest)), path]


def check_first_lines(path: Path) -> None:
    """A file that is something else is refused at once: lines that are damaged are left out."""
    wrong: TraceFileError | None = None
    with path.open("rb") as file:
        for line in itertools.islice(file, _CHECKED_LINES):
            if not line.strip() or not line.endswith(b"\n"):  # the last is being written
                continue
            try:
                read_spans(line)
            except TraceFileError as error:
                wrong = wrong or error
            else:
                return
    if wrong is not None:
        raise TraceFileError(
            f"{path}: its first line is {wrong}: give a file that `specserve serve --trace-file` "
            "or a collector's file exporter wrote, one OTLP JSON object a line"
        )

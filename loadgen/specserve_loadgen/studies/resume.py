"""Finished blocks, kept in a file: a study of an hour that is stopped goes on where it was.

The first line is what was asked: the plan, and a digest of its prompts. Each later line is one
block, in every cell by every arm, written when it is through. A last line that was cut short is
left out, and its block asked again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.prompts import Prompt
from specserve_loadgen.studies.cells import BlockRun
from specserve_loadgen.studies.watch import KWindow


class FinishedBlock(msgspec.Struct, frozen=True, kw_only=True):
    """seconds: of the study when it was through, pauses left out"""

    seconds: float
    runs: tuple[BlockRun, ...]
    windows: tuple[KWindow, ...]


class BlockFile:
    """path None: nothing is kept."""

    def __init__(self, path: Path | None, plan: msgspec.Struct, prompts: Sequence[Prompt]) -> None:
        self._path = path
        digest = hashlib.sha256(msgspec.json.encode(list(prompts))).hexdigest()
        self._head = msgspec.json.encode({"plan": plan, "prompts_sha256": digest})

    def read(self) -> list[FinishedBlock]:
        """What is through; begins the file where there is none. LoadgenError: another study's."""
        if self._path is None:
            return []
        data = self._read(self._path)
        if not data:
            self._write(self._head + b"\n", "wb")
            return []
        head, *lines, cut = data.split(b"\n")  # behind the last line end: nothing, or half a line
        if head != self._head:
            raise LoadgenError(
                f"--resume {self._path}: another study was begun there: give the options and "
                "prompts that it had (--seconds may differ), or another file"
            )
        try:
            blocks = [msgspec.json.decode(line, type=FinishedBlock) for line in lines]
        except msgspec.DecodeError as error:
            raise LoadgenError(f"--resume {self._path}: {error}") from None
        if cut:
            os.truncate(self._path, len(data) - len(cut))
        return blocks

    def add(self, block: FinishedBlock) -> None:
        if self._path is not None:
            self._write(msgspec.json.encode(block) + b"\n", "ab")

    @staticmethod
    def _read(path: Path) -> bytes:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise LoadgenError(f"--resume {path}: {error.strerror or error}") from None

    def _write(self, data: bytes, mode: str) -> None:
        assert self._path is not None
        try:
            with self._path.open(mode) as file:
                file.write(data)
        except OSError as error:
            raise LoadgenError(f"--resume {self._path}: {error.strerror or error}") from None

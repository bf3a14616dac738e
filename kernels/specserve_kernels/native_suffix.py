"""The compiled suffix drafter and prompt lookup (native/suffix_index.h, native/suffix_lookup.h).

Equal to specserve_drafts' readable forms, draft by draft. One thread; calls keep the interpreter
lock: they take microseconds, and to get it back from a busy event loop may take milliseconds.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Sequence as Seq
from functools import cache
from typing import NamedTuple

from specserve_kernels import native_library


class Ask(NamedTuple):
    """token_ids: of its text, behind what was given before; max_tokens: K; width: most children"""

    seq_id: int
    token_ids: Seq[int]
    max_tokens: int
    width: int = 1


class Guess(NamedTuple):
    """As in specserve.drafting.Draft; all three have the same length."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...]


class _Room:
    """Where guesses are written: CGuesses of native/suffix_index.h, grown on demand."""

    class _Guesses(ctypes.Structure):
        _fields_ = (
            ("counts", ctypes.POINTER(ctypes.c_int32)),
            ("tokens", ctypes.POINTER(ctypes.c_int32)),
            ("parents", ctypes.POINTER(ctypes.c_int32)),
            ("scores", ctypes.POINTER(ctypes.c_double)),
        )

    def __init__(self, num_rows: int, num_guesses: int) -> None:
        self.num_rows, self.num_guesses = num_rows, num_guesses
        self.counts = (ctypes.c_int32 * num_rows)()
        self.tokens = (ctypes.c_int32 * num_guesses)()
        self.parents = (ctypes.c_int32 * num_guesses)()
        self.scores = (ctypes.c_double * num_guesses)()
        self._struct = self._Guesses(self.counts, self.tokens, self.parents, self.scores)
        self.pointer = ctypes.pointer(self._struct)


class _Caller:
    """Packs asks, keeps the room."""

    def __init__(self) -> None:
        self._room = _Room(64, 1024)

    def room_for(self, asks: Seq[Ask]) -> tuple[array[int], _Room]:
        packed: list[int] = []
        num_guesses = 0
        for seq_id, token_ids, max_tokens, width in asks:
            packed += (seq_id, max_tokens, width, len(token_ids))
            packed += token_ids
            num_guesses += max_tokens
        room = self._room
        if room.num_rows < len(asks) or room.num_guesses < num_guesses:
            room = self._room = _Room(2 * len(asks), 2 * num_guesses)
        return array("q", packed), room


class SuffixIndex:
    """corpus_tokens: of past output, all salts together."""

    def __init__(self, corpus_tokens: int) -> None:
        self._library = _loaded()
        self._index = self._library.specserve_suffix_new(corpus_tokens)
        self._caller = _Caller()
        weakref.finalize(self, self._library.specserve_suffix_delete, self._index)

    @property
    def num_corpus_tokens(self) -> int:
        """Tokens of past output held now."""
        return int(self._library.specserve_suffix_num_corpus_tokens(self._index))

    def add(self, seq_id: int, salt: str, num_prompt: int, prediction_ids: Seq[int]) -> None:
        """A sequence of which nothing is known yet. A known one begins anew."""
        name = _bytes(salt)
        ids = array("i", prediction_ids)
        self._library.specserve_suffix_add(
            self._index, seq_id, name, len(name), num_prompt, ids.buffer_info()[0], len(ids)
        )

    def forget(self, seq_id: int) -> None:
        self._library.specserve_suffix_forget(self._index, seq_id)

    def read_output(self, salt: str, token_ids: Seq[int]) -> None:
        """The whole output of a sequence that ended."""
        name = _bytes(salt)
        ids = array("i", token_ids)
        self._library.specserve_suffix_read_output(
            self._index, name, len(name), ids.buffer_info()[0], len(ids)
        )

    def guess(self, asks: Seq[Ask]) -> list[Guess]:
        """One per ask; the sequences must have been added."""
        packed, room = self._caller.room_for(asks)
        count = len(asks)
        self._library.specserve_suffix_guess(
            self._index, packed.buffer_info()[0], count, room.pointer
        )
        counts = room.counts[:count]
        total = sum(counts)
        tokens, parents = room.tokens[:total], room.parents[:total]
        scores = room.scores[:total]
        guesses, at = [], 0
        for length in counts:
            here = slice(at, at + length)
            guesses.append(Guess(tuple(tokens[here]), tuple(parents[here]), tuple(scores[here])))
            at += length
        return guesses


class Lookup:
    """Per sequence, what followed the last occurrence of its latest tokens."""

    def __init__(self) -> None:
        self._library = _loaded()
        self._lookup = self._library.specserve_lookup_new()
        self._caller = _Caller()
        weakref.finalize(self, self._library.specserve_lookup_delete, self._lookup)

    def forget(self, seq_id: int) -> None:
        self._library.specserve_lookup_forget(self._lookup, seq_id)

    def guess(self, asks: Seq[Ask]) -> list[list[int]]:
        """One chain per ask, of exactly K guesses or none."""
        packed, room = self._caller.room_for(asks)
        self._library.specserve_lookup_guess(
            self._lookup, packed.buffer_info()[0], len(asks), room.pointer
        )
        chains, at = [], 0
        for count in room.counts[: len(asks)]:
            chains.append(room.tokens[at : at + count])
            at += count
        return chains


def available() -> bool:
    """Whether this process has the compiled form; native_library.why_not says why not."""
    return _library() is not None


def _bytes(salt: str) -> bytes:
    return salt.encode("utf-8", "surrogatepass")


@cache
def _library() -> ctypes.PyDLL | None:
    loaded = native_library.load()
    if loaded is None:
        return None
    library = ctypes.PyDLL(loaded._name, handle=loaded._handle)  # the same, with the lock kept
    pointer, size, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
    declared: dict[str, tuple[type | None, list[type]]] = {
        "suffix_new": (pointer, [size]),
        "suffix_delete": (None, [pointer]),
        "suffix_add": (None, [pointer, size, text, size, size, pointer, size]),
        "suffix_forget": (None, [pointer, size]),
        "suffix_read_output": (None, [pointer, text, size, pointer, size]),
        "suffix_guess": (None, [pointer, pointer, size, pointer]),
        "suffix_num_corpus_tokens": (size, [pointer]),
        "lookup_new": (pointer, []),
        "lookup_delete": (None, [pointer]),
        "lookup_forget": (None, [pointer, size]),
        "lookup_guess": (None, [pointer, pointer, size, pointer]),
    }
    for name, (result, arguments) in declared.items():
        function = library[f"specserve_{name}"]
        function.restype, function.argtypes = result, arguments
        setattr(library, f"specserve_{name}", function)
    return library


def _loaded() -> ctypes.PyDLL:
    library = _library()
    if library is None:
        raise RuntimeError(f"no compiled suffix drafter: {native_library.why_not()}")
    return library

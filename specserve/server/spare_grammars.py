"""Grammars compiled before they are asked for again: a bounded cache of unused ones.

What a matcher has read stays in it and counts against its limits, so a used one must not be given
to another text. A spare was made for nobody yet: whoever gets it has exactly what compiling would
have given, only sooner. It is used on the grammar thread alone.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from specserve.constraint import Constraint, GrammarSpec

MAX_SPARES: Final = 64
# Of their texts. Measured, a spare takes 16 to 32 bytes for each of them, and up to 20 kB more.
MAX_SPARE_CHARS: Final = 1024 * 1024

Key = tuple[str, str, bool, int | None]


class SpareGrammars:
    """Of each grammar that was asked for lately one spare, or the memory of it."""

    def __init__(self, max_entries: int = MAX_SPARES, max_chars: int = MAX_SPARE_CHARS) -> None:
        """max_entries, max_chars: the grammar asked for longest ago makes room"""
        self._max_entries = max_entries
        self._max_chars = max_chars
        self._spares: OrderedDict[Key, Constraint | None] = OrderedDict()
        self._num_chars = 0

    def take(self, spec: GrammarSpec) -> Constraint | None:
        """The spare, which is then nobody else's; None: there is none."""
        spare = self._spares.get(_key(spec))
        if spare is not None:
            self.put(spec, None)
        return spare

    def wants(self, spec: GrammarSpec) -> bool:
        """Whether it was asked for before, and has no spare. Asked for now, it is remembered."""
        if _key(spec) not in self._spares:
            self.put(spec, None)
            return False
        return self._spares[_key(spec)] is None

    def put(self, spec: GrammarSpec, spare: Constraint | None) -> None:
        """spare: None: only to be remembered"""
        key = _key(spec)
        if key not in self._spares:
            self._num_chars += len(spec.text)
        self._spares[key] = spare
        self._spares.move_to_end(key)
        while len(self._spares) > self._max_entries or self._num_chars > self._max_chars:
            (_, text, _, _), _ = self._spares.popitem(last=False)
            self._num_chars -= len(text)


def _key(spec: GrammarSpec) -> Key:
    """All that the grammar depends on: not the field that asked for it."""
    return (spec.kind, spec.text, spec.compact, spec.after)

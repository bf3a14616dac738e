"""What a drafter that follows texts is asked: of each row only the tokens it has not seen yet."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from specserve.drafting import DraftRow
from specserve_drafts.scripted import wants_guesses
from specserve_kernels.native_suffix import Ask


class Asks:
    """add: called with the first row of a sequence that is not known."""

    def __init__(self, add: Callable[[DraftRow], None]) -> None:
        self._add = add
        self._num_known: dict[int, int] = {}  # by seq_id

    def of(self, rows: Seq[DraftRow]) -> tuple[list[int], list[Ask]]:
        """Of rows that want guesses: indices into rows, and what to ask. Asking must follow."""
        asked, asks = list[int](), list[Ask]()
        known = self._num_known
        for idx, row in enumerate(rows):
            if not wants_guesses(row):
                continue
            start = known.get(row.seq_id)
            if start is None:
                self._add(row)
                start = 0
            asked.append(idx)
            asks.append(Ask(row.seq_id, row.history[start:], row.max_tokens, row.width))
            known[row.seq_id] = len(row.history)
        return asked, asks

    def forget(self, seq_id: int) -> None:
        self._num_known.pop(seq_id, None)

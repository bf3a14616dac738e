"""What an EAGLE-3 drafter knows of each sequence: which KV is valid, which states wait to be used.

The KV of slot j comes from the target's state at position j - 1 and the token at j. So it depends
on tokens up to j alone, like the target's own, and a cached block is good for whoever hits it;
stored at j - 1 instead (as others do) the last slot of a block would depend on the next block's
first token. Slot 0 has no state before it and stays empty.

A hit on the prefix cache brings KV but no states, and the first new slot needs the state before
it: so the drafter keeps the (fused) state at each block's last position, too. Where a block was
computed without this drafter there is a gap. It is never claimed, attention begins behind it, and
guesses get better as text grows; the other choice, none at all, would be worse.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

MAX_BUFFERED = 4096  # positions per sequence; a drafter that is not asked for that long has a gap
MAX_BUFFERED_BYTES = 1 << 28  # of all sequences


class State(NamedTuple):
    """The fused state rows[idx] [H'] of rows [n, H'] that nobody writes to any more."""

    rows: Tensor
    idx: int


@dataclass(slots=True)
class Track:
    """One sequence.

    claim: positions whose states are used up, counted from the first, and whose KV is valid: what
           the runner may rely on. Stands still once there is a gap
    base, end: slots base <= j < end have KV
    carry: the fused state at end - 1, where it is known from a cached block
    last:  the fused state that slot end - 1 was made of: guessing starts from it
    """

    claim: int
    base: int
    end: int
    has_gap: bool = False
    carry: State | None = None
    last: State | None = None
    num_buffered: int = 0  # positions
    _chunks: deque[Tensor] = field(default_factory=deque)  # [m, A, D] each, in order

    @property
    def num_ready(self) -> int:
        """Slots that could be filled if their tokens are known."""
        return self.num_buffered + (self.carry is not None)

    @property
    def next_state(self) -> int:
        """Position of the first state that is not known here."""
        return self.end - 1 + self.num_ready

    def see(self, start: int, hidden: Tensor, most: int = MAX_BUFFERED) -> None:
        """hidden [m, A, D]: the target's states at positions start, start + 1, ..., to be kept.

        most: positions that the buffer may hold before; with more it begins anew

        Nobody writes to them any more; they may be a part of a whole step's.
        """
        if start < self.next_state:
            hidden = hidden[self.next_state - start :]
        elif start > self.next_state or self.num_buffered > most:
            self.lose(start)
        if len(hidden):
            self._chunks.append(hidden)
            self.num_buffered += len(hidden)

    def lose(self, start: int) -> None:
        """States before `start` will never come: begin anew behind the gap."""
        self._chunks.clear()
        self.num_buffered = 0
        self.carry = self.last = None
        self.base = self.end = start + 1
        self.has_gap = True

    def take(self, num_states: int) -> list[Tensor]:
        """The oldest of the buffer: [m, A, D] each, num_states in all."""
        taken = []
        self.num_buffered -= num_states
        while num_states:
            chunk = self._chunks[0]
            if len(chunk) > num_states:
                self._chunks[0] = chunk[num_states:]
                chunk = chunk[:num_states]
            else:
                self._chunks.popleft()
            taken.append(chunk)
            num_states -= len(chunk)
        return taken

    def filled(self, num_slots: int, last: State) -> None:
        self.end += num_slots
        self.carry = None
        self.last = last
        if not self.has_gap:
            self.claim = self.end - 1


def begin(kv_len: int, tail: State | None) -> Track:
    """A sequence met for the first time.

    kv_len: of its blocks as the runner knows it, whole blocks
    tail:   the state at position kv_len - 1
    """
    if kv_len == 0:
        return Track(claim=0, base=1, end=1)
    return Track(claim=kv_len, base=1, end=kv_len, carry=tail)

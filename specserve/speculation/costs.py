"""What a step costs, in seconds: measured when the server starts, corrected by every step after.

A target forward of m packed tokens, L of them with logits, that attend to `attended` keys:

    (all[m] - head[m] + head[L] + slope * attended) * level[size class of m] * speed

`all` (every token has logits) and `head` are staircases of the start-up profile. `level` follows
each size class slowly and `speed` follows the whole machine quickly and first, so that a busy
neighbour slows every prediction alike and teaches little about sizes. Each takes the median of its
class's last observations, cut to a factor of 3: one outlier moves nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as Seq
from itertools import accumulate
from statistics import median_low
from typing import Final

import msgspec

_FACTOR: Final = 3.0  # further away than this an observation is cut
_SLOW: Final = 0.05
_LEVEL: Final = 0.02
_PROFILED: Final = 10  # observations that the profile of a size counts as
_UNSEEN: Final = 64  # observations of other sizes
_DRIFT: Final = 0.002
_READING: Final = 16  # known tokens per row from which a call is one that reads
_FAST: Final = 0.2


class SizeCost(msgspec.Struct, frozen=True):
    """Seconds of one forward of num_tokens tokens, all with logits, and with one row of logits."""

    num_tokens: int
    all_logits: float
    one_logit: float


class Profile(msgspec.Struct, frozen=True):
    """sizes: by rising num_tokens, from 1; per_attended: seconds per key a query attends to."""

    sizes: tuple[SizeCost, ...]
    per_attended: float = 0.0


# Where nothing was measured: any number of tokens costs the same, until steps say otherwise.
UNMEASURED: Final = Profile((SizeCost(1, 0.01, 0.01), SizeCost(64, 0.012, 0.012)))


class RobustMean:
    """A mean that forgets; an observation counts as the median of the last five."""

    __slots__ = ("_rate", "_recent", "count", "value")

    def __init__(self, value: float, rate: float, *, weight: int = 0) -> None:
        """weight: how many observations the first value counts as; 0: the first one replaces it"""
        self.value = value
        self.count = weight
        self._rate = rate
        # What was believed counts as two observations: a first outlier is not the median.
        self._recent: deque[float] = deque([value] * 2 if weight else (), maxlen=5)

    def add(self, observed: float) -> None:
        if self.count:
            observed = min(max(observed, self.value / _FACTOR), self.value * _FACTOR)
        self._recent.append(observed)
        self.count += 1
        rate = max(self._rate, 1.0 / self.count)
        self.value += rate * (median_low(self._recent) - self.value)


class VerifyCosts:
    """The target's forward, plus what it costs to choose one token from its logits."""

    def __init__(self, profile: Profile = UNMEASURED) -> None:
        self._profile = profile
        self._sizes = [size.num_tokens for size in profile.sizes]
        weight = 0 if profile is UNMEASURED else _PROFILED
        self._levels = [RobustMean(1.0, _LEVEL, weight=weight) for _ in self._sizes]
        self._seen_at = [0] * len(self._levels)
        self._num_observed = 0
        self._speed = RobustMean(1.0, _FAST, weight=4)
        self._all: list[float] = [0.0]  # by number of tokens, grown on demand
        self._head: list[float] = [0.0]
        self._class: list[int] = [0]
        self._choosing = RobustMean(0.0, _SLOW)

    @property
    def per_emitted(self) -> float:
        """Seconds to choose one token."""
        return self._choosing.value

    def seconds(self, num_tokens: int, num_logits: int, attended: float = 0.0) -> float:
        """One forward; the same as ladder(...)[0]."""
        return self.ladder(num_tokens, num_logits, attended, 0.0, 0)[0]

    def ladder(
        self, num_tokens: int, num_logits: int, attended: float, per_guess: float, most: int
    ) -> list[float]:
        """Seconds of a forward with 0, 1, ..., `most` guesses beside num_tokens known tokens.

        Never falling: that more tokens take less time is noise, and no reason to guess.

        per_guess: keys that a guess attends to, on average
        """
        if num_tokens + most >= len(self._all):
            self._grow(num_tokens + most)
        whole, head, class_of = self._all, self._head, self._class
        speed = self._speed.value
        factors = [level.value * speed for level in self._levels]
        slope = self._profile.per_attended * per_guess
        start = self._profile.per_attended * attended - slope * num_tokens
        end = num_tokens + most + 1
        sizes = range(num_tokens, end)
        if num_logits == num_tokens:  # decode rows alone
            rungs = [(whole[m] + start + slope * m) * factors[class_of[m]] for m in sizes]
        else:
            shift = num_logits - num_tokens
            rungs = [
                (whole[m] - head[m] + head[m + shift] + start + slope * m) * factors[class_of[m]]
                for m in sizes
            ]
        return list(accumulate(rungs, max))

    def observe(
        self,
        num_tokens: int,
        num_logits: int,
        attended: float,
        seconds: float,
        *,
        expected: float = 0.0,
    ) -> None:
        """One forward was seen to take `seconds`; expected: by seconds(), if that was asked."""
        expected = expected or self.seconds(num_tokens, num_logits, attended)
        level = self._levels[self._class[num_tokens]]
        ratio = seconds * level.value * self._speed.value / max(expected, 1e-9)
        # First what is the machine's, then what is left for the size: more likely the machine has
        # changed than that size alone.
        self._speed.add(ratio / level.value)
        level.add(ratio / self._speed.value)
        # What is not seen for long follows, so that what was once found too dear is tried again.
        self._num_observed += 1
        self._seen_at[self._class[num_tokens]] = self._num_observed
        for other, seen_at in zip(self._levels, self._seen_at, strict=True):
            if self._num_observed - seen_at > _UNSEEN:
                other.value += _DRIFT * (level.value - other.value)

    def observe_choosing(self, num_emitted: int, seconds: float) -> None:
        if num_emitted:
            self._choosing.add(seconds / num_emitted)

    def table(self) -> list[dict[str, float]]:
        """What is believed now: seconds by size, and how often each size class was seen."""
        return [
            {
                "num_tokens": size,
                "seconds": self.seconds(size, size),
                "level": level.value,
                "num_seen": level.count,
            }
            for size, level in zip(self._sizes, self._levels, strict=True)
        ]

    def _grow(self, num_tokens: int) -> None:
        """Fill the staircases up to num_tokens: never falling, straight lines between the sizes
        that were measured, and beyond the last one with the slope of the largest two."""
        sizes = self._profile.sizes
        whole = _rising([size.all_logits for size in sizes])
        head = _rising([max(0.0, size.all_logits - size.one_logit) for size in sizes])
        head = [min(h, 0.9 * w) for h, w in zip(head, whole, strict=True)]
        for m in range(len(self._all), num_tokens + 65):
            self._all.append(_at(self._sizes, whole, m))
            self._head.append(_at(self._sizes, head, m))
            self._class.append(min(bisect_left(self._sizes, m), len(sizes) - 1))


class DraftCosts:
    """One drafter's propose(), by rows and steps; a step is one more level of guesses."""

    _ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
    _STEPS: Final = (1, 2, 4, 8, 16)

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], RobustMean] = {}
        self._per_catch_up = RobustMean(0.0, _SLOW)

    @property
    def known(self) -> bool:
        return bool(self._cells)

    @property
    def per_catch_up(self) -> float:
        """Seconds per known token that the drafter has to read first."""
        return self._per_catch_up.value

    def seconds(self, num_rows: int, num_steps: int) -> float:
        """A call without catching up. What was never seen follows from the nearest that was."""
        row_class = _class_of(self._ROWS, num_rows)
        step_class = _class_of(self._STEPS, num_steps)
        cell = self._cells.get((row_class, step_class))
        if cell is not None:
            # Within a class costs follow the number of steps, and less than fully that of rows.
            return cell.value * _within(num_steps, self._STEPS[step_class])
        best, distance = 0.0, 99.0
        for (rows, steps), known in self._cells.items():
            far = abs(rows - row_class) + abs(steps - step_class)
            if far < distance:
                distance = far
                shape = _shape(num_rows, num_steps) / _shape(self._ROWS[rows], self._STEPS[steps])
                best = known.value * shape
        return best

    def observe(self, num_rows: int, num_steps: int, num_catch_up: int, seconds: float) -> None:
        """num_catch_up: tokens read beyond the one per row that every call reads.

        A call that reads a prompt tells nothing of the price of a draft, and until that is known
        nothing of the price of reading.
        """
        row_class = _class_of(self._ROWS, num_rows)
        step_class = _class_of(self._STEPS, num_steps)
        if num_catch_up > _READING * num_rows:
            if self._cells:
                rest = max(0.0, seconds - self.seconds(num_rows, num_steps))
                self._per_catch_up.add(rest / num_catch_up)
            return
        cell = self._cells.get((row_class, step_class))
        if cell is None:
            cell = self._cells[row_class, step_class] = RobustMean(0.0, 2 * _SLOW)
        cell.add(seconds / _within(num_steps, self._STEPS[step_class]))

    def table(self) -> list[dict[str, float]]:
        return [
            {
                "num_rows": self._ROWS[rows],
                "num_steps": self._STEPS[steps],
                "seconds": cell.value,
                "num_seen": cell.count,
            }
            for (rows, steps), cell in sorted(self._cells.items())
        ]


def _class_of(bounds: Seq[int], value: int) -> int:
    return min(bisect_left(bounds, value), len(bounds) - 1)


def _shape(num_rows: int, num_steps: int) -> float:
    """How costs go, roughly, where they were not seen: steps count fully, rows partly."""
    return (0.5 + num_steps) * (1.0 + num_rows / 24.0)


def _within(num_steps: int, bound: int) -> float:
    return num_steps / bound if num_steps else 0.5


def _rising(values: Seq[float]) -> list[float]:
    """The smallest staircase that never falls and lies on or above the values."""
    out: list[float] = []
    for value in values:
        out.append(max(value, out[-1]) if out else value)
    return out


def _at(sizes: Seq[int], values: Seq[float], m: int) -> float:
    """A straight line between the two nearest sizes, going on beyond the last."""
    if len(sizes) == 1:
        return values[0]
    right = min(max(bisect_left(sizes, m), 1), len(sizes) - 1)
    left = right - 1
    slope = (values[right] - values[left]) / (sizes[right] - sizes[left])
    if m > sizes[right]:  # beyond the table: not flatter than a line from the first size
        slope = max(slope, (values[-1] - values[0]) / (sizes[-1] - sizes[0]))
    return values[right] + slope * (m - sizes[right])

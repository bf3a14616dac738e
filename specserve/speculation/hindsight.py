"""How much better the choice of B could have been, had one known: regret and calibration.

A recorded step keeps every proposal, not only what was verified, with the survival that was
believed, what the forward was expected to cost with 0, 1, ... guesses, and, once the text is known,
which guesses were right (under `replay` the text does not depend on them, so all can be told).

Regret is measured against the best single policy of two families, chosen afterwards for each class
of steps by number of rows:
    keep(t):  verify what survives with at least t
    first(k): verify the first k guesses of every row
    regret = the share of all time that would have been saved, had each class emitted its tokens at
             the goodput of its best policy
with goodput = sum of tokens / sum of seconds, both by the recorded costs, so that neither the noise
of a clock nor where the text would have stood under another policy plays a part. (One goodput over
all classes would praise guesses for nothing but moving time to where there are many rows.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Final

import msgspec

KEEP: Final = tuple(at / 40 for at in range(41))
FIRST: Final = tuple(range(16))


class RecordedRow(msgspec.Struct, frozen=True, array_like=True):
    """chances: believed survival of each guess; parents: as in Draft; right: whether the guess and
    all before it on its path were; kept: verified in fact; drafter: whose guesses they are; seq,
    position: of the text, and of the first guess in it (-1: files of older versions do not tell)"""

    chances: tuple[float, ...]
    parents: tuple[int, ...]
    right: tuple[bool, ...]
    kept: tuple[bool, ...]
    drafter: str = ""
    seq: int = -1
    position: int = -1


class RecordedStep(msgspec.Struct, frozen=True):
    """ladder: forward seconds by number of guesses; fixed: seconds besides, drafts included;
    per_emitted: seconds per emitted token; named: by requests that named a drafter and K, of which
    nothing was chosen"""

    num_rows: int
    rows: tuple[RecordedRow, ...]
    ladder: tuple[float, ...]
    fixed: float
    per_emitted: float
    named: bool = False


# (row) -> which of its guesses are verified
Policy = Callable[[RecordedRow], Seq[bool]]


def goodput(steps: Iterable[RecordedStep], policy: Policy) -> float:
    tokens, seconds = _sums(steps, policy)
    return tokens / seconds


def as_chosen(row: RecordedRow) -> Seq[bool]:
    return row.kept


def keep(threshold: float) -> Policy:
    return lambda row: [chance >= threshold for chance in row.chances]


def first(count: int) -> Policy:
    return lambda row: [at < count for at in range(len(row.chances))]


class ClassHindsight(msgspec.Struct, frozen=True, kw_only=True):
    """Of the steps whose number of rows has so many bits. Rates are tokens per second.

    best_policy: "survival >= 0.350" or "first 7"
    """

    least_rows: int
    most_rows: int
    num_steps: int
    num_guesses: int  # that were verified
    chosen: float
    without: float  # had no guess been verified, the drafts made all the same
    best: float
    best_policy: str

    @property
    def regret(self) -> float:
        return 1.0 - self.chosen / self.best


class Hindsight(msgspec.Struct, frozen=True, kw_only=True):
    """regret 0.03: three percent of the time could have been saved; below 0: the choice was better
    than any policy of the families"""

    regret: float
    classes: tuple[ClassHindsight, ...]


def look_back(steps: Seq[RecordedStep]) -> Hindsight:
    """At least one step."""
    by_class: dict[int, list[RecordedStep]] = defaultdict(list)
    for step in steps:
        by_class[step.num_rows.bit_length()].append(step)
    classes, taken, needed = [], 0.0, 0.0
    for bits, members in sorted(by_class.items()):
        best, policy = _best_policy(members)
        tokens, seconds = _sums(members, as_chosen)
        taken, needed = taken + seconds, needed + tokens / best
        classes.append(
            ClassHindsight(
                least_rows=1 << (bits - 1),
                most_rows=(1 << bits) - 1,
                num_steps=len(members),
                num_guesses=sum(sum(row.kept) for step in members for row in step.rows),
                chosen=tokens / seconds,
                without=goodput(members, first(0)),
                best=best,
                best_policy=policy,
            )
        )
    return Hindsight(regret=1.0 - needed / taken, classes=tuple(classes))


def _best_policy(steps: Seq[RecordedStep]) -> tuple[float, str]:
    """(goodput, in words)"""
    found = [
        (tokens / seconds, f"survival >= {threshold:.3f}")
        for threshold, (tokens, seconds) in zip(KEEP, _sums_by_threshold(steps), strict=True)
    ]
    found += [(goodput(steps, first(count)), f"first {count}") for count in FIRST]
    return max(found)


def calibration_error(pairs: Iterable[tuple[float, bool]], num_bins: int = 20) -> float:
    """Expected calibration error of (believed chance, outcome): the mean distance between what was
    believed and what happened, over equal bins, weighted by how many fall into each."""
    bins = reliability(pairs, num_bins)
    distance = sum(one.num_guesses * abs(one.believed - one.observed) for one in bins)
    return distance / max(1, sum(one.num_guesses for one in bins))


def calibration_pairs(steps: Iterable[RecordedStep]) -> Iterable[tuple[float, bool]]:
    """Of every proposed guess, whatever was chosen: its survival and whether it survived."""
    for step in steps:
        for row in step.rows:
            yield from zip(row.chances, row.right, strict=True)


class Bin(msgspec.Struct, frozen=True, kw_only=True):
    """Guesses that were believed to survive equally often, on average, and how often they did."""

    num_guesses: int
    believed: float
    observed: float


def reliability(pairs: Iterable[tuple[float, bool]], num_bins: int = 20) -> list[Bin]:
    """The bins of `calibration_error` that are not empty, from hopeless to certain."""
    bins: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    for chance, right in pairs:
        bins[min(int(chance * num_bins), num_bins - 1)].append((chance, right))
    return [
        Bin(
            num_guesses=len(members),
            believed=sum(chance for chance, _ in members) / len(members),
            observed=sum(right for _, right in members) / len(members),
        )
        for _, members in sorted(bins.items())
    ]


def _sums_by_threshold(steps: Iterable[RecordedStep]) -> list[tuple[float, float]]:
    """(tokens, seconds) of keep(t) for every t of KEEP, in one pass over the guesses."""
    tokens, seconds = [0.0] * len(KEEP), [0.0] * len(KEEP)
    for step in steps:
        num_last = [0] * (len(KEEP) + 1)  # guesses by how many thresholds keep them
        num_right = [0] * (len(KEEP) + 1)
        for row in step.rows:
            for chance, right in zip(row.chances, row.right, strict=True):
                passes = bisect_right(KEEP, chance)
                num_last[passes] += 1
                num_right[passes] += right
        num_guesses, emitted = 0, step.num_rows
        for at in range(len(KEEP) - 1, -1, -1):
            num_guesses += num_last[at + 1]
            emitted += num_right[at + 1]
            tokens[at] += emitted
            seconds[at] += step.fixed + step.ladder[num_guesses] + step.per_emitted * emitted
    return list(zip(tokens, seconds, strict=True))


def _sums(steps: Iterable[RecordedStep], policy: Policy) -> tuple[float, float]:
    """(tokens, seconds)"""
    tokens = seconds = 0.0
    for step in steps:
        emitted, num_guesses = step.num_rows, 0
        for row in step.rows:
            kept = policy(row)
            num_guesses += sum(kept)
            # A right guess has right ancestors, and chances fall along a path: all are kept.
            emitted += sum(1 for at, is_kept in enumerate(kept) if is_kept and row.right[at])
        tokens += emitted
        seconds += step.fixed + step.ladder[num_guesses] + step.per_emitted * emitted
    return tokens, seconds

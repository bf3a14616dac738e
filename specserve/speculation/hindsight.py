"""How much better the choice of B could have been, had one known: regret and calibration.

A recorded step keeps every proposal, not only what was verified, with the survival that was
believed, what the forward was expected to cost with 0, 1, ... guesses, and, once the text is known,
which guesses were right (under `replay` the text does not depend on them, so all can be told).

Regret is measured against the best single policy of a family, chosen afterwards on the same steps:
    keep(t): verify what survives with at least t (one t per class of steps by number of rows), or
    first(k): verify the first k guesses of every row
    regret = 1 - (goodput as chosen) / (largest goodput of the family)
with goodput = sum of tokens / sum of seconds, both by the recorded costs, so that neither the noise
of a clock nor where the text would have stood under another policy plays a part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from typing import Final

import msgspec

KEEP: Final = tuple(at / 40 for at in range(41))
FIRST: Final = tuple(range(16))


class RecordedRow(msgspec.Struct, frozen=True, array_like=True):
    """chances: believed survival of each guess; parents: as in Draft; right: whether the guess and
    all before it on its path were; kept: verified in fact"""

    chances: tuple[float, ...]
    parents: tuple[int, ...]
    right: tuple[bool, ...]
    kept: tuple[bool, ...]


class RecordedStep(msgspec.Struct, frozen=True):
    """ladder: forward seconds by number of guesses; fixed: seconds besides, drafts included;
    per_emitted: seconds per emitted token"""

    num_rows: int
    rows: tuple[RecordedRow, ...]
    ladder: tuple[float, ...]
    fixed: float
    per_emitted: float


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


def regret(steps: Seq[RecordedStep]) -> float:
    """0.03: three percent more tokens per second were possible; below 0: the choice was better than
    any policy of the family."""
    chosen = goodput(steps, as_chosen)
    best = max(goodput(steps, first(count)) for count in FIRST)
    by_class: dict[int, list[RecordedStep]] = defaultdict(list)
    for step in steps:
        by_class[step.num_rows.bit_length()].append(step)
    tokens = seconds = 0.0
    for members in by_class.values():
        found = max((_sums(members, keep(threshold)) for threshold in KEEP), key=_ratio)
        tokens, seconds = tokens + found[0], seconds + found[1]
    return 1.0 - chosen / max(best, tokens / seconds)


def calibration_error(pairs: Iterable[tuple[float, bool]], num_bins: int = 20) -> float:
    """Expected calibration error of (believed chance, outcome): the mean distance between what was
    believed and what happened, over equal bins, weighted by how many fall into each."""
    bins: dict[int, list[tuple[float, bool]]] = defaultdict(list)
    num_pairs = 0
    for chance, right in pairs:
        bins[min(int(chance * num_bins), num_bins - 1)].append((chance, right))
        num_pairs += 1
    distance = sum(
        abs(sum(chance for chance, _ in members) - sum(right for _, right in members))
        for members in bins.values()
    )
    return distance / max(1, num_pairs)


def calibration_pairs(steps: Iterable[RecordedStep]) -> Iterable[tuple[float, bool]]:
    """Of every proposed guess, whatever was chosen: its survival and whether it survived."""
    for step in steps:
        for row in step.rows:
            yield from zip(row.chances, row.right, strict=True)


def _ratio(sums: tuple[float, float]) -> float:
    return sums[0] / sums[1]


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

"""Which guesses are worth verifying: the set that emits most tokens per second.

    G = (N + sum of S over the chosen guesses) / (fixed seconds + draft + forward of all tokens
                                                  + seconds per emitted token)

Guesses of all rows in descending chance to survive S; since a parent never survives less often than
its child, what is taken from the front is a set of trees. The whole staircase is looked at: rows
that fill up a tile of the hardware are nearly free, and the next tile may pay again.
(Global admission by survival: TETRIS, DSpark; verification.md section 3.)
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

from specserve.speculation.costs import DraftCosts

HOPELESS = 0.01  # a guess that survives less often is not looked at


class Race(NamedTuple):
    """num_chosen: guesses taken from the front; goodput: tokens per second

    emitted: expected tokens; seconds: of the step
    """

    num_chosen: int
    goodput: float
    emitted: float
    seconds: float


def race(
    chances: Seq[float],
    ladder: Seq[float],
    *,
    num_rows: float,
    fixed: float,
    per_emitted: float,
    limit: float = 0.0,
) -> Race:
    """How many of the guesses, in descending chance, to verify.

    ladder:      forward seconds with 0, 1, ... of them
    num_rows:    N, rows that emit a token anyway (and what is expected of guesses already chosen)
    fixed:       seconds that the step takes whatever is chosen
    per_emitted: seconds per emitted token
    limit:       a step longer than this is chosen only without guesses; 0: none
    """
    emitted = num_rows
    seconds = fixed + ladder[0] + per_emitted * emitted
    best = (0, emitted / seconds, emitted, seconds)
    goodput, num_left = best[1], len(chances)
    for count, chance in enumerate(chances, start=1):
        emitted += chance
        seconds = fixed + ladder[count] + per_emitted * emitted
        if emitted > goodput * seconds and not 0 < limit < seconds:
            goodput = emitted / seconds
            best = (count, goodput, emitted, seconds)
        elif emitted + (num_left - count) * chance < goodput * seconds:
            break  # all that is left, each as good as this one, would not make up for it
    return Race(*best)


def net_share(won: Race, without: Race) -> float:
    """What is left of the tokens that guesses bring once verifying them is paid for: 0 to 1."""
    accepted = won.emitted - without.emitted
    if accepted <= 0:
        return 0.0
    lost = (won.seconds - without.seconds) * without.goodput
    return max(0.0, 1.0 - lost / accepted)


class Candidate(NamedTuple):
    """A guess that could be had: `depth` 0 stands for one that is there already."""

    chance: float
    row: int
    depth: int


def by_chance(candidate: Candidate) -> tuple[float, int]:
    """Sorts the likeliest first, a parent before its child."""
    return (-candidate.chance, candidate.depth)


def race_with_calls(
    candidates: Seq[Candidate],
    ladder: Seq[float],
    costs: DraftCosts,
    *,
    num_rows: float,
    fixed: float,
    per_emitted: float,
    catch_up: Seq[float],
    limit: float = 0.0,
) -> Race:
    """The same, where guesses of depth > 0 cost a drafter's call: more rows, more steps, dearer.

    candidates: by descending chance
    catch_up:   per row, seconds to make the drafter know its text first
    """
    emitted, seconds = num_rows, fixed + ladder[0] + per_emitted * num_rows
    best = (0, emitted / seconds, emitted, seconds)
    rows, steps, call, reading = 0, 0, 0.0, 0.0
    for count, candidate in enumerate(candidates, start=1):
        emitted += candidate.chance
        if candidate.depth:
            if candidate.depth == 1:
                rows += 1
                reading += catch_up[candidate.row]
            if candidate.depth == 1 or candidate.depth > steps:
                steps = max(steps, candidate.depth)
                call = costs.seconds(rows, steps)
        seconds = fixed + ladder[count] + per_emitted * emitted + call + reading
        if emitted > best[1] * seconds and not 0 < limit < seconds:
            best = (count, emitted / seconds, emitted, seconds)
    return Race(*best)

"""Acceptance of some requests, every number with its interval.

By position i (1 is the first guess of a step):
    marginal      accepted at i / drafted at i: of all guesses made there, how many held
    conditional   accepted at i / at risk at i: of those whose predecessors all held
At risk needs each step's own counts (`speculation.detailed`); without them conditional rates are
unknown, not guessed. Positions count along a chain: a tree's steps have more guesses than levels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from specserve_loadgen.acceptance import target_steps
from specserve_loadgen.intervals import Interval, mean_interval, ratio_interval
from specserve_loadgen.records import RequestRecord
from specserve_loadgen.stats import add_by_position
from specserve_loadgen.wire import SpeculativeDecoding

CONTEXT_BOUNDS: Final = (0, 64, 128, 256, 512, 1024, 2048, 4096)


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """One place of a draft, counted from 1."""

    position: int
    num_drafted: int
    num_at_risk: int | None  # drafted there, all guesses before it accepted
    num_accepted: int
    marginal: Interval | None
    conditional: Interval | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Over the succeeded requests of one group. None: nothing was drafted, or nothing is told."""

    num_requests: int
    num_output_tokens: int
    num_steps: int
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    acceptance_rate: Interval | None
    acceptance_rate_per_request: Interval | None
    mean_acceptance_length: Interval | None  # pooled, the extra token included
    mean_acceptance_length_per_request: Interval | None
    tokens_per_step: Interval | None  # all target steps, those without drafts too
    positions: tuple[Position, ...]
    runs: tuple[int, ...]  # steps with drafts that accepted 0, 1, 2, ... guesses
    run_shares: tuple[Interval | None, ...]

    @property
    def num_wasted_draft_tokens(self) -> int:
        return self.num_draft_tokens - self.num_accepted_draft_tokens


def summarise(records: Sequence[RequestRecord]) -> Summary:
    done = [r for r in records if r.succeeded]
    spec = [r.speculative for r in done if r.speculative is not None]
    drafted = [s for s in spec if s.num_spec_steps]
    runs = add_by_position(s.acceptance_histogram for s in spec)
    steps = [s.num_spec_steps for s in drafted]
    return Summary(
        num_requests=len(done),
        num_output_tokens=sum(r.num_output_tokens for r in done),
        num_steps=sum(target_steps(r) for r in done),
        num_spec_steps=sum(steps),
        num_draft_tokens=sum(s.num_draft_tokens for s in spec),
        num_accepted_draft_tokens=sum(s.num_accepted_draft_tokens for s in spec),
        acceptance_rate=ratio_interval(
            [s.num_accepted_draft_tokens for s in drafted],
            [s.num_draft_tokens for s in drafted],
            is_share=True,
        ),
        acceptance_rate_per_request=mean_interval(
            [s.num_accepted_draft_tokens / s.num_draft_tokens for s in drafted], is_share=True
        ),
        mean_acceptance_length=ratio_interval([s.num_emitted_tokens for s in drafted], steps),
        mean_acceptance_length_per_request=mean_interval(
            [s.num_emitted_tokens / s.num_spec_steps for s in drafted]
        ),
        tokens_per_step=ratio_interval(
            [r.num_output_tokens for r in done], [target_steps(r) for r in done]
        ),
        positions=_positions(done),
        runs=runs,
        run_shares=tuple(
            ratio_interval([_at(s.acceptance_histogram, j) for s in drafted], steps, is_share=True)
            for j in range(len(runs))
        ),
    )


def by_context(records: Sequence[RequestRecord]) -> list[tuple[str, Summary]]:
    """By tokens of the prompt; the bounds are powers of two, and empty classes are left out."""
    bounds = [*CONTEXT_BOUNDS, 1 << 30]
    groups = []
    for low, high in itertools.pairwise(bounds):
        alike = [r for r in records if low <= (r.num_prompt_tokens or -1) < high]
        if alike:
            label = f"{low}-{high - 1}" if high < bounds[-1] else f"{low} and more"
            groups.append((label, summarise(alike)))
    return groups


def by_category(records: Sequence[RequestRecord]) -> list[tuple[str, Summary]]:
    """In order of appearance."""
    names = dict.fromkeys(r.category for r in records)
    return [(name, summarise([r for r in records if r.category == name])) for name in names]


def num_at_risk(spec: SpeculativeDecoding) -> list[int] | None:
    """[K] steps that made a guess at each position and accepted all before it; None: not told."""
    return _per_step(spec, lambda drafted, accepted, at: drafted > at and accepted >= at)


def _drafted_at(spec: SpeculativeDecoding) -> list[int] | None:
    return _per_step(spec, lambda drafted, accepted, at: drafted > at)


def _accepted_at(spec: SpeculativeDecoding) -> list[int] | None:
    return _per_step(spec, lambda drafted, accepted, at: accepted > at)


def _per_step(
    spec: SpeculativeDecoding, holds: Callable[[int, int, int], bool]
) -> list[int] | None:
    drafted, accepted = spec.per_step_drafted, spec.per_step_accepted
    if drafted is None or accepted is None:
        return None
    pairs = list(zip(drafted, accepted, strict=False))
    return [sum(holds(d, a, at) for d, a in pairs) for at in range(max(drafted, default=0))]


def _positions(records: Sequence[RequestRecord]) -> tuple[Position, ...]:
    """A request whose steps are not told still counts for the marginal rates, if it sums them."""
    drafted, accepted, at_risk = list[Sequence[int]](), list[Sequence[int]](), list[Sequence[int]]()
    all_told = True
    for record in records:
        spec, own = record.speculative, record.specserve
        if spec is None or not spec.num_spec_steps:
            continue
        told = num_at_risk(spec)
        if told is not None:
            drafted.append(_drafted_at(spec) or ())
            accepted.append(_accepted_at(spec) or ())
            at_risk.append(told)
        elif own is not None:
            all_told = False
            drafted.append(own.drafted_per_position)
            accepted.append(own.accepted_per_position)
    num_positions = max((len(row) for row in drafted), default=0)
    return tuple(
        _position(
            at,
            [_at(row, at) for row in drafted],
            [_at(row, at) for row in accepted],
            [_at(row, at) for row in at_risk] if all_told else None,
        )
        for at in range(num_positions)
    )


def _position(
    at: int, drafted: Sequence[int], accepted: Sequence[int], at_risk: Sequence[int] | None
) -> Position:
    return Position(
        position=at + 1,
        num_drafted=sum(drafted),
        num_at_risk=None if at_risk is None else sum(at_risk),
        num_accepted=sum(accepted),
        marginal=ratio_interval(accepted, drafted, is_share=True),
        conditional=None if at_risk is None else ratio_interval(accepted, at_risk, is_share=True),
    )


def _at(row: Sequence[int], place: int) -> int:
    return row[place] if place < len(row) else 0

"""What speculation gave, from each reply's own metrics. Other traffic cannot blur these numbers.

acceptance rate         accepted / drafted
mean acceptance length  tokens emitted per target step with drafts, the extra token included,
                        after stop trimming
Each pooled (token-weighted: long replies weigh more) and averaged over requests (each weighs 1).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

import msgspec

from specserve_loadgen.records import RequestRecord
from specserve_loadgen.stats import add_by_position, mean, ratio
from specserve_loadgen.wire import SpeculativeDecoding


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """Sums and ratios over the succeeded requests whose reply carries metrics."""

    num_requests: int  # whose reply carries metrics
    num_drafted_requests: int  # of those, with at least one step with drafts
    drafters: dict[str, int]  # requests that used each
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_spec_emitted_tokens: int  # tokens that the steps with drafts emitted
    acceptance_rate: float | None
    acceptance_rate_per_request: float | None
    mean_acceptance_length: float | None
    mean_acceptance_length_per_request: float | None
    acceptance_histogram: tuple[int, ...]  # [K+1] steps that accepted j guesses
    drafted_per_position: tuple[int, ...]  # [K]
    accepted_per_position: tuple[int, ...]  # [K]
    acceptance_rate_per_position: tuple[float | None, ...]  # [K] accepted / drafted there
    num_output_tokens: int
    num_steps: int  # target steps that emitted a token, with or without drafts
    tokens_per_step: float | None
    num_steps_avoided: int  # output tokens - steps: what decoding one by one would have cost more


def acceptance(records: Iterable[RequestRecord]) -> Acceptance:
    """Pool the metrics of the succeeded ones among `records`."""
    known = [
        r for r in records if r.succeeded and (r.speculative is not None or r.specserve is not None)
    ]
    spec = [r.speculative for r in known if r.speculative is not None]
    drafted = [s for s in spec if s.num_spec_steps]
    own = [r.specserve for r in known if r.specserve is not None]
    # Each list ends at its last position that is not 0, so the one of accepted may be shorter.
    drafted_at = add_by_position(s.drafted_per_position for s in own)
    accepted_at = add_by_position([[0] * len(drafted_at), *(s.accepted_per_position for s in own)])
    num_spec_steps = sum(s.num_spec_steps for s in spec)
    num_draft_tokens = sum(s.num_draft_tokens for s in spec)
    num_accepted = sum(s.num_accepted_draft_tokens for s in spec)
    num_emitted = sum(s.num_emitted_tokens for s in drafted)
    num_output_tokens = sum(r.num_output_tokens for r in known)
    num_steps = sum(target_steps(r) for r in known)
    drafters: dict[str, int] = {}
    for metrics in own:
        for name in metrics.drafters:
            drafters[name] = drafters.get(name, 0) + 1
    return Acceptance(
        num_requests=len(known),
        num_drafted_requests=len(drafted),
        drafters=drafters,
        num_spec_steps=num_spec_steps,
        num_draft_tokens=num_draft_tokens,
        num_accepted_draft_tokens=num_accepted,
        num_spec_emitted_tokens=num_emitted,
        acceptance_rate=ratio(num_accepted, num_draft_tokens),
        acceptance_rate_per_request=mean(
            s.num_accepted_draft_tokens / s.num_draft_tokens for s in spec if s.num_draft_tokens
        ),
        mean_acceptance_length=ratio(num_emitted, num_spec_steps),
        mean_acceptance_length_per_request=mean(
            s.num_emitted_tokens / s.num_spec_steps for s in drafted
        ),
        acceptance_histogram=add_by_position(s.acceptance_histogram for s in spec),
        drafted_per_position=drafted_at,
        accepted_per_position=accepted_at,
        acceptance_rate_per_position=tuple(
            ratio(a, d) for a, d in zip_longest(accepted_at, drafted_at, fillvalue=0)
        ),
        num_output_tokens=num_output_tokens,
        num_steps=num_steps,
        tokens_per_step=ratio(num_output_tokens, num_steps),
        num_steps_avoided=num_output_tokens - num_steps,
    )


def target_steps(record: RequestRecord) -> int:
    """Target steps that emitted a token, as reported, or derived for servers that do not say.

    A step without drafts emits exactly one token, so the tokens that no step with drafts emitted
    count the other steps.
    """
    if record.specserve is not None:
        return record.specserve.steps
    spec = record.speculative
    if spec is None:
        return record.num_output_tokens
    return record.num_output_tokens - spec.num_emitted_tokens + spec.num_spec_steps


def contradictions(record: RequestRecord) -> list[str]:
    """What in one reply's metrics cannot be true together, in words; [] when they are sound."""
    found = []
    if record.malformed_metrics is not None:
        found.append(f"metrics have another shape: {record.malformed_metrics}")
    spec, own = record.speculative, record.specserve
    if spec is not None:
        found += _spec_contradictions(spec)
    if spec is not None and own is not None:
        if sum(own.drafted_per_position) != spec.num_draft_tokens:
            found.append("drafted_per_position does not sum to num_draft_tokens")
        if sum(own.accepted_per_position) != spec.num_accepted_draft_tokens:
            found.append("accepted_per_position does not sum to num_accepted_draft_tokens")
        if own.steps < spec.num_spec_steps:
            found.append("steps is less than num_spec_steps")
    if own is not None and any(
        accepted > drafted
        for accepted, drafted in zip_longest(
            own.accepted_per_position, own.drafted_per_position, fillvalue=0
        )
    ):
        found.append("more accepted than drafted at a position")
    return found


def _spec_contradictions(spec: SpeculativeDecoding) -> list[str]:
    """The identities that aiperf demands of the same object, and the length's bounds."""
    steps, accepted = spec.num_spec_steps, spec.num_accepted_draft_tokens
    histogram = spec.acceptance_histogram
    checks = [
        (accepted <= spec.num_draft_tokens, "more accepted than drafted"),
        # A step may lose its extra token, and nothing else, to a stop inside the accepted run.
        (
            accepted <= spec.num_emitted_tokens <= accepted + steps,
            "mean_acceptance_length is outside accepted/steps .. 1 + accepted/steps",
        ),
    ]
    if histogram:
        runs = sum(length * count for length, count in enumerate(histogram))
        checks += [
            (sum(histogram) == steps, "acceptance_histogram does not sum to num_spec_steps"),
            (runs == accepted, "acceptance_histogram does not add up to the accepted tokens"),
            (
                len(histogram) == spec.num_spec_tokens + 1,
                "acceptance_histogram has not num_spec_tokens + 1 places",
            ),
        ]
    return [message for holds, message in checks if not holds]

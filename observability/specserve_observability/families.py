"""Every metric by its name outside, `specserve_*`: what it is called, means and holds.

Names have underscores: a scraper that negotiates OpenMetrics may rewrite colons, and every query
then comes back empty. A family's name ends in its unit; `_total`, `_bucket` and the like are added
when it is written (exposition.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, Literal, NamedTuple

from .histogram import Exemplar, Histogram
from .metrics import Gauges, Metrics, RequestCounters

Kind = Literal["gauge", "counter", "histogram"]


# A line: all that stands before its value, the value, its exemplar. A plain tuple, since thousands
# are made while the event loop waits; all heads are the same in the next scrape, and kept.
Sample = tuple[str, float, Exemplar | None]
_KEPT_HEADS: Final = 16384  # lines


class Family(NamedTuple):
    name: str
    kind: Kind
    meaning: str
    samples: Sequence[Sample]


Pick = Callable[[RequestCounters], Histogram]
# Histograms of ended sequences: name, meaning, where it is kept.
_OF_REQUESTS: Final[tuple[tuple[str, str, Pick], ...]] = (
    (
        "time_to_first_token_seconds",
        "Arrival in the engine (after tokenization) to first token, seconds.",
        lambda own: own.time_to_first_token,
    ),
    (
        "inter_token_latency_seconds",
        "Time per token after the first (a step's time shared by its tokens), seconds.",
        lambda own: own.inter_token_latency,
    ),
    (
        "inter_chunk_latency_seconds",
        "Time between two bursts of tokens of one sequence, seconds.",
        lambda own: own.inter_chunk_latency,
    ),
    (
        "time_per_output_token_seconds",
        "Mean time per token after the first, one value per sequence, seconds.",
        lambda own: own.time_per_output_token,
    ),
    (
        "request_duration_seconds",
        "Arrival in the engine to end, seconds.",
        lambda own: own.request_duration,
    ),
    (
        "queue_seconds",
        "Time a sequence waited, all its stays together, seconds.",
        lambda own: own.queue,
    ),
    (
        "prefill_seconds",
        "From first scheduled to first token, seconds.",
        lambda own: own.prefill,
    ),
    (
        "decode_seconds",
        "From first token to end, seconds.",
        lambda own: own.decode,
    ),
    (
        "inference_seconds",
        "From first scheduled to end, of sequences that got a token, seconds.",
        lambda own: own.inference,
    ),
    (
        "request_prompt_tokens",
        "Prompt length of ended sequences.",
        lambda own: own.prompt_tokens,
    ),
    (
        "request_output_tokens",
        "Tokens emitted by ended sequences.",
        lambda own: own.output_tokens,
    ),
    (
        "request_acceptance_ratio",
        "Guesses kept per guess verified, one value per ended sequence that had guesses.",
        lambda own: own.acceptance_ratio,
    ),
)


def families(metrics: Metrics, gauges: Gauges) -> Iterator[Family]:
    yield from _gauges(metrics, gauges)
    yield from _counters(metrics)
    yield from _http(metrics)
    yield from _speculation(metrics)
    yield from _requests(metrics)
    yield from _steps(metrics)


def labels_of(**labels: str) -> str:
    return ",".join(f'{key}="{_escape(value)}"' for key, value in labels.items())


def gauge(name: str, meaning: str, by_labels: Mapping[str, float]) -> Family:
    """by_labels: values by what labels_of() says; one without labels has the key ''"""
    samples = [(_head(name, key), value, None) for key, value in by_labels.items()]
    return Family(name, "gauge", meaning, samples)


def counter(name: str, meaning: str, by_labels: Mapping[str, float]) -> Family:
    """name: without _total"""
    samples = [(_head(name + "_total", key), value, None) for key, value in by_labels.items()]
    return Family(name, "counter", meaning, samples)


def histogram(name: str, meaning: str, by_labels: Mapping[str, Histogram]) -> Family:
    samples: list[Sample] = []
    for key, own in by_labels.items():
        *buckets, of_sum, of_count = _histogram_heads(name, key, own.bounds)
        cumulative = list(accumulate(own.counts))
        samples += zip(buckets, cumulative, own.exemplars, strict=True)
        samples += ((of_sum, own.total, None), (of_count, cumulative[-1], None))
    return Family(name, "histogram", meaning, samples)


# ---- what there is -----------------------------------------------------------------------


def _gauges(metrics: Metrics, gauges: Gauges) -> Iterator[Family]:
    yield gauge(
        "specserve_engine_up",
        "1 while the engine's loop runs, 0 after it failed.",
        {"": int(gauges.engine_up)},
    )
    yield gauge(
        "specserve_requests_running",
        "Sequences admitted to the batch.",
        {"": gauges.num_running},
    )
    yield gauge(
        "specserve_requests_waiting",
        "Sequences queued, by what they wait for; preempted ones until their longest form fits.",
        {labels_of(reason=reason): count for reason, count in gauges.waiting.items()},
    )
    blocks = {
        "free": gauges.blocks_free,
        "cached": gauges.blocks_cached,
        "live": gauges.blocks_live,
    }
    yield gauge(
        "specserve_kv_blocks",
        "KV blocks by state; the sum is the pool.",
        {labels_of(state=state): count for state, count in blocks.items()},
    )
    yield gauge(
        "specserve_net_gain_ratio",
        "Estimated speed-up by speculation, last minute of decoding; below 1 it costs time.",
        {"": metrics.net_gain.ratio},
    )


def _counters(metrics: Metrics) -> Iterator[Family]:
    plain: tuple[tuple[str, str, float], ...] = (
        (
            "generated_tokens",
            "Tokens emitted, after stop trimming.",
            metrics.num_generated_tokens,
        ),
        (
            "preemptions",
            "Sequences that gave their KV blocks back before they ended.",
            metrics.num_preemptions,
        ),
        ("steps", "Scheduling steps committed.", metrics.num_steps),
        (
            "decode_step_seconds",
            "Time of steps without a prompt in them.",
            metrics.net_gain.seconds,
        ),
        (
            "decode_step_plain_seconds",
            "The same, as estimated for the same tokens without speculation.",
            metrics.net_gain.plain_seconds,
        ),
        (
            "spans_dropped",
            "Trace spans lost because the exporter was slow, down or full.",
            metrics.num_spans_dropped,
        ),
        (
            "step_records_dropped",
            "Records that span building never saw; metrics counted them.",
            metrics.num_records_dropped,
        ),
        (
            "step_spans_sampled_out",
            "Ordinary steps left out of traces to keep to the rate.",
            metrics.num_step_spans_sampled_out,
        ),
    )
    for stem, meaning, value in plain:
        yield counter(f"specserve_{stem}", meaning, {"": value})


def _http(metrics: Metrics) -> Iterator[Family]:
    yield counter(
        "specserve_http_requests",
        "HTTP requests answered, by route as documented and status; 499: the client left.",
        {
            labels_of(route=route, code=code): count
            for route, counts in metrics.http.by_route.items()
            for code, count in counts.items()
        },
    )


def _speculation(metrics: Metrics) -> Iterator[Family]:
    """By drafter. acceptance rate = accepted / draft; mean acceptance length = emitted / steps;
    conditional acceptance at i = accepted_at(i) / drafted_at(i)."""
    spec = {labels_of(drafter=name): own for name, own in metrics.spec.items()}
    sums = (
        ("steps", "Rows whose step had guesses.", {k: c.num_steps for k, c in spec.items()}),
        ("draft_tokens", "Guesses verified.", {k: c.num_drafted for k, c in spec.items()}),
        ("accepted_tokens", "Guesses kept.", {k: c.num_accepted for k, c in spec.items()}),
        (
            "wasted_tokens",
            "Guesses verified and not kept.",
            {k: c.num_wasted for k, c in spec.items()},
        ),
        (
            "emitted_tokens",
            "Tokens emitted by rows with guesses, the extra one included.",
            {k: c.num_emitted for k, c in spec.items()},
        ),
        (
            "predicted_accepted_tokens",
            "Guesses that the controller expected to be right, before stop trimming.",
            {k: c.predicted_accepted for k, c in spec.items()},
        ),
        (
            "drafted_at_position",
            "Rows that had a guess at this position (0 is the first).",
            _by_position({k: c.rows_by_drafted for k, c in spec.items()}),
        ),
        (
            "accepted_at_position",
            "Rows whose guess at this position was kept.",
            _by_position({k: c.rows_by_accepted for k, c in spec.items()}),
        ),
    )
    for stem, meaning, by_labels in sums:
        yield counter(f"specserve_spec_{stem}", meaning, by_labels)
    yield counter(
        "specserve_drafter_failures",
        "Drafters that raised or returned nonsense, and sat out for a while.",
        {k: c.num_failures for k, c in spec.items()},
    )
    yield histogram(
        "specserve_spec_emitted_per_step",
        "Tokens emitted by a row with guesses, the extra one included.",
        {k: c.emitted for k, c in spec.items()},
    )
    yield histogram(
        "specserve_row_draft_tokens",
        "K as it was: guesses verified per row that extends a text, rows without any included.",
        {"": metrics.row_draft_tokens},
    )


def _requests(metrics: Metrics) -> Iterator[Family]:
    """By traffic class."""
    classes = {labels_of(traffic_class=name): own for name, own in metrics.requests.items()}
    yield counter(
        "specserve_requests_finished",
        "Sequences ended, by finish reason.",
        {
            f"{labels_of(reason=reason)},{key}": count
            for key, own in classes.items()
            for reason, count in own.num_finished.items()
        },
    )
    yield counter(
        "specserve_prompt_tokens",
        "Prompt tokens of ended sequences; n sequences of one prompt count it n times.",
        {key: own.num_prompt_tokens for key, own in classes.items()},
    )
    yield counter(
        "specserve_prefix_cached_tokens",
        "Prompt tokens of ended sequences found in the prefix cache.",
        {key: own.num_cached_tokens for key, own in classes.items()},
    )
    for stem, meaning, pick in _OF_REQUESTS:
        by_labels = {key: pick(own) for key, own in classes.items()}
        yield histogram(f"specserve_{stem}", meaning, by_labels)


def _steps(metrics: Metrics) -> Iterator[Family]:
    yield histogram(
        "specserve_step_phase_seconds",
        "Time of one phase of a step, seconds: plan and commit are the host's, draft the "
        "guessers', target_forward and verify the target's.",
        {labels_of(phase=phase): own for phase, own in metrics.phases.items()},
    )
    yield histogram("specserve_step_rows", "Sequences in one step.", {"": metrics.step_rows})


# ---- inside ------------------------------------------------------------------------------


def _by_position(rows_by_count: Mapping[str, list[int]]) -> dict[str, float]:
    """rows_by_count: per drafter [K+1] rows by their number of guesses -> rows with more than i."""
    found: dict[str, float] = {}
    for key, rows in rows_by_count.items():
        at_least = list(accumulate(reversed(rows)))  # at_least[j]: rows with >= K - j
        for position, count in enumerate(reversed(at_least[:-1])):
            found[f"{key},{labels_of(position=str(position))}"] = count
    return found


@lru_cache(_KEPT_HEADS)
def _head(name: str, labels: str) -> str:
    return f"{name}{{{labels}}} " if labels else f"{name} "


@lru_cache(_KEPT_HEADS // 16)
def _histogram_heads(name: str, labels: str, bounds: tuple[float, ...]) -> tuple[str, ...]:
    """Of its buckets, its sum and its count."""
    prefix = labels + "," if labels else ""
    # As floats: OpenMetrics wants 1.0, and both formats must name one series.
    ends = [repr(float(bound)) for bound in bounds] + ["+Inf"]
    buckets = (_head(f"{name}_bucket", f'{prefix}le="{end}"') for end in ends)
    return (*buckets, _head(f"{name}_sum", labels), _head(f"{name}_count", labels))


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

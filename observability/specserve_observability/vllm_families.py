"""The same counters under vLLM's names, for dashboards, gateways and load generators made for it.

Written on text/plain only (exposition.py). vLLM spells its names with colons and its labels
`engine` and `model_name`; drafters and traffic classes, which it does not know, are added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from .families import Family, Pick, counter, gauge, histogram, labels_of
from .histogram import Histogram
from .metrics import Gauges, Metrics, RequestCounters, SpecCounters

# As families.py has them; time_per_output_token is inter_token_latency's older name.
_OF_REQUESTS: Final[tuple[tuple[str, str, Pick], ...]] = (
    (
        "time_to_first_token_seconds",
        "specserve_time_to_first_token_seconds.",
        lambda own: own.time_to_first_token,
    ),
    (
        "inter_token_latency_seconds",
        "specserve_inter_token_latency_seconds.",
        lambda own: own.inter_token_latency,
    ),
    (
        "time_per_output_token_seconds",
        "specserve_inter_token_latency_seconds.",
        lambda own: own.inter_token_latency,
    ),
    (
        "request_time_per_output_token_seconds",
        "specserve_time_per_output_token_seconds.",
        lambda own: own.time_per_output_token,
    ),
    (
        "e2e_request_latency_seconds",
        "specserve_request_duration_seconds.",
        lambda own: own.request_duration,
    ),
    ("request_queue_time_seconds", "specserve_queue_seconds.", lambda own: own.queue),
    ("request_prefill_time_seconds", "specserve_prefill_seconds.", lambda own: own.prefill),
    ("request_decode_time_seconds", "specserve_decode_seconds.", lambda own: own.decode),
    ("request_prompt_tokens", "specserve_request_prompt_tokens.", lambda own: own.prompt_tokens),
    (
        "request_generation_tokens",
        "specserve_request_output_tokens.",
        lambda own: own.output_tokens,
    ),
    ("request_inference_time_seconds", "specserve_inference_seconds.", lambda own: own.inference),
    (
        "request_max_num_generation_tokens",
        "specserve_request_output_tokens: each sequence is its own group.",
        lambda own: own.output_tokens,
    ),
)


class VllmNames(msgspec.Struct, frozen=True):
    """What vLLM's labels say of this server."""

    model_name: str
    block_size: int


def vllm_families(metrics: Metrics, gauges: Gauges, names: VllmNames) -> Iterator[Family]:
    base = labels_of(engine="0", model_name=names.model_name)
    used = gauges.blocks_live / gauges.blocks_total if gauges.blocks_total else 0.0
    for stem, meaning, value in (
        ("num_requests_running", "specserve_requests_running.", gauges.num_running),
        ("num_requests_waiting", "specserve_requests_waiting, any reason.", gauges.num_waiting),
        ("kv_cache_usage_perc", "Live KV blocks over all, 0 to 1.", used),
        ("gpu_cache_usage_perc", "The same by its older name.", used),
    ):
        yield gauge(f"vllm:{stem}", meaning, {base: value})
    reasons = {"capacity": gauges.num_waiting, "deferred": 0}
    yield gauge(
        "vllm:num_requests_waiting_by_reason",
        "All of specserve_requests_waiting wait for capacity.",
        {f"{labels_of(reason=reason)},{base}": count for reason, count in reasons.items()},
    )
    sizes = labels_of(
        block_size=str(names.block_size), num_gpu_blocks=str(gauges.blocks_total), engine="0"
    )
    yield gauge("vllm:cache_config_info", "The KV pool's sizes, as labels.", {sizes: 1})
    classes = list(metrics.requests.values())
    yield from _counters(metrics, classes, base)
    yield from _speculation(list(metrics.spec.values()), base)
    yield from _histograms(classes, base)


def _counters(metrics: Metrics, classes: Sequence[RequestCounters], base: str) -> Iterator[Family]:
    num_prompt = sum(own.num_prompt_tokens for own in classes)
    for stem, meaning, value in (
        ("prompt_tokens", "specserve_prompt_tokens_total.", num_prompt),
        (
            "generation_tokens",
            "specserve_generated_tokens_total.",
            metrics.num_generated_tokens,
        ),
        ("prefix_cache_queries", "specserve_prompt_tokens_total.", num_prompt),
        (
            "prefix_cache_hits",
            "specserve_prefix_cached_tokens_total.",
            sum(own.num_cached_tokens for own in classes),
        ),
        (
            "prompt_tokens_cached",
            "specserve_prefix_cached_tokens_total.",
            sum(own.num_cached_tokens for own in classes),
        ),
        ("num_preemptions", "specserve_preemptions_total.", metrics.num_preemptions),
    ):
        yield counter(f"vllm:{stem}", meaning, {base: value})
    finished = {
        f"{labels_of(finished_reason=reason)},{base}": sum(
            own.num_finished[reason] for own in classes
        )
        for reason in classes[0].num_finished
    }
    yield counter("vllm:request_success", "specserve_requests_finished_total.", finished)


def _speculation(drafters: Sequence[SpecCounters], base: str) -> Iterator[Family]:
    for stem, meaning, value in (
        ("drafts", "specserve_spec_steps_total.", sum(own.num_steps for own in drafters)),
        (
            "draft_tokens",
            "specserve_spec_draft_tokens_total.",
            sum(own.num_drafted for own in drafters),
        ),
        (
            "accepted_tokens",
            "specserve_spec_accepted_tokens_total.",
            sum(own.num_accepted for own in drafters),
        ),
    ):
        yield counter(f"vllm:spec_decode_num_{stem}", meaning, {base: value})
    by_count = [sum(rows) for rows in zip(*(own.rows_by_accepted for own in drafters), strict=True)]
    yield counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "specserve_spec_accepted_at_position_total.",
        {
            f"{base},{labels_of(position=str(position))}": sum(by_count[position + 1 :])
            for position in range(len(by_count) - 1)
        },
    )


def _histograms(classes: Sequence[RequestCounters], base: str) -> Iterator[Family]:
    for stem, meaning, pick in _OF_REQUESTS:
        yield histogram(f"vllm:{stem}", meaning, {base: _added([pick(own) for own in classes])})


def _added(parts: Sequence[Histogram]) -> Histogram:
    """One histogram of all their values; the parts have the same bounds."""
    added = Histogram(parts[0].bounds)
    added.counts = [sum(counts) for counts in zip(*(part.counts for part in parts), strict=True)]
    added.total = sum(part.total for part in parts)
    return added

"""A RequestRecord -> the spans of one request: queue, prefill, decode."""

from __future__ import annotations

from collections.abc import Iterator

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link, SpanContext
from opentelemetry.util.types import AttributeValue

from . import names
from .context import child_context, parse_traceparent, root_context
from .records import RequestRecord
from .spans import Attributes, DecodeLinks, LinkBook, SpanFactory, status_of


class RequestSpans:
    """A RequestRecord -> queue, prefill and decode spans under the request's own span."""

    def __init__(self, factory: SpanFactory, book: LinkBook) -> None:
        self._factory = factory
        self._book = book

    def build(self, request: RequestRecord) -> Iterator[ReadableSpan]:
        links = self._book.take(int(request.decode_span_id, 16))
        if request.traceparent is None:
            parent = root_context()
            yield self._root(request, parent)
        else:
            parsed = parse_traceparent(request.traceparent)
            if parsed is None or not parsed.trace_flags.sampled:
                return  # its sender said not to record it
            parent = parsed
        identity = {names.REQUEST_ID: request.request_id}
        for stay in request.queue:
            attributes: Attributes = {**identity, names.QUEUE_REASON: stay.reason}
            yield self._factory.child(names.QUEUE, parent, stay.start, stay.end, attributes)
        for chunk_idx, chunk in enumerate(request.prefill):
            attributes = {
                **identity,
                names.PREFILL_CHUNK: chunk_idx,
                names.PREFILL_TOKENS: chunk.num_tokens,
                names.PREFILL_CACHED_TOKENS: request.num_cached_tokens if chunk_idx == 0 else 0,
            }
            yield self._factory.child(names.PREFILL, parent, chunk.start, chunk.end, attributes)
        yield self._decode(request, parent, links)

    def _root(self, request: RequestRecord, context: SpanContext) -> ReadableSpan:
        attributes = {
            names.REQUEST_ID: request.request_id,
            names.GEN_AI_PROVIDER: "specserve",
            names.GEN_AI_REQUEST_MODEL: request.model,
        }
        return self._factory.span(
            names.REQUEST,
            context,
            None,
            request.arrival,
            request.finished,
            attributes,
            status=status_of(request.error),
        )

    def _decode(
        self, request: RequestRecord, parent: SpanContext, links: DecodeLinks
    ) -> ReadableSpan:
        """Always built, even for a request aborted in the queue: steps may link to it."""
        context = child_context(parent, span_id=int(request.decode_span_id, 16))
        start = request.finished if request.first_token is None else request.first_token
        attributes = _decode_attributes(request)
        if links.num_dropped:
            attributes[names.DECODE_LINKS_DROPPED] = links.num_dropped
        return self._factory.span(
            names.DECODE,
            context,
            parent,
            start,
            request.finished,
            attributes,
            links=[Link(other) for other in (*links.windows, *links.steps)],
            status=status_of(request.error),
        )


def _decode_attributes(request: RequestRecord) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        names.REQUEST_ID: request.request_id,
        names.GEN_AI_PROVIDER: "specserve",
        names.GEN_AI_REQUEST_MODEL: request.model,
        names.GEN_AI_INPUT_TOKENS: request.num_prompt_tokens,
        names.GEN_AI_OUTPUT_TOKENS: request.num_output_tokens,
        names.GEN_AI_CACHED_TOKENS: request.num_cached_tokens,
        names.GEN_AI_FINISH_REASONS: (request.finish_reason,),
        names.DECODE_STEPS: request.num_steps,
        names.PREEMPTIONS: request.num_preemptions,
        names.SPEC_DRAFTERS: request.drafters,
        names.SPEC_STEPS: request.num_spec_steps,
        names.SPEC_DRAFT_TOKENS: request.num_draft_tokens,
        names.SPEC_ACCEPTED_TOKENS: request.num_accepted_draft_tokens,
        names.SPEC_EMITTED_TOKENS: request.num_spec_emitted_tokens,
        names.SPEC_DRAFTED_AT_POSITION: request.drafted_per_position,
        names.SPEC_ACCEPTED_AT_POSITION: request.accepted_per_position,
        names.LATENCY_QUEUE: sum(stay.end - stay.start for stay in request.queue),
        names.LATENCY_PREFILL: sum(chunk.end - chunk.start for chunk in request.prefill),
    }
    if request.num_draft_tokens:
        rate = request.num_accepted_draft_tokens / request.num_draft_tokens
        attributes[names.SPEC_ACCEPTANCE_RATE] = rate
    if request.num_spec_emitted_tokens:
        length = request.num_spec_emitted_tokens / request.num_spec_steps
        attributes[names.SPEC_ACCEPTANCE_LENGTH] = length
    if request.first_token is not None:
        ttft = request.first_token - request.arrival
        attributes[names.GEN_AI_TIME_TO_FIRST_CHUNK] = ttft
        attributes[names.LATENCY_TTFT] = ttft
        attributes[names.LATENCY_DECODE] = request.finished - request.first_token
    if request.error is not None:
        attributes[names.ERROR_TYPE] = "request_failed"
    return attributes

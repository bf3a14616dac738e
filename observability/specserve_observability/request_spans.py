"""A RequestRecord -> the spans of one request: queue, prefill, decode and its rounds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from opentelemetry.trace import SpanContext
from opentelemetry.util.types import AttributeValue

from . import names
from .context import child_context, parse_traceparent, root_context
from .records import RequestRecord
from .spans import Attributes, DecodeBook, DecodeNotes, Round, Span, SpanFactory


class RequestSpans:
    """A RequestRecord -> queue, prefill and decode spans under the request's own span."""

    def __init__(self, factory: SpanFactory, book: DecodeBook) -> None:
        self._factory = factory
        self._book = book

    def build(self, request: RequestRecord) -> Iterator[Span]:
        notes = self._book.take(int(request.decode_span_id, 16))
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
        decode = child_context(parent, span_id=int(request.decode_span_id, 16))
        yield self._decode(request, decode, parent, notes)
        for one in notes.rounds:
            yield self._factory.child(
                names.DECODE_ROUNDS, decode, one.start, one.end, _round(request, one)
            )

    def _root(self, request: RequestRecord, context: SpanContext) -> Span:
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
            error=request.error,
        )

    def _decode(
        self,
        request: RequestRecord,
        context: SpanContext,
        parent: SpanContext,
        notes: DecodeNotes,
    ) -> Span:
        """Always built, even for a request aborted in the queue: steps may link to it."""
        start = request.finished if request.first_token is None else request.first_token
        attributes = _decode_attributes(request)
        if notes.num_dropped:
            attributes[names.DECODE_LINKS_DROPPED] = notes.num_dropped
        return self._factory.span(
            names.DECODE,
            context,
            parent,
            start,
            request.finished,
            attributes,
            links=(*notes.windows, *notes.steps),
            error=request.error,
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
        attributes[names.LATENCY_PREFILL_WAIT] = _prefill_wait(request)
        if request.num_output_tokens > 1:
            tpot = (request.finished - request.first_token) / (request.num_output_tokens - 1)
            attributes[names.LATENCY_TPOT] = tpot
    if request.error is not None:
        attributes[names.ERROR_TYPE] = "request_failed"
    return attributes


def _prefill_wait(request: RequestRecord) -> float:
    """Seconds between parts of the prompt in which others' were computed; not those of a stay in
    the queue, which preemption makes."""
    stays = sum(
        max(0.0, min(stay.end, after.start) - max(stay.start, before.end))
        for before, after in pairwise(request.prefill)
        for stay in request.queue
    )
    gaps = sum(max(0.0, after.start - before.end) for before, after in pairwise(request.prefill))
    return max(0.0, gaps - stays)


def _round(request: RequestRecord, one: Round) -> Attributes:
    return {
        names.REQUEST_ID: request.request_id,
        names.DECODE_STEPS: len(one.drafted),
        names.SPEC_DRAFTERS: one.drafters,
        names.SPEC_DRAFT_TOKENS: sum(one.drafted),
        names.SPEC_ACCEPTED_TOKENS: sum(one.accepted),
        names.SPEC_DRAFTED_PER_STEP: one.drafted,
        names.SPEC_ACCEPTED_PER_STEP: one.accepted,
        names.GENERATED_TOKENS: one.num_emitted,
    }

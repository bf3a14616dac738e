"""One streamed reply as it arrives: events in, the measured part of a RequestRecord out."""

from __future__ import annotations

import msgspec

from specserve_loadgen.engines import (
    StepsFromTimings,
    decode_sglext,
    decode_timings,
    from_sglang,
)
from specserve_loadgen.prompt import Prompt
from specserve_loadgen.records import Chunk, CountedBy, Failure, Output, RequestRecord, Turn
from specserve_loadgen.sse import SseEvent
from specserve_loadgen.wire import (
    Metrics,
    StreamChunk,
    Usage,
    decode_chunk,
    decode_metrics,
    error_message,
)

DONE = b"[DONE]"
NULL = b"null"


class Reply:
    """Mutable while the stream runs; written by the one task that reads it."""

    def __init__(self, *, keep_output: bool = False) -> None:
        self._keep_output = keep_output
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self.has_begun = False  # the response's head has come
        self.done_at: float | None = None
        self._chunks: list[Chunk] = []
        self._first_text: float | None = None
        self._num_tokens = 0
        self._counted_by: CountedBy = "token_ids"
        self._usage: Usage | None = None
        self._finish_reason: str | None = None
        self._metrics = Metrics()
        self._malformed_metrics: str | None = None
        self._answer: list[str] = []
        self._steps = StepsFromTimings()

    @property
    def text(self) -> str:
        """The answer so far, without reasoning: what a next turn is sent with."""
        return "".join(self._answer)

    def on_event(self, event: SseEvent, now: float) -> Failure | None:
        """Take one event that arrived at `now`; a Failure ends the request."""
        if event.data.startswith(DONE):
            self.done_at = now
            return None
        if not event.data:
            return None  # `event: ping` with an empty data line: a keep-alive of some servers
        if event.event == "error":
            return Failure(kind="stream_error", message=error_message(event.data))
        try:
            chunk = decode_chunk(event.data)
        except (msgspec.DecodeError, RecursionError) as error:
            shown = event.data[:120].decode(errors="replace")
            return Failure(kind="malformed", message=f"{error} in the event {shown!r}")
        if bytes(chunk.error) != NULL:
            return Failure(kind="stream_error", message=error_message(bytes(chunk.error)))
        self._on_chunk(chunk, now)
        return None

    def _on_chunk(self, chunk: StreamChunk, now: float) -> None:
        if bytes(chunk.metrics) != NULL:
            self._on_metrics(bytes(chunk.metrics))
        if bytes(chunk.sglext) != NULL:
            self._on_sglext(bytes(chunk.sglext))
        timed = self._on_timings(bytes(chunk.timings)) if bytes(chunk.timings) != NULL else None
        if chunk.choices:
            choice = chunk.choices[0]
            self._finish_reason = choice.finish_reason or self._finish_reason
            if self._keep_output:
                self._texts.append(choice.new_text)
                self._token_ids += choice.token_ids or ()
            if choice.answer:
                self._answer.append(choice.answer)
            self._on_tokens(choice.token_ids, choice.has_text, chunk.usage, timed, now)
        if chunk.usage is not None:
            self._usage = chunk.usage

    def _on_tokens(
        self,
        token_ids: list[int] | None,
        has_text: bool,
        usage: Usage | None,
        timed: int | None,
        now: float,
    ) -> None:
        source: CountedBy
        if token_ids is not None:
            num_tokens, source = len(token_ids), "token_ids"
        elif usage is not None:
            num_tokens, source = max(0, usage.completion_tokens - self._num_tokens), "usage"
        elif timed is not None:
            num_tokens, source = timed, "timings"
        else:
            num_tokens, source = int(has_text), "chunks"
        if not num_tokens and not has_text:
            return  # a role or finish chunk: nothing a reader could see
        if self._first_text is None and has_text:
            self._first_text = now
        self._num_tokens += num_tokens
        self._counted_by = max(self._counted_by, source, key=_WEAKNESS.index)
        self._chunks.append(Chunk(now, num_tokens))

    def _on_metrics(self, raw: bytes) -> None:
        # The finish chunk and the usage chunk both carry them: the later replaces the earlier.
        try:
            self._metrics = decode_metrics(raw)
        except msgspec.DecodeError as error:
            self._malformed_metrics = str(error)

    def _on_timings(self, raw: bytes) -> int | None:
        """How many tokens the chunk brought; None where it does not tell."""
        try:
            return self._steps.on_timings(decode_timings(raw))
        except msgspec.DecodeError as error:
            self._malformed_metrics = str(error)
            return None

    def _on_sglext(self, raw: bytes) -> None:
        try:
            details = decode_sglext(raw).spec_tokens_details
        except msgspec.DecodeError as error:
            self._malformed_metrics = str(error)
            return
        if details is not None:
            self._metrics = Metrics(speculative_decoding=from_sglang(details))

    def record(
        self,
        *,
        turn: Turn,
        prompt: Prompt,
        sent: float,
        ended: float,
        failure: Failure | None,
    ) -> RequestRecord:
        usage = self._usage
        details = None if usage is None else usage.prompt_tokens_details
        return RequestRecord(
            request_idx=turn.request_idx,
            session_idx=turn.session_idx,
            turn_idx=turn.turn_idx,
            prompt_id=prompt.prompt_id,
            category=prompt.category,
            scheduled=turn.scheduled,
            sent=sent,
            ended=ended,
            first_text=self._first_text,
            chunks=tuple(self._chunks),
            counted_by=self._counted_by,
            num_output_tokens=self._num_tokens if usage is None else usage.completion_tokens,
            num_prompt_tokens=None if usage is None else usage.prompt_tokens,
            num_cached_tokens=None if details is None else details.cached_tokens,
            finish_reason=self._finish_reason,
            speculative=self._metrics.speculative_decoding or self._steps.speculative(),
            specserve=self._metrics.specserve,
            malformed_metrics=self._malformed_metrics,
            failure=failure,
            timings=self._steps.last,
            output=self._output() if self._keep_output else None,
        )

    def _output(self) -> Output:
        known = bool(self._token_ids) and self._counted_by == "token_ids"
        return Output("".join(self._texts), tuple(self._token_ids) if known else None)


_WEAKNESS: tuple[CountedBy, ...] = ("token_ids", "usage", "timings", "chunks")

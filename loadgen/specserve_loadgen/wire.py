"""The parts of an OpenAI-style stream that are measured. Unknown fields are ignored.

`metrics` and `error` stay raw until their own decoding, so that a server with another idea of
either does not spoil the timing of the chunk that carries it.
"""

from __future__ import annotations

import msgspec


class Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """One choice of a chunk, of chat (`delta`) or of completions (`text`)."""

    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None  # of this chunk alone, when return_token_ids is honoured

    @property
    def answer(self) -> str | None:
        return self.text if self.delta is None else self.delta.content

    @property
    def new_text(self) -> str:
        if self.text or self.delta is None:
            return self.text or ""
        delta = self.delta
        return (delta.reasoning_content or delta.reasoning or "") + (delta.content or "")

    @property
    def has_text(self) -> bool:
        return bool(self.new_text)


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0  # so far
    prompt_tokens_details: PromptTokensDetails | None = None


class StreamChunk(msgspec.Struct, frozen=True):
    choices: list[Choice] | None = None
    usage: Usage | None = None
    metrics: msgspec.Raw = msgspec.Raw(b"null")
    timings: msgspec.Raw = msgspec.Raw(b"null")  # llama.cpp
    sglext: msgspec.Raw = msgspec.Raw(b"null")  # SGLang
    error: msgspec.Raw = msgspec.Raw(b"null")


class SpeculativeDecoding(msgspec.Struct, frozen=True, kw_only=True):
    """`metrics.speculative_decoding` of one request, as vLLM spells it."""

    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float | None = None  # None: no step had drafts
    draft_acceptance_rate: float | None = None
    acceptance_histogram: list[int] = []  # [K+1] steps that accepted j guesses
    num_spec_tokens: int = 0  # K
    per_step_accepted: list[int] | None = None  # of every step with drafts, when asked for
    per_step_drafted: list[int] | None = None

    @property
    def num_emitted_tokens(self) -> int:
        """Tokens that the steps with drafts emitted, the extra one included, after stop trimming.

        The server sends their mean over steps; the count behind it is whole.
        """
        if self.mean_acceptance_length is None:
            return self.num_accepted_draft_tokens + self.num_spec_steps
        return round(self.mean_acceptance_length * self.num_spec_steps)


class SpecserveMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """`metrics.specserve` of one request. Other servers do not send it."""

    steps: int  # target steps that emitted a token, with or without drafts
    drafters: list[str] = []
    drafted_per_position: list[int] = []
    accepted_per_position: list[int] = []
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    decode_seconds: float | None = None
    preemptions: int = 0


class Metrics(msgspec.Struct, frozen=True):
    speculative_decoding: SpeculativeDecoding | None = None
    specserve: SpecserveMetrics | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    message: str | None = None
    type: str | None = None
    code: str | int | None = None


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    owned_by: str | None = None  # tells which engine it is


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard] = []


class Version(msgspec.Struct, frozen=True):
    version: str | None = None


class _Wrapped(msgspec.Struct, frozen=True):
    error: ErrorBody | str | None = None
    message: str | None = None
    detail: str | None = None


decode_chunk = msgspec.json.Decoder(StreamChunk).decode
decode_metrics = msgspec.json.Decoder(Metrics).decode
_decode_error = msgspec.json.Decoder(ErrorBody | str).decode
_decode_wrapped = msgspec.json.Decoder(_Wrapped).decode


def error_message(raw: bytes) -> str:
    """The sentence inside the value of an `error` field, or its text when it has another shape."""
    try:
        error = _decode_error(raw)
    except msgspec.DecodeError:
        return raw.decode(errors="replace")[:500]
    return _sentence(error) or raw.decode(errors="replace")[:500]


def http_error_message(body: bytes) -> str:
    """The sentence inside the body of an HTTP error reply, whatever its wrapper."""
    try:
        wrapped = _decode_wrapped(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace").strip()[:500]
    sentence = _sentence(wrapped.error) if wrapped.error else wrapped.message or wrapped.detail
    return sentence or body.decode(errors="replace").strip()[:500]


def _sentence(error: ErrorBody | str) -> str:
    if isinstance(error, str):
        return error
    kind = error.code if error.code is not None else error.type
    return " ".join(part for part in (error.message, f"({kind})" if kind else None) if part)

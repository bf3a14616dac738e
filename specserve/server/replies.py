"""Reply bodies and stream chunks, as OpenAI and vLLM spell them. Encoded by msgspec as they are.

UNSET leaves a key out, None writes null: clients tell the two apart.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from specserve.types import TokenChunk

StopReason = str | int | None
FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


def finish_reason(chunk: TokenChunk) -> FinishReason:
    """Of a sequence's last chunk; sequences that ended otherwise have no reply (source.py)."""
    assert chunk.finish_reason in ("stop", "length")
    return chunk.finish_reason


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int


class ReasoningTokens(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """completion_tokens_details: of a chat's whole usage; left out while replies are under way"""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


class SpeculativeDecoding(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's per-request acceptance metrics, name for name."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    per_step_accepted: list[int] | UnsetType = UNSET
    per_step_drafted: list[int] | UnsetType = UNSET


class SpecserveMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Ours. Seconds are those of the sequence that took longest; counts are sums."""

    drafters: list[str]
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    preemptions: int
    steps: int
    lossy: bool  # verified by a rule that does not keep the target's law, asked for by name


class Metrics(msgspec.Struct, frozen=True):
    speculative_decoding: SpeculativeDecoding
    specserve: SpecserveMetrics


# ---- log-probabilities -----------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float | None]  # null: a prompt's first token
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


# By prompt token: by token id, the token's own first, then the likeliest; null for the first token.
PromptLogprobList = list[dict[str, PromptLogprob] | None]


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


# ---- where tokens come from (return_token_origins) -------------------------------------------

Origin = Literal["accepted", "corrected", "bonus", "plain"]


class TokenOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """One token of the reply.

    text:        what it adds to the text, "" while that is only part of a character
    origin:      accepted: a guess that the target confirmed. corrected: the target's own, where
                 every guess was wrong. bonus: its own, behind guesses that were all right. plain:
                 its own, in a step without guesses
    position:    of an accepted guess: 0 for the first after the text
    probability: of an accepted guess, as its drafter saw it; left out where it has no opinion
    """

    id: int
    text: str
    origin: Origin
    position: int | UnsetType = UNSET
    probability: float | UnsetType = UNSET


class RejectedGuess(msgspec.Struct, frozen=True, kw_only=True):
    """text: the token's own; position: how many guesses come before it on its branch"""

    id: int
    text: str
    position: int
    probability: float | UnsetType = UNSET


class StepOrigins(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a choice, in order; steps without a token are left out of the count.

    drafter: whose guesses were verified; "none" where there were none
    reason:  why there were none although speculation was asked for
    """

    step: int
    drafter: str
    drafted: int
    accepted: int
    reason: str | UnsetType = UNSET
    tokens: list[TokenOrigin]
    rejected: list[RejectedGuess]


# ---- /v1/completions -------------------------------------------------------------------------


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Of a reply and of a stream chunk alike."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: StopReason = None
    token_ids: list[int] | UnsetType = UNSET
    token_origins: list[StepOrigins] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET


# ---- /v1/chat/completions --------------------------------------------------------------------


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: StopReason
    token_ids: list[int] | UnsetType = UNSET
    token_origins: list[StepOrigins] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: Metrics
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, frozen=True):
    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The first of a call has id, type and name, the others have more of its arguments."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: StopReason | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    token_origins: list[StepOrigins] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    metrics: Metrics | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


# ---- models, tokens, the server --------------------------------------------------------------


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "specserve"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(msgspec.Struct, frozen=True):
    prompt: str


class Status(msgspec.Struct, frozen=True):
    status: Literal["ok", "ready"]


class Version(msgspec.Struct, frozen=True):
    version: str


class OpenApi(msgspec.Struct, frozen=True):
    """Its own schema would be another document; see the OpenAPI specification."""

    openapi: str

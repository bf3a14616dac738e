"""Frozen values that cross boundaries. Pure Python: the scheduler imports this module.

request (asked) -> Request; sequence (running) lives in sequence.py; BatchPlan goes to the worker
thread, StepResult comes back, TokenChunk leaves through a RequestStream.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Final, Literal

import msgspec

from specserve.constraint import Constraint

FinishReason = Literal["stop", "length", "abort", "error"]
VerifyRule = Literal["replay", "block", "rejection", "typical"]
LOSSY_RULES: Final[frozenset[VerifyRule]] = frozenset({"typical"})  # the law is not the target's


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are chosen and when a sequence ends. Names and meanings follow vLLM.

    Values are validated in admission.py, never here: a Struct is data.
    """

    n: int = 1
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None  # no other token; None: any
    bad_words: tuple[str, ...] = ()  # texts that are not put out; Request.bad_word_ids is read
    min_tokens: int = 0
    max_tokens: int | None = 16  # None: as many as fit
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None: none; n: the chosen token's and the n best
    prompt_logprobs: int | None = None  # the same of each prompt token but the first


class Speculation(msgspec.Struct, frozen=True, kw_only=True):
    """Per-request choice; None means the server's default.

    drafter: "auto" lets the controller choose drafter, K and width in each step, "none" switches
             speculation off, a name forces that drafter with exactly this K and width
    max_draft_tokens: K; with "auto" the most it may be
    draft_width:      the most children a guess may have; chains only if 1. "auto" chooses itself
    """

    drafter: str | None = None
    max_draft_tokens: int | None = None
    draft_width: int | None = None
    verify: VerifyRule | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A validated request for one sequence (n > 1 is n Requests). Every choice is resolved."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams  # max_tokens is an int here
    seed: int  # resolved: params.seed, or one drawn by the server
    drafter: str
    max_draft_tokens: int
    verify: VerifyRule
    stop_ids: frozenset[int] = frozenset()  # EOS ids (unless ignored) and stop_token_ids
    eos_ids: frozenset[int] = frozenset()  # masked while min_tokens is not reached, with stop_ids
    priority: int = 0  # lower runs first
    cache_salt: str = ""
    arrival_time: float = 0.0  # time.time(), seconds
    traceparent: str | None = None  # W3C, of the span that the request's spans belong to
    traffic_class: str = "default"  # whose metrics it counts in
    draft_width: int = 1  # most children of a guess; 1: chains
    prediction_ids: tuple[int, ...] = ()  # what the user expects the output to be
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # never in the output, one after the other
    with_steps: bool = False  # its chunks tell what each step guessed (TokenChunk.steps)
    constraint: Constraint | None = None  # this sequence's own: what the output must look like

    @property
    def max_tokens(self) -> int:
        assert self.params.max_tokens is not None
        return self.params.max_tokens


class RowPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence's part of a step.

    The step computes positions start .. start+num_tokens-1 of known tokens, then up to
    max_draft_tokens guesses. `history` is the sequence's own list, all known tokens, read only
    while the step runs (the loop writes it in commit, never during execute).
    """

    seq_id: int
    request: Request
    history: Seq[int]
    start: int  # target KV length before the step
    num_tokens: int  # known tokens computed in this step
    max_draft_tokens: int  # K of this row; 0: no speculation
    samples: bool  # the last known token's logits choose a token
    num_scored: int = 0  # of the known tokens, the first so many's laws are wanted: prompt_logprobs
    is_prefill: bool  # catches up (prompt, or recompute) rather than extends the text by one step
    block_table: tuple[int, ...]
    draft_kv_lens: Mapping[str, int] = {}  # by drafter: its valid KV, a prefix of history; none: 0


class Ended(msgspec.Struct, frozen=True):
    """A sequence that will never run again; output_ids: all it emitted and kept, in order."""

    request: Request
    output_ids: tuple[int, ...]


class BatchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What one step does. An empty plan is a plan.

    released: seq ids that finished or were preempted since the last plan: forget them
    ended:    those of them that emitted something and will not come back
    """

    step_idx: int
    rows: tuple[RowPlan, ...]
    released: tuple[int, ...] = ()
    ended: tuple[Ended, ...] = ()


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Of the target's unprocessed distribution, natural logarithm. Of a constrained request: over
    the tokens that the constraint allows."""

    logprob: float  # of the emitted token
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first


class PromptLogprobs(TokenLogprobs, frozen=True):
    """Of a prompt's token, by the law of what follows the tokens before it."""

    rank: int  # 1: no token was likelier


class Guesses(msgspec.Struct, frozen=True):
    """One row's guesses in one step, and those that the target took.

    token_ids, parents, scores: as in a Draft
    path: the accepted ones, indices into token_ids, each the parent of the next
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    path: tuple[int, ...] = ()


class StepTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did for one sequence. Counts are after stop trimming, guesses before.

    step_idx:     counts this sequence's steps that emitted a token
    num_tokens:   emitted: the accepted guesses, then (unless trimmed) the target's own token
    reason:       why there was no guess although speculation was asked for; often empty
    """

    step_idx: int
    num_tokens: int
    num_accepted: int
    drafter: str
    reason: str
    guesses: Guesses


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one row produced, before stop conditions.

    token_ids holds the accepted guesses in order and then one recovered or bonus token; empty for
    a prefill chunk that is not the last. `error` ends this request alone.
    """

    seq_id: int
    token_ids: tuple[int, ...] = ()
    num_draft_tokens: int = 0
    num_accepted: int = 0
    draft_kv_lens: Mapping[str, int] = {}  # by drafter, once the accepted guesses are history
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # of tokens start+1 .. start+num_scored
    drafter: str = "none"
    predicted_accepted: float = 0.0  # guesses that were expected to be right
    no_draft_reason: str = ""  # why K = 0 although speculation was asked for
    guesses: Guesses | None = None  # of requests with_steps that sampled
    error: str | None = None
    unfollowable: bool = False  # the error is what was asked for, no failure of the engine


class StepTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds since the epoch (time.time) at which each phase of a step began and ended."""

    draft_start: float
    forward_start: float
    verify_start: float
    end: float


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """predicted_seconds: from draft_start to end, as expected before the forward

    failed_drafters: one entry per failure
    speculation_seconds: estimated, that the step would not have taken without guesses
    """

    rows: tuple[RowResult, ...]
    timings: StepTimings
    predicted_seconds: float = 0.0
    failed_drafters: tuple[str, ...] = ()
    speculation_seconds: float = 0.0


class SpecStats(msgspec.Struct, frozen=True, kw_only=True):
    """One request's speculation, counted after stop trimming; `spec` steps have drafts."""

    drafters: tuple[str, ...] = ()  # used, in order of first use
    max_draft_tokens: int = 0  # K asked for
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_spec_emitted_tokens: int = 0  # tokens those steps emitted, the extra one included
    num_steps: int = 0  # target steps that emitted a token, with or without drafts
    per_step_drafted: tuple[int, ...] = ()
    per_step_accepted: tuple[int, ...] = ()
    lossy: bool = False  # the rule asked for does not keep the target's law


class RequestTimes(msgspec.Struct, frozen=True, kw_only=True):
    """time.time() of each event; None: has not happened."""

    arrival: float
    scheduled: float | None = None  # first admitted to a step
    first_token: float | None = None
    finished: float | None = None


class TokenChunk(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream yields. Chunks coalesce when the reader is slow: they only ever add up.

    The last chunk has finish_reason and stats. `error` is set with finish_reason "error".
    """

    request_id: str
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # all at once, of the second token on
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token id that ended it
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_output_tokens: int = 0  # so far
    num_preemptions: int = 0
    stats: SpecStats | None = None
    times: RequestTimes | None = None
    steps: tuple[StepTrace, ...] = ()  # of requests with_steps; their tokens are token_ids
    error: str | None = None
    unfollowable: bool = False  # as RowResult's

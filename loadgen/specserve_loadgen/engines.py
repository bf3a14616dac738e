"""Other servers' words for what ours says in `metrics`: what is asked of each, and how it is read.

ours, vLLM   `metrics.speculative_decoding` in the reply; vLLM with its flag for it alone
SGLang       `sglext.spec_tokens_details`, where the request asks for it
llama.cpp    `timings` in every chunk, where the request asks for it: running sums of tokens,
             guesses and accepted guesses. A step with guesses raises the sum of guesses, and the
             tokens that come with the new sum are its own, so its steps can be told apart.

llama.cpp counts what its last step accepted before the text is cut at its limit. Here, as
everywhere, a guess is accepted when it became output.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from specserve_loadgen.wire import SpeculativeDecoding

OURS = "specserve"
NAMES = {OURS: OURS, "vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}
# Only to the server that knows it: others may refuse what they do not know.
REQUEST_FIELDS: dict[str, dict[str, object]] = {
    "llama.cpp": {"timings_per_token": True},
    "SGLang": {"return_spec_tokens_details": True},
}
UNKNOWN = "unknown"
KNOW_CACHE_SALTS = (OURS, "vLLM")  # `cache_salt`: requests of another one share no cached prefix


def engine_of(owned_by: str | None) -> str:
    """The engine's name by what /v1/models says of a model's owner."""
    return NAMES.get((owned_by or "").lower(), UNKNOWN)


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """llama.cpp's, of the request so far."""

    prompt_n: int = 0  # prompt tokens computed, without cached ones
    prompt_ms: float = 0.0
    predicted_n: int = 0
    predicted_ms: float = 0.0  # from the first token to the last
    draft_n: int = 0
    draft_n_accepted: int = 0


class StepsFromTimings:
    """Takes every chunk's timings in order; tells the steps with guesses at the end."""

    def __init__(self) -> None:
        self.last: Timings | None = None
        self._drafted: list[int] = []
        self._accepted: list[int] = []
        self._emitted: list[int] = []

    def on_timings(self, now: Timings) -> int:
        """How many tokens the chunk brought."""
        before = self.last or Timings()
        self.last = now
        num_tokens = max(0, now.predicted_n - before.predicted_n)
        if now.draft_n > before.draft_n:
            self._drafted.append(now.draft_n - before.draft_n)
            self._accepted.append(now.draft_n_accepted - before.draft_n_accepted)
            self._emitted.append(num_tokens)
        elif self._emitted and now.draft_n_accepted == before.draft_n_accepted:
            # The rest of a run, up to the extra token; what comes after is a step of its own.
            missing = self._accepted[-1] + 1 - self._emitted[-1]
            self._emitted[-1] += min(num_tokens, max(0, missing))
        return num_tokens

    def speculative(self) -> SpeculativeDecoding | None:
        """None where no guess was made: plain decoding, or a server that says nothing of it."""
        if not self._drafted:
            return None
        accepted = [min(a, e) for a, e in zip(self._accepted, self._emitted, strict=True)]
        most = max(self._drafted)
        return SpeculativeDecoding(
            num_spec_steps=len(self._drafted),
            num_draft_tokens=sum(self._drafted),
            num_accepted_draft_tokens=sum(accepted),
            mean_acceptance_length=sum(self._emitted) / len(self._emitted),
            draft_acceptance_rate=sum(accepted) / sum(self._drafted),
            acceptance_histogram=[accepted.count(length) for length in range(most + 1)],
            num_spec_tokens=most,
            per_step_accepted=accepted,
            per_step_drafted=self._drafted,
        )


class SpecTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang's, of one request."""

    spec_verify_ct: int = 0
    spec_num_proposed_drafts: int = 0
    spec_num_correct_drafts: int = 0
    spec_correct_drafts_histogram: list[int] = []


class SglExt(msgspec.Struct, frozen=True):
    spec_tokens_details: SpecTokensDetails | None = None


def from_sglang(details: SpecTokensDetails) -> SpeculativeDecoding | None:
    """None where no step verified guesses."""
    steps, correct = details.spec_verify_ct, details.spec_num_correct_drafts
    if not steps:
        return None
    drafted = details.spec_num_proposed_drafts
    return SpeculativeDecoding(
        num_spec_steps=steps,
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=correct,
        draft_acceptance_rate=correct / drafted if drafted else None,
        acceptance_histogram=details.spec_correct_drafts_histogram,
        num_spec_tokens=max(0, len(details.spec_correct_drafts_histogram) - 1),
    )


def not_learnt(engine: str, known: Sequence[str]) -> list[str]:
    """In words, what a run could not find out, and what would tell. known: what replies told."""
    found = []
    if "speculation" not in known:
        hint = {
            "vLLM": "start it with --per-request-spec-decode-metrics",
            "llama.cpp": "it made no guesses: start it with --spec-type",
            "SGLang": "its completions and streams may not send sglext",
        }.get(engine, "its replies carry no metrics that are known here")
        found.append(f"acceptance of each request ({hint})")
    if "steps" not in known:
        found.append("acceptance by position and step (its replies hold sums only)")
    if "server" not in known:
        hint = " (start it with --metrics)" if engine == "llama.cpp" else ""
        found.append(f"the server's own counters: no /metrics that is known here{hint}")
    if "tokens" not in known:
        found.append("tokens of a chunk: a chunk was counted as one, so ITL is per chunk")
    return found


decode_timings = msgspec.json.Decoder(Timings).decode
decode_sglext = msgspec.json.Decoder(SglExt).decode

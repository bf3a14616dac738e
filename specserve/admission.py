"""From what was asked to what will run: every range checked, every default resolved, once.

The result is another type (`Request`), so that nothing unchecked can reach the scheduler.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence as Seq
from typing import get_args

import msgspec

from specserve.config import EngineConfig
from specserve.constraint import Constraint
from specserve.errors import RequestError
from specserve.types import Request, SamplingParams, Speculation, VerifyRule

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
MAX_LOGPROBS = 20
MAX_SALT_CHARS = 256
MAX_DRAFT_WIDTH = 16
LOGIT_BIAS_RANGE = (-100.0, 100.0)

# From and to, both allowed; the OpenAPI document quotes them.
RANGES: dict[str, tuple[float, float]] = {
    "n": (1, MAX_N),
    "temperature": (0.0, 2.0),
    "top_k": (-1, 2**31 - 1),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    # Logits are divided by it: a far smaller one makes them infinite.
    "repetition_penalty": (0.01, 100.0),
    "seed": (-(2**63), 2**63 - 1),
    "priority": (-(2**31), 2**31 - 1),
}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one server can do, for checking requests against."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_draft_tokens: int
    drafters: tuple[str, ...]  # "none" included, "auto" where there is a choice
    default_drafter: str
    default_draft_tokens: int
    default_verify: VerifyRule
    eos_ids: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
        drafters: tuple[str, ...],
    ) -> Limits:
        """drafters: "none" and the loaded ones"""
        return cls(
            vocab_size=vocab_size,
            max_model_len=config.max_model_len,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            max_draft_tokens=config.max_draft_tokens,
            drafters=(*drafters, "auto") if set(drafters) - {"none"} else drafters,
            default_drafter=config.default_drafter,
            default_draft_tokens=config.default_draft_tokens,
            default_verify=config.default_verify,
            eos_ids=eos_ids,
        )


def make_requests(
    limits: Limits,
    prompt_ids: Seq[int],
    params: SamplingParams,
    *,
    request_id: str,
    speculation: Speculation | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
    traceparent: str | None = None,
    traffic_class: str = "default",
    prediction_ids: Seq[int] = (),
    bad_word_ids: tuple[tuple[int, ...], ...] = (),
    with_steps: bool = False,
) -> list[Request]:
    """n Requests for one prompt; RequestError names the field, the value and the limit.

    Sequence i of n draws its noise from seed + i, so that the n texts differ and each replays.
    bad_word_ids: of params.bad_words
    """
    _check_params(params, limits)
    _check_prompt(prompt_ids, limits)
    _check_number("priority", priority, *RANGES["priority"])
    if cache_salt is not None and not 1 <= len(cache_salt) <= MAX_SALT_CHARS:
        raise RequestError(
            f"cache_salt has {len(cache_salt)} characters, it must have 1 to {MAX_SALT_CHARS}",
            param="cache_salt",
        )
    max_tokens = _resolve_max_tokens(params.max_tokens, len(prompt_ids), limits)
    # Resolved first, so that a minimum beyond the room that is left is refused too.
    _check_int("min_tokens", params.min_tokens, 0, max_tokens)
    chosen = _resolve_speculation(speculation or Speculation(), limits)
    seed = secrets.randbits(63) if params.seed is None else params.seed
    stop_ids = frozenset(params.stop_token_ids)
    if not params.ignore_eos:
        stop_ids |= limits.eos_ids
    return [
        Request(
            request_id=request_id if params.n == 1 else f"{request_id}-{i}",
            prompt_ids=tuple(prompt_ids),
            params=msgspec.structs.replace(params, max_tokens=max_tokens),
            # Wraps as a 64-bit counter does.
            seed=(seed + i + 2**63) % 2**64 - 2**63,
            drafter=chosen.drafter,
            max_draft_tokens=chosen.max_draft_tokens,
            draft_width=chosen.draft_width,
            verify=chosen.verify,
            prediction_ids=tuple(prediction_ids[: limits.max_model_len]),
            bad_word_ids=bad_word_ids,
            stop_ids=stop_ids,
            eos_ids=limits.eos_ids,
            priority=priority,
            cache_salt=cache_salt or "",
            arrival_time=time.time(),
            traceparent=traceparent,
            traffic_class=traffic_class,
            with_steps=with_steps,
        )
        for i in range(params.n)
    ]


def constrained(
    requests: Seq[Request], constraints: Seq[Constraint], *, param: str
) -> list[Request]:
    """The same requests, each bound to a constraint of its own; RequestError where that makes no
    sense. param: the field that asked for it"""
    params = requests[0].params
    if params.ignore_eos:
        raise RequestError(
            f"ignore_eos is true, but with {param} a text that is complete can only end: leave it "
            "out",
            param="ignore_eos",
        )
    if params.min_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens}, but with {param} the text ends where that says: "
            "leave it out",
            param="min_tokens",
        )
    return [
        msgspec.structs.replace(request, constraint=constraint)
        for request, constraint in zip(requests, constraints, strict=True)
    ]


def _check_int(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}, it must be from {low} to {high}", param=name)


def _check_number(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # of NaN this is not true either
        raise RequestError(f"{name} is {value}, it must be from {low} to {high}", param=name)


def _check_params(params: SamplingParams, limits: Limits) -> None:
    given = msgspec.structs.asdict(params)
    for name, (low, high) in RANGES.items():
        if given.get(name) is not None:  # priority is not among them, and a seed need not be given
            _check_number(name, given[name], low, high)
    if params.logprobs is not None:
        _check_int("logprobs", params.logprobs, 0, min(MAX_LOGPROBS, limits.vocab_size))
    if params.prompt_logprobs is not None:
        most = min(MAX_LOGPROBS, limits.vocab_size)
        _check_int("prompt_logprobs", params.prompt_logprobs, 0, most)
    _check_stops(params, limits)
    _check_logit_bias(params, limits)
    _check_bans(params, limits)


def _check_stops(params: SamplingParams, limits: Limits) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise RequestError(
            f"stop has {len(params.stop)} strings, at most {MAX_STOP_STRINGS} are allowed",
            param="stop",
        )
    for text in params.stop:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise RequestError(
                f"stop holds a string of {len(text)} characters, each must have 1 to "
                f"{MAX_STOP_CHARS}",
                param="stop",
            )
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(
            f"stop_token_ids has {len(params.stop_token_ids)} ids, at most "
            f"{MAX_STOP_TOKEN_IDS} are allowed",
            param="stop_token_ids",
        )
    for token_id in params.stop_token_ids:
        _check_int("stop_token_ids", token_id, 0, limits.vocab_size - 1)


def _check_logit_bias(params: SamplingParams, limits: Limits) -> None:
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(params.logit_bias)} entries, at most {MAX_LOGIT_BIAS} "
            "are allowed",
            param="logit_bias",
        )
    for token_id, bias in params.logit_bias.items():
        _check_int("logit_bias", token_id, 0, limits.vocab_size - 1)
        _check_number("logit_bias", bias, *LOGIT_BIAS_RANGE)


def _check_bans(params: SamplingParams, limits: Limits) -> None:
    if params.allowed_token_ids is not None:
        count = len(params.allowed_token_ids)
        if not 1 <= count <= limits.vocab_size:
            raise RequestError(
                f"allowed_token_ids has {count} ids, it must have 1 to {limits.vocab_size}",
                param="allowed_token_ids",
            )
        for token_id in params.allowed_token_ids:
            _check_int("allowed_token_ids", token_id, 0, limits.vocab_size - 1)
    check_bad_words(params.bad_words)


def check_bad_words(words: Seq[str]) -> None:
    """Before they are tokenized, too."""
    if len(words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words has {len(words)} texts, at most {MAX_BAD_WORDS} are allowed",
            param="bad_words",
        )
    for text in words:
        if not 1 <= len(text) <= MAX_BAD_WORD_CHARS:
            raise RequestError(
                f"bad_words holds a text of {len(text)} characters, each must have 1 to "
                f"{MAX_BAD_WORD_CHARS}",
                param="bad_words",
            )


def _check_prompt(prompt_ids: Seq[int], limits: Limits) -> None:
    if not prompt_ids:
        raise RequestError("prompt is empty, it must have at least one token", param="prompt")
    for token_id in prompt_ids:
        if not 0 <= token_id < limits.vocab_size:
            raise RequestError(
                f"prompt holds token id {token_id}, this model's ids are 0 to "
                f"{limits.vocab_size - 1}",
                param="prompt",
            )


def _resolve_max_tokens(max_tokens: int | None, prompt_len: int, limits: Limits) -> int:
    pool_tokens = limits.num_blocks * limits.block_size
    room = limits.max_model_len - prompt_len
    if max_tokens is not None and max_tokens < 1:
        raise RequestError(f"max_tokens is {max_tokens}, it must be at least 1", param="max_tokens")
    if room < 1 or (max_tokens is not None and max_tokens > room):
        asked = prompt_len + (max_tokens or 1)
        raise RequestError(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you "
            f"requested {asked} tokens ({prompt_len} in the prompt, {max_tokens or 1} for the "
            "output), so the prompt is too long: shorten it, ask for fewer tokens, or start the "
            "server with a larger --max-model-len",
            param="prompt" if room < 1 else "max_tokens",
            code="context_length_exceeded",
        )
    resolved = room if max_tokens is None else max_tokens
    if prompt_len + resolved > pool_tokens:
        raise RequestError(
            f"This model's maximum context length is {pool_tokens} tokens. However, you requested "
            f"{prompt_len + resolved} tokens, so the prompt is too long: the KV pool has "
            f"{limits.num_blocks} blocks of {limits.block_size}; start the server with a larger "
            "--kv-cache-gb",
            param="prompt",
            code="context_length_exceeded",
        )
    return resolved


class _Chosen(msgspec.Struct, frozen=True):
    drafter: str
    max_draft_tokens: int
    draft_width: int
    verify: VerifyRule


def _resolve_speculation(asked: Speculation, limits: Limits) -> _Chosen:
    drafter = limits.default_drafter if asked.drafter is None else asked.drafter
    if drafter not in limits.drafters:
        known = ", ".join(limits.drafters)
        raise RequestError(
            f"speculation.drafter is {drafter!r}, this server has: {known}",
            param="speculation.drafter",
        )
    verify = limits.default_verify if asked.verify is None else asked.verify
    if verify not in get_args(VerifyRule):
        known = ", ".join(get_args(VerifyRule))
        raise RequestError(
            f"speculation.verify is {verify!r}, it must be one of: {known}",
            param="speculation.verify",
        )
    num_tokens = asked.max_draft_tokens
    if num_tokens is None:
        by_choice = drafter == "auto"
        num_tokens = limits.max_draft_tokens if by_choice else limits.default_draft_tokens
    _check_int("speculation.max_draft_tokens", num_tokens, 0, limits.max_draft_tokens)
    width = 1 if asked.draft_width is None else asked.draft_width
    _check_int("speculation.draft_width", width, 1, MAX_DRAFT_WIDTH)
    if drafter == "auto" and asked.draft_width is not None:
        raise RequestError(
            f"speculation.draft_width is {width}, but with drafter 'auto' the server chooses it: "
            "name a drafter, or leave draft_width out",
            param="speculation.draft_width",
        )
    return _Chosen(drafter, num_tokens, width, verify)

"""From a body's fields to SamplingParams: names translated, defaults filled, the rest refused.

Ranges that belong to sampling are admission's to check; here only what this API narrows further.
"""

from __future__ import annotations

import re

import msgspec

from specserve.admission import MAX_LOGPROBS, MAX_N
from specserve.errors import RequestError
from specserve.server.wire import ChatBody, CompletionBody, GenerationBody
from specserve.types import SamplingParams, Speculation

MAX_COMPLETION_LOGPROBS = 5
MAX_BEST_OF = 20  # as OpenAI
MAX_PROMPT_LOGPROBS = 1 << 19  # numbers in one reply: some 60 MB while it is made
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI; a chat reply may fill the context
MAX_PARALLEL = MAX_N  # sequences that one request may start: prompts x n

_DEFAULTS = SamplingParams()
_TOKEN_ID = re.compile(r"-?\d{1,10}")

_UNSUPPORTED = (
    "logits_processors",
    "use_beam_search",
    "length_penalty",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
_UNSUPPORTED_COMPLETION = ("suffix",)
_UNSUPPORTED_CHAT = (
    "functions",
    "function_call",
    "chat_template",
    "documents",
    "audio",
)


def _asks_for_nothing(name: str, value: object) -> bool:
    if value is None or value is False or value in ("", "none", [], {}):
        return True
    return name == "length_penalty" and value == 1  # some clients send the default


def _refuse(name: str) -> RequestError:
    return RequestError(
        f"{name} is not supported yet by this server: leave it out",
        param=name,
        code="unsupported_parameter",
    )


def refuse_unsupported(body: CompletionBody | ChatBody) -> None:
    """RequestError for the first field that would change the answer and cannot be honoured."""
    chat = isinstance(body, ChatBody)
    fields = msgspec.structs.asdict(body)
    for name in (*_UNSUPPORTED, *(_UNSUPPORTED_CHAT if chat else _UNSUPPORTED_COMPLETION)):
        if not _asks_for_nothing(name, fields[name]):
            raise _refuse(name)


def sequences_per_prompt(body: CompletionBody) -> int:
    """best_of, or n where it is not given. RequestError names what is wrong with it."""
    n = _given_int(body.n, _DEFAULTS.n)
    if body.best_of is None:
        return n
    if not n <= body.best_of <= MAX_BEST_OF:
        raise RequestError(
            f"best_of is {body.best_of}, it must be from n ({n}) to {MAX_BEST_OF}", param="best_of"
        )
    if body.best_of > n and body.stream:
        raise RequestError(
            f"best_of is {body.best_of} and n is {n}: which are the best is known at the end only, "
            "so they cannot be streamed; leave out best_of or stream",
            param="best_of",
        )
    return body.best_of


def check_stream_options(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError(
            "stream_options is only allowed when stream is true: leave it out or set stream",
            param="stream_options",
        )


def check_prompt_logprobs(body: GenerationBody, params: SamplingParams, prompt_len: int) -> None:
    """prompt_len: tokens of all prompts together"""
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError(
            "prompt_logprobs has no place in a stream: leave out stream, or ask /v1/completions "
            "for echo with logprobs",
            param="prompt_logprobs",
        )
    if params.prompt_logprobs is None:
        return
    num_values = prompt_len * params.n * (1 + params.prompt_logprobs)
    if num_values > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"logprobs of {prompt_len} prompt tokens with n = {params.n} and "
            f"{params.prompt_logprobs} alternatives are {num_values} numbers, one reply holds "
            f"{MAX_PROMPT_LOGPROBS}: ask for fewer alternatives, or send several requests",
            param="logprobs" if body.prompt_logprobs is None else "prompt_logprobs",
        )


def check_parallel(num_prompts: int, n: int) -> None:
    if not 1 <= n <= MAX_PARALLEL:
        raise RequestError(f"n is {n}, it must be from 1 to {MAX_PARALLEL}", param="n")
    if num_prompts * n > MAX_PARALLEL:
        raise RequestError(
            f"{num_prompts} prompts with n = {n} make {num_prompts * n} sequences, one request may "
            f"start {MAX_PARALLEL}: send several requests",
            param="prompt" if n == 1 else "n",
        )


def completion_params(body: CompletionBody) -> SamplingParams:
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_COMPLETION_LOGPROBS:
        raise RequestError(
            f"logprobs is {body.logprobs}, it must be from 0 to {MAX_COMPLETION_LOGPROBS}",
            param="logprobs",
        )
    count = sequences_per_prompt(body)
    logprobs = body.logprobs
    if logprobs is None and count > _given_int(body.n, _DEFAULTS.n):
        logprobs = 0  # to be compared by
    only_prompt = asks_only_for_prompt(body)
    params = _params(body, max_tokens=1 if only_prompt else body.max_tokens, logprobs=logprobs)
    wanted = params.prompt_logprobs
    if body.echo and body.logprobs is not None and (wanted is None or 0 <= wanted < body.logprobs):
        wanted = body.logprobs
    return msgspec.structs.replace(params, n=count, prompt_logprobs=wanted)


def asks_only_for_prompt(body: CompletionBody) -> bool:
    """echo with max_tokens 0: the prompt again, with its logprobs. One token is made, not shown."""
    return bool(body.echo) and body.max_tokens == 0


def chat_params(body: ChatBody) -> SamplingParams:
    top = 0 if body.top_logprobs is None else body.top_logprobs
    if not 0 <= top <= MAX_LOGPROBS:
        raise RequestError(
            f"top_logprobs is {top}, it must be from 0 to {MAX_LOGPROBS}", param="top_logprobs"
        )
    if top and not body.logprobs:
        raise RequestError(
            f"top_logprobs is {top} but logprobs is not true: set logprobs", param="top_logprobs"
        )
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
    return _params(body, max_tokens=max_tokens, logprobs=top if body.logprobs else None)


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _given_int(value: int | None, default: int) -> int:
    return default if value is None else value


def _params(
    body: GenerationBody, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    default = _DEFAULTS
    return SamplingParams(
        n=_given_int(body.n, default.n),
        temperature=_given(body.temperature, default.temperature),
        top_k=_given_int(body.top_k, default.top_k),
        top_p=_given(body.top_p, default.top_p),
        min_p=_given(body.min_p, default.min_p),
        seed=body.seed,
        presence_penalty=_given(body.presence_penalty, default.presence_penalty),
        frequency_penalty=_given(body.frequency_penalty, default.frequency_penalty),
        repetition_penalty=_given(body.repetition_penalty, default.repetition_penalty),
        logit_bias=_logit_bias(body.logit_bias),
        allowed_token_ids=(
            None if body.allowed_token_ids is None else tuple(body.allowed_token_ids)
        ),
        bad_words=tuple(body.bad_words or ()),
        min_tokens=_given_int(body.min_tokens, default.min_tokens),
        max_tokens=max_tokens,
        stop=_stop_strings(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    """JSON has only string keys; OpenAI's are token ids in decimal."""
    out: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not _TOKEN_ID.fullmatch(key, endpos=64) or not key.isascii():
            raise RequestError(
                f"logit_bias has the key {key[:64]!r}, keys must be token ids in decimal",
                param="logit_bias",
            )
        out[int(key)] = value
    return out


def speculation(body: GenerationBody) -> Speculation | None:
    asked = body.speculation
    if asked is None:
        return None
    return Speculation(
        drafter=asked.drafter,
        max_draft_tokens=asked.max_draft_tokens,
        draft_width=asked.draft_width,
        verify=asked.verify,
    )

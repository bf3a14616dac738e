"""What a request's spans say of the operation: what was asked of the model, and what it did.

Numbers carry their metric's name. Texts are told only where the operator asked for it
(`--trace-content`): stop strings, schemas and ids of callers never are.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import msgspec
from aiohttp import web

from specserve.engine import Engine
from specserve.server.job import Job
from specserve.server.prompts import text_of
from specserve.server.state import CONTEXT, STATE
from specserve.server.tally import Tally
from specserve.server.tracing import AttributeValue
from specserve.server.wire import MessageBody
from specserve_observability import names

# Characters of one text, and ids of a prompt without text, that a span takes: what is queued for an
# exporter, and what one message to a collector holds, stay bounded.
MOST_CONTENT = 65_536
MOST_CONTENT_IDS = 4_096


def tell_job(request: web.Request, job: Job) -> None:
    """As the request asked, and what was put in for what it left out."""
    if not _is_traced(request):
        return
    params = job.params
    told: dict[str, AttributeValue] = {
        names.GEN_AI_PROVIDER: names.REQUEST_SERVICE,
        names.GEN_AI_REQUEST_MODEL: job.model,
        names.GEN_AI_TEMPERATURE: params.temperature,
        names.GEN_AI_TOP_P: params.top_p,
        names.GEN_AI_FREQUENCY_PENALTY: params.frequency_penalty,
        names.GEN_AI_PRESENCE_PENALTY: params.presence_penalty,
        names.GEN_AI_MAX_TOKENS: max(one.max_tokens for one in job.requests),
    }
    if params.n != 1:
        told[names.GEN_AI_CHOICE_COUNT] = params.n
    if params.top_k > 0:
        told[names.GEN_AI_TOP_K] = params.top_k
    if params.seed is not None:
        told[names.GEN_AI_SEED] = params.seed
    request[CONTEXT].operation.update(told)


def tell_reply(request: web.Request, job: Job, tally: Tally) -> None:
    """For the log's line, too."""
    usage = tally.usage()
    told: dict[str, AttributeValue] = {
        names.GEN_AI_RESPONSE_ID: job.reply_id,
        names.GEN_AI_RESPONSE_MODEL: job.model,
        names.GEN_AI_INPUT_TOKENS: usage.prompt_tokens,
        names.GEN_AI_OUTPUT_TOKENS: usage.completion_tokens,
        names.GEN_AI_CACHED_TOKENS: usage.prompt_tokens_details.cached_tokens,
    }
    if reasons := tally.finish_reasons:
        told[names.GEN_AI_FINISH_REASONS] = reasons
    if tally.complete:
        spec = tally.metrics().speculative_decoding
        told[names.SPEC_STEPS] = spec.num_spec_steps
        told[names.SPEC_DRAFT_TOKENS] = spec.num_draft_tokens
        told[names.SPEC_ACCEPTED_TOKENS] = spec.num_accepted_draft_tokens
        if spec.num_spec_steps:
            told[names.SPEC_ACCEPTANCE_RATE] = spec.draft_acceptance_rate
            told[names.SPEC_ACCEPTANCE_LENGTH] = spec.mean_acceptance_length
    if may_tell_content(request):
        said = (("assistant", _cut(text)) for text in tally.texts)
        told[names.GEN_AI_OUTPUT_MESSAGES] = _messages(said)
    request[CONTEXT].operation.update(told)


def tell_chat(request: web.Request, messages: Seq[MessageBody] | None) -> None:
    """The caller's messages, where that is allowed."""
    if may_tell_content(request):
        said = [(one.role, _cut(text_of(one.content or "", "messages"))) for one in messages or ()]
        request[CONTEXT].operation[names.GEN_AI_INPUT_MESSAGES] = _messages(said)


def tell_prompts(request: web.Request, engine: Engine, prompts: Seq[str | list[int]]) -> None:
    """Prompts without roles, where that is allowed."""
    if may_tell_content(request):
        texts = [
            one if isinstance(one, str) else engine.tokenizer.decode(one[:MOST_CONTENT_IDS])
            for one in prompts
        ]
        said = [("user", _cut(text)) for text in texts]
        request[CONTEXT].operation[names.GEN_AI_INPUT_MESSAGES] = _messages(said)


def may_tell_content(request: web.Request) -> bool:
    return request.app[STATE].settings.trace_content and _is_traced(request)


def _is_traced(request: web.Request) -> bool:
    return request[CONTEXT].span.own_traceparent is not None


def _cut(text: str) -> str:
    left_out = len(text) - MOST_CONTENT
    return text if left_out <= 0 else f"{text[:MOST_CONTENT]} [{left_out} characters more]"


def _messages(said: Iterable[tuple[str, str]]) -> str:
    """(role, text) as GenAI's conventions have messages."""
    parts = [{"role": role, "parts": [{"type": "text", "content": text}]} for role, text in said]
    return msgspec.json.encode(parts).decode()

"""Every span name and attribute key, in one place.

The gen_ai.* conventions are still in development and were renamed before: only this file follows
them. An own attribute has the name of the metric that counts the same thing, with dots.
Prompts and completions have two keys, which only `--trace-content` sets.
"""

from __future__ import annotations

from typing import Final

# resources
REQUEST_SERVICE: Final = "specserve"
ENGINE_SERVICE: Final = "specserve-engine"
SERVICE_NAME: Final = "service.name"
SERVICE_VERSION: Final = "service.version"
SERVICE_INSTANCE_ID: Final = "service.instance.id"
MODEL_TARGET: Final = "specserve.model.target"
MODEL_DRAFT: Final = "specserve.model.draft"
DEVICE: Final = "specserve.device"
CONFIG_HASH: Final = "specserve.config.hash"  # of the server's options: equal ones, equal servers

# span names, request side; the server span is named "{method} {route}", its child, which holds all
# that follows, "{operation} {model}"
REQUEST: Final = "request"  # root of a request that did not come over HTTP
TOKENIZE: Final = "tokenize"
COMPILE_GRAMMAR: Final = "compile_grammar"
QUEUE: Final = "queue"
PREFILL: Final = "prefill"
DECODE: Final = "decode"
DECODE_ROUNDS: Final = "decode.rounds"  # child of decode: a stretch of its steps
STREAM: Final = "stream"  # a streamed reply, from its headers to the last byte taken

# span names, engine side
ENGINE_WINDOW: Final = "engine.window"
ENGINE_STEP: Final = "engine.step"
PLAN: Final = "plan"
DRAFT: Final = "draft"
TARGET_FORWARD: Final = "target_forward"
VERIFY: Final = "verify"
COMMIT: Final = "commit"
DRAFTER_FAILURE: Final = "specserve.drafter_failure"  # event on engine.step, one per failure
REQUEST_OUTCOME: Final = "specserve.request_outcome"  # event on engine.step, one per row

# HTTP semantic conventions (stable)
HTTP_REQUEST_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_RESPONSE_STATUS_CODE: Final = "http.response.status_code"
URL_PATH: Final = "url.path"
URL_SCHEME: Final = "url.scheme"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
USER_AGENT: Final = "user_agent.original"
HTTP_RESPONSE_REQUEST_ID: Final = "http.response.header.x-request-id"
ERROR_TYPE: Final = "error.type"

# GenAI semantic conventions (development)
GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_CHOICE_COUNT: Final = "gen_ai.request.choice.count"  # where it is not 1
GEN_AI_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
GEN_AI_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
GEN_AI_SEED: Final = "gen_ai.request.seed"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"  # seconds
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_INPUT_MESSAGES: Final = "gen_ai.input.messages"  # JSON; only with --trace-content
GEN_AI_OUTPUT_MESSAGES: Final = "gen_ai.output.messages"  # likewise

# ours: one request
REQUEST_ID: Final = "specserve.request.id"
CLIENT_DISCONNECTED: Final = "specserve.client.disconnected"
STREAM_CHUNKS: Final = "specserve.stream.chunks"
STREAM_BLOCKED: Final = "specserve.stream.blocked"  # seconds that writes waited for the client
QUEUE_REASON: Final = "specserve.queue.reason"
PREFILL_CHUNK: Final = "specserve.prefill.chunk"
PREFILL_TOKENS: Final = "specserve.prefill.tokens"
PREFILL_CACHED_TOKENS: Final = "specserve.prefill.cached_tokens"
PREEMPTIONS: Final = "specserve.preemptions"
LATENCY_QUEUE: Final = "specserve.latency.queue"  # seconds, as all of these
LATENCY_PREFILL: Final = "specserve.latency.prefill"  # steps that computed a part of the prompt
LATENCY_PREFILL_WAIT: Final = "specserve.latency.prefill_wait"  # between them, others' prompts
LATENCY_DECODE: Final = "specserve.latency.decode"
LATENCY_TTFT: Final = "specserve.latency.ttft"
LATENCY_TPOT: Final = "specserve.latency.tpot"
DECODE_STEPS: Final = "specserve.decode.steps"
DECODE_LINKS_DROPPED: Final = "specserve.decode.links_dropped"

# ours: speculation, on decode (sums), on engine.step (sums over rows) and on its outcome events
SPEC_DRAFTER: Final = "specserve.spec.drafter"
SPEC_DRAFTERS: Final = "specserve.spec.drafters"
SPEC_STEPS: Final = "specserve.spec.steps"
SPEC_DRAFT_TOKENS: Final = "specserve.spec.draft_tokens"
SPEC_ACCEPTED_TOKENS: Final = "specserve.spec.accepted_tokens"
SPEC_EMITTED_TOKENS: Final = "specserve.spec.emitted_tokens"
SPEC_DRAFTED_AT_POSITION: Final = "specserve.spec.drafted_at_position"
SPEC_ACCEPTED_AT_POSITION: Final = "specserve.spec.accepted_at_position"
SPEC_DRAFTED_PER_STEP: Final = "specserve.spec.drafted_per_step"  # K of each step of the rounds
SPEC_ACCEPTED_PER_STEP: Final = "specserve.spec.accepted_per_step"
SPEC_ACCEPTANCE_RATE: Final = "specserve.spec.acceptance_rate"
SPEC_ACCEPTANCE_LENGTH: Final = "specserve.spec.acceptance_length"
SPEC_PREDICTED_ACCEPTED: Final = "specserve.spec.predicted_accepted_tokens"
SPEC_SECONDS: Final = "specserve.spec.seconds"  # of the step, for guesses; estimated in part
SPEC_NO_DRAFT_REASON: Final = "specserve.spec.no_draft_reason"
GENERATED_TOKENS: Final = "specserve.generated_tokens"

# ours: the engine
WINDOW_INDEX: Final = "specserve.window.index"
WINDOW_STEPS: Final = "specserve.window.steps"
WINDOW_SAMPLED_STEPS: Final = "specserve.window.sampled_steps"
STEP_INDEX: Final = "specserve.step.index"
STEP_KIND: Final = "specserve.step.kind"  # prefill | decode | mixed | empty
STEP_SECONDS: Final = "specserve.step.seconds"  # draft to last verdict, as the next one
STEP_PREDICTED_SECONDS: Final = "specserve.step.predicted_seconds"
STEP_SAMPLE_REASON: Final = "specserve.step.sample_reason"  # rate | slow | preempted | error
BATCH_REQUESTS: Final = "specserve.batch.requests"
BATCH_TOKENS: Final = "specserve.batch.tokens"
BATCH_PREFILL_TOKENS: Final = "specserve.batch.prefill_tokens"
BATCH_DECODE_TOKENS: Final = "specserve.batch.decode_tokens"
BATCH_TOKEN_BUDGET: Final = "specserve.batch.token_budget"  # noqa: S105 - not a password
REQUESTS_RUNNING: Final = "specserve.requests.running"
REQUESTS_WAITING: Final = "specserve.requests.waiting"
KV_BLOCKS_FREE: Final = "specserve.kv.blocks_free"
KV_BLOCKS_CACHED: Final = "specserve.kv.blocks_cached"
KV_BLOCKS_LIVE: Final = "specserve.kv.blocks_live"

"""What a person can set on the command line or as `LLM(...)` keywords. One field, one flag.

Every field's flag is its name with dashes; its help and default are said here and nowhere else.
"""

from __future__ import annotations

import argparse
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from specserve.config import DType, SpeculationMode
from specserve.types import VerifyRule


def _help(text: str) -> Any:  # msgspec.Meta is what Annotated takes
    return msgspec.Meta(description=text)


class EngineOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What makes an engine."""

    model: Annotated[str, _help("`demo`, a Hugging Face directory, a .gguf file, or a hub id")] = (
        "demo"
    )
    dtype: Annotated[
        DType, _help("of weights; auto: the fastest that costs no quality to speak of here")
    ] = "auto"
    draft_dtype: Annotated[
        DType, _help("the same, for drafters that are models, and for eagle3 heads")
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        _help("of the KV pool: auto: as the weights; fp8: e4m3, half of bf16's bytes, GPUs only"),
    ] = "auto"
    device: Annotated[
        Literal["cpu", "cuda"],
        _help("where models run; cuda: on a GPU, with Triton kernels; heads stay on the CPU"),
    ] = "cpu"
    backend: Annotated[
        str,
        _help("kernels: auto, native, triton, or torch with cpu or reference (slow, readable)"),
    ] = "auto"
    threads: Annotated[int, _help("threads for tensor work; 0: one per core")] = 0
    drafters: Annotated[
        str,
        _help(
            "guessers to load, by comma: suffix, ngram, eagle3:PATH, draft_model:PATH; none: "
            "nobody; auto: suffix, and the draft that is shipped for the model, if there is one"
        ),
    ] = "auto"
    speculation: Annotated[
        SpeculationMode,
        _help(
            "where a request says nothing: auto: who guesses, and how much, is chosen in each "
            "step by measured cost; fixed: the first of --drafters with --draft-tokens; off: nobody"
        ),
    ] = "auto"
    draft_tokens: Annotated[
        int, _help("K, guesses per step, where a drafter is named and no K, and with fixed")
    ] = 3
    max_draft_tokens: Annotated[int, _help("the largest K, asked for or chosen")] = 15
    draft_sharpness: Annotated[
        float | None,
        _help("beta: drafts are drawn from softmax(beta * log q); default: learned while serving"),
    ] = None
    itl_target_ms: Annotated[
        float | None,
        _help("choose no guesses that would make a step longer than this; default: no target"),
    ] = None
    verify: Annotated[
        VerifyRule,
        _help("replay: exact; block, rejection: same law, other text; typical: LOSSY, another law"),
    ] = "replay"
    max_model_len: Annotated[
        int | None, _help("tokens per sequence; default: what model and KV pool allow")
    ] = None
    max_num_seqs: Annotated[int, _help("sequences in one step")] = 32
    max_num_batched_tokens: Annotated[int, _help("token budget of one step")] = 512
    max_prefill_chunk: Annotated[int, _help("most prompt tokens of one sequence in a step")] = 512
    max_waiting: Annotated[int, _help("requests that may queue before new ones get 429")] = 1024
    block_size: Annotated[int, _help("token slots per KV block")] = 16
    memory_gb: Annotated[
        float | None,
        _help("memory budget in GiB; default: half of this machine's, or --gpu-memory-utilization"),
    ] = None
    gpu_memory_utilization: Annotated[
        float, _help("the part of a GPU's memory that weights, steps and KV pool may fill")
    ] = 0.9
    kv_cache_gb: Annotated[
        float | None,
        _help("upper limit of the KV pool in GiB; default: 1 in main memory, none on a GPU"),
    ] = None
    prefix_caching: Annotated[bool, _help("reuse the KV of shared prompt beginnings")] = True


class ServeOptions(EngineOptions, frozen=True, kw_only=True):
    """What makes a server."""

    host: Annotated[str, _help("address to listen on")] = "127.0.0.1"
    port: Annotated[int, _help("port to listen on; 0: any free one")] = 8000
    served_model_name: Annotated[
        str | None, _help("name in /v1/models; default: the --model given")
    ] = None
    otlp_endpoint: Annotated[
        str | None, _help("send traces to the OTLP collector at this URL, such as Jaeger's")
    ] = None
    otlp_protocol: Annotated[
        Literal["http/protobuf", "grpc"],
        _help("what it speaks there: at port 4318, 4317 by custom"),
    ] = "http/protobuf"
    trace_file: Annotated[str | None, _help("write traces to this file, OTLP JSON lines")] = None
    trace_file_mb: Annotated[
        int, _help("size at which it becomes FILE.1, FILE.1 FILE.2, and so on to FILE.3")
    ] = 256
    trace_steps_per_second: Annotated[
        float,
        _help("spans of ordinary steps; slow, failed and preempting ones come on top; inf: all"),
    ] = 20.0
    trace_exporter: Annotated[
        Literal["process", "thread"],
        _help("who makes and sends spans: a process beside the server, which costs it nothing"),
    ] = "process"
    trace_content: Annotated[bool, _help("put prompts and replies into spans, too")] = False
    record_steps: Annotated[
        str | None,
        _help("at the end write what each step chose there, for `study regret`; 20,000 at most"),
    ] = None
    log_format: Annotated[Literal["console", "json"], _help("how log lines look")] = "console"
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _help("least severe")] = (
        "info"
    )
    tool_call_parser: Annotated[
        Literal["auto", "none", "hermes", "llama3_json"],
        _help(
            "how the model writes calls of tools; auto: as its chat template does, or hermes, in "
            "its messages, where that knows none; none: tools are refused"
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        Literal["auto", "none", "qwen3", "deepseek_r1"],
        _help(
            "how replies reason: qwen3: between <think> marks, if any; deepseek_r1: always first; "
            "none: all is text; auto: qwen3 if the chat template knows the marks"
        ),
    ] = "auto"
    drain_seconds: Annotated[float, _help("how long SIGTERM waits for live streams")] = 30.0
    sse_keepalive_seconds: Annotated[
        float, _help("a comment on streams after this long without an event; 0: none")
    ] = 10.0
    max_connections: Annotated[
        int, _help("connections at a time; beyond them idle ones are closed, then new ones get 503")
    ] = 1000
    max_waiting_tokens: Annotated[
        int, _help("prompt tokens that may wait for a first token before new requests get 429")
    ] = 1_000_000
    api_key_file: Annotated[
        str | None,
        _help("ask for one of the API keys in this file, one a line, and of SPECSERVE_API_KEYS"),
    ] = None
    traffic_classes: Annotated[
        str | None,
        _help(
            "names by comma that metrics tell apart: of keys (`KEY class=NAME`), or x-traffic-class"
        ),
    ] = None
    metrics_compat: Annotated[
        Literal["none", "vllm"], _help("vllm: /metrics has vLLM's names, too, as plain text")
    ] = "none"
    max_concurrent_per_key: Annotated[
        int | None, _help("requests that one API key may have under way; default: any number")
    ] = None
    ssl_certfile: Annotated[
        str | None, _help("serve HTTPS: PEM file of the certificate and its chain")
    ] = None
    ssl_keyfile: Annotated[
        str | None, _help("PEM file of the private key; default: it is in --ssl-certfile")
    ] = None
    cors_origins: Annotated[
        str | None,
        _help("web pages that may use this server: origins by comma, or *; default: none"),
    ] = None


def add_option_arguments(parser: argparse.ArgumentParser, kind: type[msgspec.Struct]) -> None:
    """One argument per field of the Struct."""
    hints = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        annotation, meta = get_args(hints[field.name])
        flag = "--" + field.name.replace("_", "-")
        text = f"{meta.description} (default: {field.default})"
        if annotation is bool:
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=field.default, help=text
            )
        elif get_origin(annotation) is Literal:
            parser.add_argument(
                flag, choices=get_args(annotation), default=field.default, help=text
            )
        else:
            plain = next(t for t in (get_args(annotation) or (annotation,)) if t is not type(None))
            parser.add_argument(flag, type=plain, default=field.default, help=text)

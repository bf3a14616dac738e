"""Offline use: the same engine, driven from synchronous code. Shapes follow vLLM's `LLM`.

The engine's event loop runs on a thread of its own, so that notebooks with a loop work too.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
import weakref
from collections.abc import Coroutine
from collections.abc import Sequence as Seq
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from specserve.admission import constrained, make_requests
from specserve.bad_words import bad_word_ids
from specserve.chat_template import render_chat
from specserve.compose import build_engine
from specserve.constraint import GrammarSpec
from specserve.errors import ConfigError, EngineError, RequestError
from specserve.grammar import Grammars
from specserve.options import EngineOptions
from specserve.stream import merge
from specserve.types import (
    FinishReason,
    PromptLogprobs,
    Request,
    SamplingParams,
    SpecStats,
    Speculation,
    TokenChunk,
    TokenLogprobs,
)
from specserve_observability.recorder import Recorder

T = TypeVar("T")
Prompt = str | Seq[int]


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    speculation: SpecStats | None = None


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    num_cached_tokens: int = 0
    prompt_logprobs: list[PromptLogprobs | None] | None = None  # the first token's is None


class LLM:
    """A model in this process.

    >>> llm = LLM("demo")
    >>> llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text
    """

    def __init__(
        self, model: str = "demo", *, recorder: Recorder | None = None, **options: object
    ) -> None:
        """options: the fields of options.EngineOptions, as `dtype="fp32"`, `drafters="ngram"`.

        recorder: where steps and requests are recorded; None: counted only

        Raises ConfigError and ModelError, which say what to change.
        """
        unknown = set(options) - set(EngineOptions.__struct_fields__)
        if unknown:
            known = ", ".join(EngineOptions.__struct_fields__)
            raise ConfigError(f"LLM has no option {min(unknown)!r}, it has: {known}")
        try:
            chosen = msgspec.convert({"model": model, **options}, EngineOptions)
        except msgspec.ValidationError as error:
            raise ConfigError(f"an option of LLM has a wrong value: {error}") from error
        self._built = build_engine(chosen, recorder=recorder)
        self._engine = self._built.engine
        self._grammars = Grammars(self._engine.tokenizer)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="specserve-llm", daemon=True
        )
        self._thread.start()
        # Of a script that ends without shutdown(): later the loop's thread would not run any more,
        # and whoever waits for it would wait for ever.
        self._at_exit = weakref.finalize(self, _leave, self._loop, self._thread)
        self._run(self._engine.start())

    @property
    def model_path(self) -> Path:
        """The directory the weights were read from."""
        return self._built.model_path

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        speculation: Speculation | None = None,
        text_format: GrammarSpec | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt (text or token ids); all run in one batch, results in order.

        text_format: what every text must look like
        """
        listed = _as_list(prompts)
        tokenizer = self._engine.tokenizer
        ids = [tokenizer.encode(p) if isinstance(p, str) else list(p) for p in listed]
        texts = [p if isinstance(p, str) else None for p in listed]
        return self._complete(ids, texts, sampling_params, speculation, text_format)

    def chat(
        self,
        messages: Seq[dict[str, object]] | Seq[Seq[dict[str, object]]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        speculation: Speculation | None = None,
        text_format: GrammarSpec | None = None,
    ) -> list[RequestOutput]:
        """One conversation, or a list of them, through the model's chat template."""
        many: list[list[dict[str, object]]] = []
        if messages and isinstance(messages[0], dict):
            many.append([m for m in messages if isinstance(m, dict)])
        else:
            many += [list(c) for c in messages if not isinstance(c, dict)]
        ids = [render_chat(self._engine.tokenizer, conversation) for conversation in many]
        return self._complete(ids, [None] * len(ids), sampling_params, speculation, text_format)

    def shutdown(self) -> None:
        """Stop the engine and its threads; calling twice is fine."""
        if self._at_exit.detach() is None:
            return
        self._run(self._engine.stop())
        _end_loop(self._loop, self._thread)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.shutdown()

    # ---- inside --------------------------------------------------------------------------

    def _run(self, work: Coroutine[object, object, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        except BaseException:
            future.cancel()  # Ctrl-C: nobody waits for it any more
            raise

    def _complete(
        self,
        ids: list[list[int]],
        texts: list[str | None],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
        speculation: Speculation | None,
        text_format: GrammarSpec | None,
    ) -> list[RequestOutput]:
        params = _params_for(len(ids), sampling_params)
        groups = [
            make_requests(
                self._engine.limits,
                prompt,
                one,
                request_id=f"llm-{uuid.uuid4().hex}",
                speculation=speculation,
                bad_word_ids=bad_word_ids(self._engine.tokenizer, one.bad_words),
            )
            for prompt, one in zip(ids, params, strict=True)
        ]
        if text_format is not None:
            groups = [self._bound(group, text_format) for group in groups]
        chunks = self._run(self._run_all([request for group in groups for request in group]))
        results = []
        for group, text in zip(groups, texts, strict=True):
            mine = [chunks[request.request_id] for request in group]
            results.append(
                RequestOutput(
                    request_id=group[0].request_id,
                    prompt=text,
                    prompt_token_ids=list(group[0].prompt_ids),
                    outputs=[_output(i, chunk) for i, chunk in enumerate(mine)],
                    num_cached_tokens=mine[0].num_cached_tokens,
                    prompt_logprobs=_prompt_logprobs(group[0], mine[0]),
                )
            )
        return results

    def _bound(self, requests: list[Request], spec: GrammarSpec) -> list[Request]:
        constraints = [self._grammars.constraint(spec) for _ in requests]
        return constrained(requests, constraints, param=spec.param)

    async def _run_all(self, requests: list[Request]) -> dict[str, TokenChunk]:
        """Every request's whole output as one chunk; at most max_waiting are queued at a time."""
        places = asyncio.Semaphore(self._engine.config.max_waiting)

        async def one(request: Request) -> TokenChunk:
            async with places:
                whole: TokenChunk | None = None
                stream = self._engine.submit(request)
                try:
                    async for chunk in stream:
                        whole = chunk if whole is None else merge(whole, chunk)
                finally:
                    stream.close()  # when another failed or the caller gave up
            assert whole is not None
            if whole.unfollowable:
                raise RequestError(whole.error or "", code="unfollowable")
            if whole.error is not None:
                raise EngineError(whole.error)
            return whole

        async with asyncio.TaskGroup() as group:  # the first failure stops the rest
            tasks = [group.create_task(one(request)) for request in requests]
        return {task.result().request_id: task.result() for task in tasks}


def _leave(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """End all tasks where no thread can be started any more, so without the engine's own stop."""

    async def cancel_all() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(cancel_all(), loop).result()
    _end_loop(loop, thread)


def _end_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [[token for token in prompts if isinstance(token, int)]]
    return [prompt for prompt in prompts if not isinstance(prompt, int)]


def _params_for(
    count: int, given: SamplingParams | Seq[SamplingParams] | None
) -> list[SamplingParams]:
    if given is None:
        given = SamplingParams()
    if isinstance(given, SamplingParams):
        given = [given] * count
    if len(given) != count:
        raise ValueError(f"{len(given)} sampling_params for {count} prompts")
    return [_normal(params) for params in given]


def _normal(params: SamplingParams) -> SamplingParams:
    """Lists and single strings, as people write them, become the tuples a Request holds."""
    stop = (params.stop,) if isinstance(params.stop, str) else tuple(params.stop or ())
    allowed = params.allowed_token_ids
    return msgspec.structs.replace(
        params,
        stop=stop,
        stop_token_ids=tuple(params.stop_token_ids or ()),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_words=tuple(params.bad_words or ()),
    )


def _prompt_logprobs(request: Request, chunk: TokenChunk) -> list[PromptLogprobs | None] | None:
    asked = request.params.prompt_logprobs is not None
    return [None, *chunk.prompt_logprobs] if asked else None


def _output(index: int, chunk: TokenChunk) -> CompletionOutput:
    return CompletionOutput(
        index=index,
        text=chunk.text,
        token_ids=list(chunk.token_ids),
        finish_reason=chunk.finish_reason,
        stop_reason=chunk.stop_reason,
        logprobs=list(chunk.logprobs) or None,
        speculation=chunk.stats,
    )

"""A small OpenAI-style HTTP server around OpenVINO GenAI's continuous batching, for comparisons.

Run as a script by the Python of the environment that has openvino_genai and aiohttp; imports
nothing else. One thread adds requests, steps the pipeline and reads its handles; the event loop
streams. Greedy only. Each burst is decoded by itself, which is cheaper than correct text at
character boundaries and so flatters OpenVINO a little. One chunk per step and request, with token
ids, so that a client counts as it does for ours.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import json
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

Tokens = asyncio.Queue[list[int] | None]  # None: the text has ended


class Job:
    """One request on its way: the worker writes, the handler reads."""

    def __init__(self, prompt: Any, config: Any, push: Callable[[list[int] | None], None]) -> None:
        self.prompt = prompt  # openvino.Tensor [1, T] int64
        self.config = config
        self.push = push
        self.handle: Any = None  # openvino_genai.GenerationHandle
        self.cancelled = False


class Worker(threading.Thread):
    """Owns the pipeline: nothing of it is touched from another thread but its tokenizer."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__(daemon=True, name="pipeline")
        self._pipeline = pipeline
        self._incoming: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._ids = itertools.count()
        self._running: list[Job] = []

    def submit(self, job: Job) -> None:
        self._incoming.put(job)

    def run(self) -> None:
        while True:
            if not self._running:
                self._start(self._incoming.get())
            while not self._incoming.empty():
                self._start(self._incoming.get())
            self._pipeline.step()
            self._running = [job for job in self._running if self._deliver(job)]
            time.sleep(0)  # step() may keep the interpreter's lock: let the event loop have a turn

    def _start(self, job: Job) -> None:
        job.handle = self._pipeline.add_request(next(self._ids), job.prompt, job.config)
        self._running.append(job)

    def _deliver(self, job: Job) -> bool:
        """Pass new tokens on; False when the job is over."""
        if job.cancelled:
            job.handle.stop()
            return False
        while job.handle.can_read():
            for output in job.handle.read().values():
                job.push(list(output.generated_ids))
        if job.handle.get_status().name == "RUNNING":
            return True
        job.push(None)
        return False


class Service:
    """The routes. One choice, streamed or not."""

    def __init__(self, genai: Any, worker: Worker, tokenizer: Any, name: str, lookup: int) -> None:
        self._genai = genai
        self._worker = worker
        self._tokenizer = tokenizer
        self._name = name
        self._lookup = lookup

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self._name}]})

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self._genai.get_version()})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        text = self._tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
        return await self._answer(request, body, text, chat=True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        return await self._answer(request, body, body["prompt"], chat=False)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], text: str, *, chat: bool
    ) -> web.StreamResponse:
        prompt = self._tokenizer.encode(text, add_special_tokens=False).input_ids
        num_prompt = prompt.shape[1]
        loop = asyncio.get_running_loop()
        tokens: Tokens = asyncio.Queue()

        def push(ids: list[int] | None) -> None:
            loop.call_soon_threadsafe(tokens.put_nowait, ids)

        job = Job(prompt, self._config(body), push)
        self._worker.submit(job)
        try:
            if not body.get("stream"):
                ids = [token for burst in await _all(tokens) for token in burst]
                return web.json_response(self._chunk(chat, ids, num_prompt, len(ids), "length"))
            return await self._stream(request, tokens, num_prompt, chat=chat)
        finally:
            job.cancelled = True  # no effect where it has ended

    async def _stream(
        self, request: web.Request, tokens: Tokens, num_prompt: int, *, chat: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        num_tokens = 0
        while (ids := await tokens.get()) is not None:
            num_tokens += len(ids)
            await response.write(_event(self._chunk(chat, ids, num_prompt, num_tokens, None)))
        await response.write(_event(self._chunk(chat, [], num_prompt, num_tokens, "length")))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _config(self, body: dict[str, Any]) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens = int(body.get("max_tokens") or 16)
        config.do_sample = False
        config.ignore_eos = bool(body.get("ignore_eos"))
        if self._lookup:
            config.num_assistant_tokens = self._lookup
            config.max_ngram_size = 3
        return config

    def _chunk(
        self, chat: bool, ids: list[int], num_prompt: int, num_tokens: int, finish: str | None
    ) -> dict[str, Any]:
        text = self._tokenizer.decode(ids) if ids else ""
        choice: dict[str, Any] = {"index": 0, "token_ids": ids, "finish_reason": finish}
        choice |= {"delta": {"content": text}} if chat else {"text": text}
        return {
            "model": self._name,
            "choices": [choice],
            "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_tokens},
        }


async def _all(tokens: Tokens) -> list[list[int]]:
    bursts = []
    while (ids := await tokens.get()) is not None:
        bursts.append(ids)
    return bursts


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="folder that optimum-cli export openvino has written")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--name", required=True, help="what /v1/models says")
    parser.add_argument("--slots", type=int, default=16, help="sequences in one step")
    parser.add_argument("--lookup-tokens", type=int, default=0, help="prompt lookup; 0: off")
    options = parser.parse_args()
    # Its own environment's: not importable where this file is checked and tested.
    genai: Any = importlib.import_module("openvino_genai")
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.max_num_seqs = options.slots
    scheduler.max_num_batched_tokens = 512
    scheduler.enable_prefix_caching = False
    properties = {"prompt_lookup": True} if options.lookup_tokens else {}
    pipeline = genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)
    worker = Worker(pipeline)
    worker.start()
    service = Service(genai, worker, pipeline.get_tokenizer(), options.name, options.lookup_tokens)
    app = web.Application()
    app.router.add_get("/v1/models", service.models)
    app.router.add_get("/version", service.version)
    app.router.add_post("/v1/chat/completions", service.chat)
    app.router.add_post("/v1/completions", service.completions)
    web.run_app(app, host="127.0.0.1", port=options.port, print=None, access_log=None)


if __name__ == "__main__":
    main()

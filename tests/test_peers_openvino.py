"""OpenVINO's HTTP side, over a pipeline that only counts."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from specserve_loadgen.peers_measure import (
    Cell,
)
from specserve_loadgen.peers_openvino import Service, Worker
from specserve_loadgen.prompts import Message, Prompt
from specserve_loadgen.run import run_load
from specserve_loadgen.settings import ClosedLoop, Settings

CHAT_1 = Cell(workload="chat", concurrency=1)
PREFILL = Cell(workload="prefill", concurrency=1)


class FakeHandle:
    """Two tokens a step until `left` is 0."""

    def __init__(self, num_tokens: int) -> None:
        self.left = num_tokens
        self.unread: list[int] = []

    def step(self) -> None:
        for _ in range(min(2, self.left)):
            self.unread.append(self.left)
            self.left -= 1

    def can_read(self) -> bool:
        return bool(self.unread)

    def read(self) -> dict[int, Any]:
        ids, self.unread = self.unread, []
        return {0: SimpleNamespace(generated_ids=ids)}

    def get_status(self) -> Any:
        return SimpleNamespace(name="RUNNING" if self.left else "FINISHED")

    def stop(self) -> None:
        self.left = 0


class FakePipeline:
    def __init__(self) -> None:
        self.handles: list[FakeHandle] = []

    def add_request(self, request_id: int, prompt: Any, config: Any) -> FakeHandle:
        handle = FakeHandle(config.max_new_tokens)
        self.handles.append(handle)
        return handle

    def step(self) -> None:
        time.sleep(0.001)
        for handle in self.handles:
            handle.step()


class FakeTokenizer:
    def apply_chat_template(self, messages: list[dict[str, str]], **options: bool) -> str:
        return "user: " + messages[0]["content"]

    def encode(self, text: str, **options: bool) -> Any:
        return SimpleNamespace(input_ids=SimpleNamespace(shape=(1, len(text.split()))))

    def decode(self, ids: list[int]) -> str:
        return "".join(f" {token}" for token in ids)


async def test_openvinos_server_streams_bursts_with_ids_and_counts() -> None:
    genai = SimpleNamespace(GenerationConfig=SimpleNamespace, get_version=lambda: "fake")
    worker = Worker(FakePipeline())
    worker.start()
    service = Service(genai, worker, FakeTokenizer(), "demo", lookup=0)
    app = web.Application()
    app.router.add_get("/v1/models", service.models)
    app.router.add_post("/v1/chat/completions", service.chat)
    app.router.add_post("/v1/completions", service.completions)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        result = await run_load(
            Settings(
                url=f"http://127.0.0.1:{port}",
                load=ClosedLoop(3),
                num_requests=6,
                max_tokens=5,
                ignore_eos=True,
            ),
            [Prompt(prompt_id="0", category="chat", messages=(Message("user", "one two"),))],
        )
    finally:
        await runner.cleanup()
    assert [record.failure for record in result.records] == [None] * 6
    assert {record.num_output_tokens for record in result.records} == {5}
    assert {record.num_prompt_tokens for record in result.records} == {3}
    assert {record.num_chunk_tokens for record in result.records} == {5}
    assert {record.counted_by for record in result.records} == {"token_ids"}

"""Mixed load with clients that leave, faults and a SIGTERM; storms of clients that only come to
leave. Every request that was taken ends as documented, and nothing of any is left behind.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any  # JSON

import pytest

from specserve.memory import MIB
from tests.raw_http import Reply, ask, connect, strict_json
from tests.server_process import CHATTER, FAULT, ServerProcess, a_server_process
from tests.test_server_fuzz import ADD, check_events

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="looks into /proc")

NUM_CLIENTS = 16
REFUSALS = ("queue_full", "server_stopping", "grammar_timeout")
DRAFTERS = ("none", "oracle", "anti", "part", "ngram", "auto")


# ---- mixed load ------------------------------------------------------------------------------


class Soak:
    """Clients beside each other, and somebody who reads the metrics all the time."""

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self.server = server
        self.luck = random.Random(seed)
        self.endings: Counter[str] = Counter()
        self.rss: list[int] = []  # bytes, between rounds
        self.num_scrapes = 0
        self._stopping = False

    async def round(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        await asyncio.gather(*(self._client(deadline) for _ in range(NUM_CLIENTS)))
        await self.server.is_idle()
        self.rss.append(self.server.rss)

    async def last_round(self, seconds: float) -> int:
        """SIGTERM while all clients are busy; the exit status."""
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(self._client(time.monotonic() + 60))
            await asyncio.sleep(seconds)
            self.server.process.send_signal(signal.SIGTERM)
            self._stopping = True  # from here on nobody asks for anything new
        return await asyncio.to_thread(self.server.process.wait, 60)

    async def watch(self) -> None:
        """Counters never go down, gauges never below zero, and no block is lost."""
        before = await self.server.metrics()
        total = _num_blocks(before)
        while True:
            now = await self.server.metrics()
            self.num_scrapes += 1
            for series, value in before.items():
                assert value >= 0, series
                if _is_counter(series):
                    assert now[series] >= value, (series, value, now[series])
            assert _num_blocks(now) == total
            before = now
            await asyncio.sleep(0.1)

    async def _client(self, deadline: float) -> None:
        while time.monotonic() < deadline and not self._stopping:
            self.endings[await self._visit()] += 1

    async def _visit(self) -> str:
        path, body, text = self._request()
        async with connect(self.server.port) as connection:
            await connection.request("POST", path, body)
            if self.luck.random() < 0.3:
                await asyncio.sleep(self.luck.random() * 0.3)
                if self.luck.random() < 0.5:
                    connection.reset()
                return "left"
            async with asyncio.timeout(120):
                reply = await connection.read_reply()
        return _ending(body, reply, text)

    def _request(self) -> tuple[str, dict[str, Any], str | None]:
        """Path, body, and the text that must come if it is known."""
        luck = self.luck
        prompt = "x" * luck.randrange(0, 120) + ":"
        if luck.random() < 0.05:
            prompt = FAULT + prompt
        max_tokens = luck.randrange(1, 60)
        body: dict[str, Any] = {
            "temperature": 0,
            "stream": luck.random() < 0.5,
            "speculation": {"drafter": luck.choice(DRAFTERS)},
            "cache_salt": luck.choice([None, "a"]),
            "priority": luck.randrange(-1, 2),
        }
        kind = luck.choice(["completions", "completions", "chat", "grammar", "tools", "items"])
        if kind == "completions":
            n = luck.choice([1, 1, 3])
            body |= {"prompt": prompt, "n": n, "max_tokens": max_tokens}
            return "/v1/completions", body, CHATTER[:max_tokens] * n
        if kind == "grammar":
            regex = f"[a-z]{{1,9}}{luck.randrange(50)}"
            body |= {"prompt": prompt, "structured_outputs": {"regex": regex}, "max_tokens": 30}
            return "/v1/completions", body, None
        message = {"role": "user", "content": prompt}
        if kind == "items":
            path = luck.choice(["/v1/responses", "/v1/messages"])
            asked = {"input": prompt, "max_output_tokens": max_tokens}
            if path == "/v1/messages":
                asked = {"model": "test", "messages": [message], "max_tokens": max_tokens}
            return path, body | asked, None
        body |= {"messages": [message], "max_tokens": max_tokens}
        if kind == "tools":
            tools = [{"type": "function", "function": ADD}]
            return "/v1/chat/completions", body | {"tools": tools, "tool_choice": "required"}, None
        return "/v1/chat/completions", body, CHATTER[:max_tokens]


def _is_counter(series: str) -> bool:
    return series.split("{")[0].endswith(("_total", "_count", "_sum", "_bucket"))


def _num_blocks(metrics: dict[str, float]) -> float:
    return sum(value for key, value in metrics.items() if key.startswith("specserve_kv_blocks"))


def _ending(body: dict[str, Any], reply: Reply, text: str | None) -> str:
    """How a request ended; AssertionError if that is no way to end."""
    said = (body, reply)
    faulty = FAULT in str(body)
    if reply.status in (400, 429, 503):  # a grammar waits for its turn ten seconds at most
        assert strict_json(reply.body)["error"]["code"] in REFUSALS, said
        return "refused"
    if reply.status != 200:
        assert (reply.status, faulty) == (500, True), said
        return "told that it failed"
    if body["stream"]:
        check_events(said, reply.body, faulty)
        if b'"error"' in reply.body or b"response.failed" in reply.body:
            return "told that it failed"
    if text is not None:
        assert _text(reply, stream=body["stream"]) == text, said
    return "finished"


def _text(reply: Reply, *, stream: bool) -> str:
    """All choices', one after the other."""
    choices = [
        choice
        for part in (reply.events[:-1] if stream else [reply.json()])
        for choice in part["choices"]
    ]
    choices.sort(key=lambda choice: choice["index"])
    messages = [choice.get("delta") or choice.get("message") or choice for choice in choices]
    return "".join(one.get("text") or one.get("content") or "" for one in messages)


async def run_soak(folder: Path, *, rounds: int, seconds: float) -> Soak:
    """rounds: of so many seconds each, the last of which SIGTERM cuts short"""
    with a_server_process(folder, slow_every=100, fail_every=20) as server:
        soak = Soak(server, seed=rounds)
        await soak.round(1)
        files, tasks = server.num_files, await server.tasks()
        watching = asyncio.create_task(soak.watch())
        for _ in range(rounds):
            await soak.round(seconds)
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            assert watching.cancelled(), watching.exception()
            await server.has_only(files, tasks)
            watching = asyncio.create_task(soak.watch())
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert await soak.last_round(min(seconds, 3)) == 0, server.log[-2000:]
        assert "request_failed" not in server.log
    print(dict(soak.endings), f"{soak.num_scrapes} scrapes, RSS", [at // MIB for at in soak.rss])
    return soak


@pytest.mark.timeout(300)
async def test_mixed_load_with_faults_and_a_sigterm_loses_no_request(tmp_path: Path) -> None:
    soak = await run_soak(tmp_path, rounds=4, seconds=4)
    assert {"finished", "left", "told that it failed"} <= set(soak.endings)
    assert soak.num_scrapes > 8


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_ten_minutes_of_mixed_load_lose_no_request_and_no_memory(tmp_path: Path) -> None:
    soak = await run_soak(tmp_path, rounds=20, seconds=30)
    assert {"finished", "left", "told that it failed"} <= set(soak.endings)
    assert soak.rss[-1] < soak.rss[5] + 32 * MIB


# ---- storms of aborts ------------------------------------------------------------------------


async def come_and_go(server: ServerProcess, luck: random.Random, idx: int) -> None:
    """Ask for something and vanish: in the queue, in prefill, decode or while a grammar is made."""
    body: dict[str, Any] = {"prompt": "say:", "max_tokens": 300, "ignore_eos": True}
    body["stream"] = luck.random() < 0.5
    stage = luck.randrange(4)
    if stage == 0:
        body |= {"n": 4}
    if stage == 1:
        body["prompt"] = [luck.randrange(256) for _ in range(80)]  # in no prefix cache
    if stage == 2:  # a grammar nobody has asked for before
        regex = f"([a-z]|[0-9])*a{{1,{20 + idx % 50}}}([a-z]){{{idx % 17}}}x{idx}"
        body |= {"structured_outputs": {"regex": regex}, "ignore_eos": False, "n": 3}
    if stage == 3:
        body |= {"speculation": {"drafter": "anti", "max_draft_tokens": 8}}
    async with connect(server.port) as connection:
        await connection.request("POST", "/v1/completions", body)
        await asyncio.sleep(luck.random() * 0.1)
        if luck.random() < 0.5:
            connection.reset()
        else:
            connection.writer.close()


async def run_storm(folder: Path, seconds: int) -> None:
    """500 a second, if this machine can."""
    luck = random.Random(seconds)
    with a_server_process(folder) as server:
        good: dict[str, Any] = {"prompt": "say:", "temperature": 0, "max_tokens": 49}
        shaped = {**good, "structured_outputs": {"regex": "[a-c]{5}x"}}
        await asyncio.gather(*(come_and_go(server, luck, idx) for idx in range(50)))
        await server.is_idle()
        files, tasks = server.num_files, await server.tasks()
        rss = server.rss
        started = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for idx in range(500 * seconds):
                group.create_task(come_and_go(server, luck, idx))
                await asyncio.sleep(max(0.0, started + idx / 500 - time.monotonic()))
        rate = 500 * seconds / (time.monotonic() - started)
        await server.is_idle()
        await server.has_only(files, tasks)
        for body, length in ((good, 49), (shaped, 6)):
            reply = await ask(server.port, "POST", "/v1/completions", body)
            assert len(reply.json()["choices"][0]["text"]) == length
        assert "request_failed" not in server.log
        print(f"{rate:.0f} aborts/s, RSS {rss // MIB} -> {server.rss // MIB} MiB")


@pytest.mark.timeout(300)
async def test_a_thousand_clients_that_come_only_to_leave_leave_nothing(tmp_path: Path) -> None:
    await run_storm(tmp_path, 2)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_storm_of_half_a_minute_leaves_nothing_behind(tmp_path: Path) -> None:
    await run_storm(tmp_path, 30)

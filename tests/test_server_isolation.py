"""What one client must not learn of another, and what nobody may read off metrics and traces."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence as Seq
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any  # JSON

import msgspec
import pytest
import torch
from torch import Tensor

from specserve.kv_cache import KVCache
from specserve.memory import MIB
from specserve.models.decoder import Decoder
from specserve.server.errors import public_text
from specserve_kernels.interface import PagedBatch
from tests.guessers import make_guesser
from tests.http_server import CONFIG, a_server
from tests.raw_http import ask, connect
from tests.scripted import TOOL_TEMPLATE, VOCAB_SIZE, says
from tests.server_process import a_server_process
from tests.test_server_tools import ADD, LARGE
from tests.tiny_models import tiny_decoder
from tests.ways import PLAIN, Way, a_real_server, a_scripted_server

pytestmark = pytest.mark.timeout(180)

SECRET = "xyzzy-plugh"


# ---- the prefix cache ----------------------------------------------------------------------------


async def test_cached_tokens_are_told_within_a_salt_and_never_across(way: Way) -> None:
    async with a_scripted_server(says("hello")) as server:

        async def cached(**body: object) -> int:
            reply = await server.complete(prompt="a shared beginning:", **body)
            details: dict[str, int] = reply.json()["usage"]["prompt_tokens_details"]
            return details["cached_tokens"]

        await way.hear(server, prompt="a shared beginning:", cache_salt="one", max_tokens=9)
        for other in ({"cache_salt": "two"}, {}, {"cache_salt": "one "}, {"cache_salt": "ONE"}):
            assert await cached(**other) == 0, other
        assert await cached(cache_salt="one") > 0
        assert await cached() > 0  # of those without a salt, the one before


class _Poisoning:
    """A real decoder; before each forward, all KV that no row may read becomes enormous.

    That is whatever belongs to nobody in the batch, and in a row's own blocks what lies behind its
    context: rejected guesses, and what the blocks held before.
    """

    def __init__(self, inner: Decoder) -> None:
        self._inner = inner
        self.vocab_size = inner.vocab_size
        self.dtype = inner.dtype
        self.num_poisoned = 0

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        return self._inner.new_kv_cache(num_blocks, block_size)

    def kv_bytes_per_token(self) -> int:
        return self._inner.kv_bytes_per_token()

    def forward(
        self,
        input_ids: Tensor,  # [T]
        positions: Tensor,  # [T]
        batch: PagedBatch,
        kv_cache: KVCache,
        logits_indices: Seq[int],
    ) -> Tensor:  # [L, V]
        layers, num_blocks, block_size, kv_heads, head_dim = kv_cache.keys.shape
        unread = torch.ones(num_blocks * block_size, dtype=torch.bool)
        for table, context_len in zip(batch.block_tables, batch.context_lens, strict=True):
            for at in range(context_len):
                unread[table[at // block_size] * block_size + at % block_size] = False
        for tensor in (kv_cache.keys, kv_cache.values):
            tensor.view(layers, -1, kv_heads, head_dim)[:, unread] = 1e6
        self.num_poisoned += int(unread.sum())
        return self._inner.forward(input_ids, positions, batch, kv_cache, logits_indices)


async def test_what_was_freed_or_rejected_is_never_read(way: Way) -> None:
    # Every running row is in every batch, and no block is kept for a prompt to come.
    config = msgspec.structs.replace(
        CONFIG, enable_prefix_caching=False, num_blocks=40, max_num_batched_tokens=512
    )
    asked = [{"prompt": [7 * idx % 250, idx, 3, 4, 5], "max_tokens": 25} for idx in range(9)]
    async with a_real_server() as world:
        plain = [await world.plain(**one) for one in asked]
    model = _Poisoning(tiny_decoder(vocab=VOCAB_SIZE, seed=3))
    drafters = {
        name: make_guesser(name, world.model, world.truth, config)
        for name in ("oracle", "anti", "ngram")
    }
    async with a_server(says(""), config=config, model=model, drafters=drafters) as server:
        said = await asyncio.gather(*(way.hear(server, **one) for one in asked))
    assert [one.token_ids for one in said] == [one.token_ids for one in plain]
    assert model.num_poisoned > 400


# ---- metrics and traces --------------------------------------------------------------------------


async def test_nothing_that_clients_write_is_in_metrics_traces_or_logs(tmp_path: Path) -> None:
    """A request's id, by which its caller wants to find it, is in log lines and nowhere else."""
    caller_id = "the-id-of-somebody"
    with a_server_process(tmp_path) as server:
        body: dict[str, Any] = {
            "prompt": f"{SECRET}:", "user": SECRET, "request_id": caller_id, "cache_salt": SECRET,
            "bad_words": [SECRET], "stop": SECRET, "metadata": {"x": SECRET},
            "prediction": {"type": "content", "content": SECRET},
        }  # fmt: skip
        headers = {"x-request-id": caller_id, "referer": SECRET}
        messages = [{"role": "user", "content": SECRET}]
        for more in (
            {},
            {"stream": True},
            {"model": SECRET},
            {"n": -1},
            {"logit_bias": {SECRET: 1}},
        ):
            await ask(server.port, "POST", "/v1/completions", {**body, **more}, headers=headers)
        await ask(server.port, "POST", "/v1/chat/completions", {"messages": messages})
        await ask(server.port, "POST", "/v1/messages", {"model": SECRET, "messages": messages})
        await ask(server.port, "GET", f"/{SECRET}?{SECRET}")
        counted = str(await server.metrics())
        assert SECRET not in counted
        assert caller_id not in counted
        server.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.process.wait, 60) == 0
        assert '"decode"' in server.trace
        assert SECRET not in server.trace
        assert caller_id not in server.trace
        assert SECRET not in server.log
        assert "Well!" not in server.trace + server.log  # nor what the model said


def test_by_default_only_this_machine_is_listened_to(tmp_path: Path) -> None:
    with a_server_process(tmp_path) as server:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        listening = [row[1] for row in rows if row[3] == "0A"]
        [local] = [at for at in listening if int(at.split(":")[1], 16) == server.port]
        assert local.split(":")[0] == "0100007F"


# ---- readers that are slow, by the dozen ---------------------------------------------------------


async def test_fifty_slow_readers_take_bounded_memory_and_hold_up_nobody(tmp_path: Path) -> None:
    wide = {"prompt": "say:", "max_tokens": 300, "ignore_eos": True, "logprobs": 5, "stream": True}
    with a_server_process(tmp_path) as server:
        await ask(server.port, "POST", "/v1/completions", wide)
        before = server.rss
        async with AsyncExitStack() as stack:
            slow = [
                await stack.enter_async_context(connect(server.port, receive_buffer=4096))
                for _ in range(50)
            ]
            for connection in slow:
                await connection.request("POST", "/v1/completions", wide)
            quick = {"prompt": "say:", "temperature": 0, "max_tokens": 20, "priority": -1}
            for _ in range(5):
                reply = await ask(server.port, "POST", "/v1/completions", quick)
                assert len(reply.json()["choices"][0]["text"]) == 20
            await server.is_idle()
            assert server.rss < before + 64 * MIB
        await server.is_idle()


# ---- text that parsers stumble over --------------------------------------------------------------

STUMBLING = {
    "marks": "<tool_call>" * 3000, "half marks": "<tool_cal" * 4000, "braces": "{" * 30_000,
    "quotes": '{"name": "add", "arguments": {"a": "' + "\\" * 30_001, "thoughts": "</think" * 4000,
    "slashes": "/a" * 30_000, "spaces": " " * 60_000 + "x", "zeros": "0x" * 30_000,
}  # fmt: skip


@pytest.mark.parametrize("kind", STUMBLING)
async def test_text_that_begins_like_something_is_read_once(kind: str) -> None:
    """Backtracking over any of these would take hours, and this test has two minutes."""
    text = STUMBLING[kind]
    assert len(public_text(text)) <= 300
    assert len(public_text("x" + text)) <= 300
    async with a_server(says(text[:230]), config=LARGE, template=TOOL_TEMPLATE) as server:
        tools = [{"type": "function", "function": ADD["function"]}]
        history = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "function": {"name": "add", "arguments": text}},
            ]},
        ]  # fmt: skip
        long = await server.chat(messages=history, tools=tools, max_tokens=1)
        assert long.status == 400  # far longer than the context
        reply = await server.chat(tools=tools, max_tokens=230)
        assert reply.status == 200
        salted = await server.complete(logit_bias={text: 1}, cache_salt="a")
        assert salted.status == 400


async def test_a_control_token_spelt_in_a_stop_string_is_text() -> None:
    async with a_server(says("ab<|end|>cd")) as server:
        said = await PLAIN.hear(server, stop="<|end|>", max_tokens=30)
        assert (said.text, said.stop_reason) == ("ab", "<|end|>")
        whole = await PLAIN.hear(server, max_tokens=30)
        assert whole.text == "ab<|end|>cd"

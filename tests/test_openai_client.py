"""The official client against a real port: sync and async, chat and completions, errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar, cast

import msgspec
import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionMessageParam

from tests.http_server import CONFIG, Pace, Server, a_server
from tests.scripted import BROKEN, TOOL_TEMPLATE, by_first_letter, says
from tests.test_server_tools import ADD, ARGUMENTS, CALL, LARGE

pytestmark = pytest.mark.timeout(60)

TEXT = "héllo 🎉 wörld"
T = TypeVar("T")


@asynccontextmanager
async def a_client(server: Server, retries: int = 0) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=server.base_url, api_key="none", max_retries=retries
    ) as client:
        yield client


async def with_sync_client(server: Server, use: Callable[[openai.OpenAI], T]) -> T:
    def call() -> T:
        with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
            return use(client)

    return await asyncio.to_thread(call)


async def collect_texts(stream: openai.AsyncStream[Completion], texts: list[str]) -> None:
    async for chunk in stream:
        texts.append(chunk.choices[0].text)  # noqa: PERF401 - kept when the stream raises


async def test_chat_whole_and_streamed_say_the_same() -> None:
    async with a_server(says(TEXT)) as server, a_client(server) as client:
        whole = await client.chat.completions.create(
            model="test",
            messages=[{"role": "user", "content": "say"}],
            temperature=0,
            logprobs=True,
        )
        stream = await client.chat.completions.create(
            model="test",
            messages=[{"role": "user", "content": "say"}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"speculation": {"drafter": "oracle"}},
        )
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.content == TEXT
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].logprobs is not None
    assert whole.usage is not None
    streamed = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(streamed) == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].model_extra is not None
    assert chunks[-1].model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] > 0


async def test_completions_whole_and_streamed_say_the_same() -> None:
    async with a_server(says(TEXT)) as server, a_client(server) as client:
        whole = await client.completions.create(
            model="test", prompt="say:", temperature=0, max_tokens=40, logprobs=2, n=2
        )
        stream = await client.completions.create(
            model="test", prompt="say:", temperature=0, max_tokens=40, stream=True
        )
        text = "".join([chunk.choices[0].text async for chunk in stream])
    assert [choice.text for choice in whole.choices] == [TEXT, TEXT]
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.tokens is not None
    assert len(whole.choices[0].logprobs.tokens) == len(TEXT.encode()) + 1
    assert text == TEXT


async def test_the_sync_client_reads_both_endpoints_and_the_models() -> None:
    def use(client: openai.OpenAI) -> tuple[str, str, str, list[str]]:
        chat = client.chat.completions.create(
            model="test", messages=[{"role": "user", "content": "say"}], temperature=0
        )
        stream = client.chat.completions.create(
            model="test",
            messages=[{"role": "user", "content": "say"}],
            temperature=0,
            stream=True,
        )
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        completion = client.completions.create(
            model="test", prompt="say:", temperature=0, max_tokens=40
        )
        models = [model.id for model in client.models.list()]
        return chat.choices[0].message.content or "", streamed, completion.choices[0].text, models

    async with a_server(says(TEXT)) as server:
        assert await with_sync_client(server, use) == (TEXT, TEXT, TEXT, ["test"])


async def test_a_closed_stream_stops_its_generation() -> None:
    pace = Pace()
    async with (
        a_server(says("x", then=None), on_forward=pace) as server,
        a_client(server) as client,
    ):
        stream = await client.completions.create(
            model="test", prompt="say:", max_tokens=200, stream=True
        )
        pace.allow(2)
        async for _ in stream:
            break
        await stream.close()
        assert await pace.steps_until_idle(server) <= 4


async def test_a_fault_of_the_request_is_the_clients_own_error_class_and_is_not_retried() -> None:
    async with a_server(says(TEXT)) as server, a_client(server, retries=2) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.completions.create(model="test", prompt="say:", temperature=3)
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model="test", prompt="a" * 999)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="gpt-4", prompt="say:")
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("gpt-4")
    assert (bad.value.param, bad.value.type) == ("temperature", "invalid_request_error")
    assert bad.value.request_id is not None
    assert long.value.code == "context_length_exceeded"
    assert missing.value.code == "model_not_found"


async def test_a_failure_mid_stream_is_raised_after_the_text_that_came() -> None:
    script = by_first_letter({"b": says("12345", then=BROKEN)})
    async with a_server(script) as server, a_client(server) as client:
        stream = await client.completions.create(
            model="test", prompt="b:", temperature=0, stream=True
        )
        texts: list[str] = []
        with pytest.raises(openai.APIError, match="engine failed while"):
            await collect_texts(stream, texts)
        assert "".join(texts) == "12345"
        with pytest.raises(openai.InternalServerError) as whole:
            await client.completions.create(model="test", prompt="b:", temperature=0)
    assert whole.value.code == "engine_error"


async def test_a_full_queue_is_a_rate_limit_that_a_retry_gets_past() -> None:
    pace = Pace()
    config = msgspec.structs.replace(CONFIG, max_num_seqs=1, max_waiting=1)
    async with (
        a_server(says("hello"), config=config, on_forward=pace) as server,
        a_client(server) as hasty,
        a_client(server, retries=2) as patient,
    ):
        first = [asyncio.create_task(server.complete())]
        await server.has(running=1)
        first.append(asyncio.create_task(server.complete()))
        await server.has(running=1, waiting=1)
        with pytest.raises(openai.RateLimitError) as full:
            await hasty.completions.create(model="test", prompt="say:")
        assert full.value.code == "queue_full"
        retried = asyncio.create_task(
            patient.completions.create(model="test", prompt="say:", temperature=0)
        )
        pace.allow(100)
        assert (await retried).choices[0].text == "hello"
        assert [reply.status for reply in await asyncio.gather(*first)] == [200, 200]


async def test_a_function_is_called_and_its_result_is_taken_back() -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "say"}]
    async with (
        a_server(says(f"Well. {CALL}"), config=LARGE, template=TOOL_TEMPLATE) as server,
        a_client(server) as client,
    ):
        tools = cast(list[ChatCompletionFunctionToolParam], [ADD])
        whole = await client.chat.completions.create(
            model="test", messages=messages, tools=tools, temperature=0
        )
        async with client.chat.completions.stream(
            model="test", messages=messages, tools=tools, temperature=0
        ) as stream:
            async for _ in stream:
                pass
            streamed = (await stream.get_final_completion()).choices[0]
        for choice in (whole.choices[0], streamed):
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content == "Well. "
            [call] = choice.message.tool_calls or []
            assert call.type == "function"
            assert (call.function.name, call.function.arguments) == ("add", ARGUMENTS)
        said = cast(ChatCompletionMessageParam, whole.choices[0].message.to_dict())
        result: ChatCompletionMessageParam = {
            "role": "tool",
            "tool_call_id": call.id,
            "content": "3",
        }
        after = await client.chat.completions.create(
            model="test", messages=[*messages, said, result], tools=tools, max_tokens=1
        )
        assert after.usage is not None

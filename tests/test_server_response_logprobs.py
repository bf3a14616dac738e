"""Log-probabilities of /v1/responses: of its texts alone, the same whole, streamed and guessed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http_server import a_server
from tests.scripted import says
from tests.test_openai_client import a_client
from tests.test_server_responses import (
    LOGPROBS,
    TOOL,
    a_responses_server,
    ask,
    named_events,
    plain,
)
from tests.test_server_tools import CALL

pytestmark = pytest.mark.timeout(60)


def ends_of_texts(events: list[Any]) -> list[Any]:
    return [event for event in events if event["type"] == "response.output_text.done"]


@pytest.mark.parametrize("drafter", ["none", "oracle", "anti", "part"])
async def test_each_text_has_the_logprobs_of_its_own_tokens(drafter: str) -> None:
    """A token is a byte here. Reasoning, calls, marks and the space around them have none; what
    ended the reply is with the text that it ended."""
    options = {
        "tools": [TOOL],
        "include": LOGPROBS,
        "top_logprobs": 2,
        "speculation": {"drafter": drafter, "max_draft_tokens": 8},
    }
    async with a_responses_server(f"<think>so</think>Né: {CALL}\n{CALL} then") as server:
        whole = (await ask(server, **options)).json()
        events = named_events(await ask(server, **options, stream=True))
    final = events[-1]["response"]
    assert plain(final["output"]) == plain(whole["output"])
    assert whole["top_logprobs"] == 2
    _, before, _, _, behind = whole["output"]
    for item, text, ending in ((before, "Né: ", b""), (behind, " then", b"<|end|>")):
        [content] = item["content"]
        assert content["text"] == text
        spelt = b"".join(bytes(one["bytes"]) for one in content["logprobs"])
        assert spelt == text.encode() + ending
        assert all(len(one["top_logprobs"]) == 2 for one in content["logprobs"])
    for done in ends_of_texts(events):
        own = [event for event in events if event.get("item_id") == done["item_id"]]
        assert done["logprobs"] == [
            one for event in own if "delta" in event for one in event["logprobs"]
        ]
        assert done["logprobs"]


async def test_logprobs_of_a_plain_text_are_those_of_a_chat() -> None:
    """With the token that ended it."""
    asked: dict[str, Any] = {"temperature": 1, "seed": 3, "top_logprobs": 1, "max_tokens": 20}
    asked["max_output_tokens"] = 20
    chat = {**asked, "messages": [{"role": "user", "content": "say"}], "logprobs": True}
    async with a_server(says("één, twee")) as server:
        for more in ({}, {"stop_token_ids": [ord("w")]}, {"ignore_eos": True}):
            ours = await ask(server, **asked, **more, include=LOGPROBS)
            events = named_events(await ask(server, **asked, **more, include=LOGPROBS, stream=True))
            theirs = await server.post("/v1/chat/completions", {**chat, **more})
            expected = theirs.json()["choices"][0]["logprobs"]["content"]
            assert ours.json()["output"][0]["content"][0]["logprobs"] == expected
            assert ends_of_texts(events)[0]["logprobs"] == expected
            assert len(expected) > 1


async def test_the_official_client_reads_logprobs() -> None:
    async with a_responses_server("<think>so</think>hello") as server, a_client(server) as client:
        asked: dict[str, Any] = {"model": "test", "input": "say", "temperature": 0}
        asked |= {"include": LOGPROBS, "top_logprobs": 3}
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            deltas = [e async for e in stream if e.type == "response.output_text.delta"]
            streamed = await stream.get_final_response()
    message = next(item for item in whole.output if item.type == "message")
    [content] = message.content
    assert content.type == "output_text"
    assert content.logprobs is not None
    assert "".join(one.token for one in content.logprobs).startswith("hello")
    assert [len(one.top_logprobs) for one in content.logprobs] == [3] * len(content.logprobs)
    told = [one for event in deltas for one in event.logprobs]
    assert [one.logprob for one in told] == [one.logprob for one in content.logprobs]
    assert whole.top_logprobs == streamed.top_logprobs == 3

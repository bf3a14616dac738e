"""Log-probabilities of prompts over HTTP: vLLM's prompt_logprobs, OpenAI's echo with logprobs."""

from __future__ import annotations

import asyncio
from typing import Any  # Any: JSON

import pytest

from specserve.server import params
from tests.http_server import Server, a_server
from tests.scripted import BOS, BROKEN, END, says

ECHO = {"echo": True, "logprobs": 2, "max_tokens": 3}


async def echoed(server: Server, *, stream: bool, **body: object) -> list[dict[str, Any]]:
    """Every choice with its text and logprobs, put together from its events where streamed."""
    reply = await server.complete(stream=stream, **{**ECHO, **body})
    assert reply.status == 200, reply.body
    if not stream:
        choices: list[dict[str, Any]] = reply.json()["choices"]
        return choices
    whole: dict[int, dict[str, Any]] = {}
    for event in reply.events[:-1]:
        for choice in event["choices"]:
            known = whole.setdefault(choice["index"], {"text": "", "logprobs": {}})
            known["text"] += choice["text"]
            known["finish_reason"] = choice["finish_reason"]
            for name, values in choice["logprobs"].items():
                known["logprobs"].setdefault(name, []).extend(values)
    return [whole[idx] for idx in sorted(whole)]


def check_offsets(choice: dict[str, Any]) -> None:
    """Every token is found in the text where its offset says."""
    logprobs = choice["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"].startswith(token, offset)


@pytest.mark.parametrize("drafter", ["none", "oracle", "anti"])
@pytest.mark.parametrize("stream", [True, False])
async def test_echo_with_logprobs_has_those_of_the_prompt_first(stream: bool, drafter: str) -> None:
    async with a_server(says("hello")) as server:
        asked = {"prompt": ["say it:", "b:"], "n": 2, "speculation": {"drafter": drafter}}
        choices = await echoed(server, stream=stream, **asked)
        plain = await server.complete(**asked, logprobs=2, max_tokens=3, prompt_logprobs=2)
    assert [choice["text"] for choice in choices] == ["say it:hel"] * 2 + ["b:hel"] * 2
    for choice, other in zip(choices, plain.json()["choices"], strict=True):
        found, text, num_prompt = choice["logprobs"], choice["text"], len(choice["text"]) - 3
        assert found["tokens"] == list(text)
        assert found["text_offset"] == list(range(len(text)))
        assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
        assert found["token_logprobs"][num_prompt:] == other["logprobs"]["token_logprobs"]
        assert found["top_logprobs"][num_prompt:] == other["logprobs"]["top_logprobs"]
        assert other["prompt_logprobs"][0] is None
        assert found["token_logprobs"][1:num_prompt] == [
            entry[str(ord(token))]["logprob"]
            for token, entry in zip(text[1:num_prompt], other["prompt_logprobs"][1:], strict=True)
        ]
        check_offsets(choice)


async def test_prompt_logprobs_are_spelt_as_vllm_spells_them() -> None:
    """The scripted model is all but sure of its next letter: here of the one the prompt has."""
    async with a_server(says("hello")) as server:
        of_completion = (await server.complete(prompt=":help", prompt_logprobs=1)).json()
        of_chat = (await server.chat(prompt_logprobs=1, max_tokens=1)).json()
        without = (await server.complete(prompt=":help")).json()
    entries = of_completion["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    for letter, entry in zip("hel", entries[1:4], strict=True):
        assert [*entry] == [str(ord(letter))]
        assert (entry[str(ord(letter))]["rank"], entry[str(ord(letter))]["decoded_token"]) == (
            1,
            letter,
        )
    unlikely, likely = entries[4].values()  # "p", where the model would say "l": the token's first
    assert (unlikely["decoded_token"], likely["decoded_token"], likely["rank"]) == ("p", "l", 1)
    assert unlikely["rank"] > 1
    assert unlikely["logprob"] < likely["logprob"] < 0
    assert len(of_chat["prompt_logprobs"]) == of_chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in of_chat["choices"][0]
    assert "prompt_logprobs" not in without["choices"][0]


@pytest.mark.parametrize("stream", [True, False])
async def test_with_max_tokens_0_only_the_prompt_comes_back(stream: bool) -> None:
    """As evaluation harnesses ask for the likelihood of given texts."""
    async with a_server(says("hello")) as server:
        prompts = ["a:", "bc:", "d:"]
        choices = await echoed(server, stream=stream, prompt=prompts, max_tokens=0, logprobs=1)
        usage = (await server.complete(prompt=prompts, **{**ECHO, "max_tokens": 0})).json()["usage"]
    assert [choice["text"] for choice in choices] == prompts
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [2, 3, 2]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 0)


async def test_offsets_are_of_the_text_that_comes_back() -> None:
    """Split characters, control tokens among a prompt's ids, and such as its text spells."""
    prompts: list[object] = [
        "é→:", [BOS, *b"ids:"], [*b"a", END, *b"b:"], "x<|user|>y:", "long one:",
    ]  # fmt: skip
    texts = ["é→:hel", "ids:hel", "ab:hel", "x<|user|>y:hel", "one:hel"]
    async with a_server(says("hello")) as server:
        for prompt, text in zip(prompts, texts, strict=True):
            cut = {"truncate_prompt_tokens": 4} if prompt == "long one:" else {}
            [choice] = await echoed(server, stream=False, prompt=prompt, **cut)
            assert choice["text"] == text
            assert choice["logprobs"]["text_offset"][-3:] == [*range(len(text) - 3, len(text))]
            shown = [
                (token, offset)
                for token, offset in zip(
                    choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"], strict=True
                )
                if not token.startswith(("bytes:", "<|bos|>", "<|end|>"))
            ]
            assert all(text.startswith(token, offset) for token, offset in shown)


async def test_fewer_alternatives_are_shown_where_fewer_were_asked_for() -> None:
    async with a_server(says("hello")) as server:
        for num_prompt, num_shown in ((5, 0), (1, 3)):
            [choice] = await echoed(
                server, stream=False, prompt="zz:", logprobs=num_shown, prompt_logprobs=num_prompt
            )
            # The token itself is there, too, where it is not among the likeliest.
            tops = choice["logprobs"]["top_logprobs"][1:]
            assert all(max(1, num_shown) <= len(top) <= num_shown + 1 for top in tops)
            entries = choice["prompt_logprobs"][1:]
            assert all(num_prompt <= len(entry) <= num_prompt + 1 for entry in entries)


async def test_more_numbers_than_a_reply_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(params, "MAX_PROMPT_LOGPROBS", 60)
    async with a_server(says("hello")) as server:
        fits = await server.complete(prompt=["abc:", "de:"], n=2, prompt_logprobs=3)
        assert fits.status == 200  # 7 * 2 * 4 = 56
        for body in ({"prompt_logprobs": 4}, {"echo": True, "logprobs": 4}):
            refused = await server.complete(prompt=["abc:", "de:"], n=2, **body)
            assert refused.status == 400
            assert refused.error["param"] in body
            assert "70 numbers" in refused.error["message"]


async def test_a_prompt_without_a_law_fails_alone() -> None:
    """Where the script says BROKEN, the scripted model's logits are no numbers."""
    fine = says("hello")
    async with a_server(lambda known: BROKEN if list(known) == [1] else fine(known)) as server:
        broken, other = await asyncio.gather(
            server.complete(prompt=[1, *b"a:"], prompt_logprobs=1),
            server.complete(prompt="a:", prompt_logprobs=1),
        )
        assert (broken.status, other.status) == (500, 200)
        assert (await server.complete(prompt=[1, *b"a:"])).status == 200  # nobody asks for it


@pytest.mark.parametrize(
    ("last", "more", "begins"),
    [
        ({"role": "assistant", "content": "hel"}, {"continue_final_message": True}, "hel"),
        ({"role": "assistant", "content": [{"type": "text", "text": "well "}]}, {}, "well "),
        ({"role": "user", "content": "say"}, {}, ""),
    ],
)
async def test_a_chat_repeats_the_last_message_where_it_is_the_assistants(
    last: dict[str, Any], more: dict[str, Any], begins: str
) -> None:
    """As vLLM does: once, before each choice's own text, whole and streamed."""
    body = {"messages": [{"role": "user", "content": "say"}, last], "n": 2, **more}
    body["add_generation_prompt"] = not more
    async with a_server(says("hello")) as server:
        without = await server.chat(**body)
        whole = await server.chat(**body, echo=True)
        events = (await server.chat(**body, echo=True, stream=True)).events
    texts = ["", ""]
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    for idx, text in enumerate(texts):
        own, echoed_text = (
            reply.json()["choices"][idx]["message"]["content"] for reply in (without, whole)
        )
        assert echoed_text == text == begins + own
    assert (
        whole.json()["usage"]["completion_tokens"] == without.json()["usage"]["completion_tokens"]
    )

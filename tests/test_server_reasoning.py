"""Reasoning told from the reply, whatever the bursts, and switched by the template's own word."""

from __future__ import annotations

from typing import Any

import pytest

from specserve.server.call_reader import CALL_FORMATS, CallReader
from specserve.server.parts import Joined, PlainReader, Text, joined
from specserve.server.readers import ReplyFormat
from specserve.server.state import ServerSettings
from specserve.server.thinking import ThinkReader
from specserve.server.tools import ToolUse
from specserve.types import SamplingParams
from tests.http_server import a_server
from tests.scripted import byte_tokenizer, says
from tests.test_server_tools import ADD, ARGUMENTS, CALL, LARGE

pytestmark = pytest.mark.timeout(60)

# As Qwen 3's: earlier reasoning is shown, and who does not want any gets an empty one.
THINK_TEMPLATE = (
    "{% for tool in tools or [] %}<tools>{{ tool | tojson }}<tool_call>{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|assistant|>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{% else %}<|user|>{% endif %}{{ message.content }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)


def read(pieces: list[str], *, opened: bool) -> Joined:
    reader = ThinkReader(PlainReader(), opened=opened)
    parts = [*(part for piece in pieces for part in reader.push(piece)), *reader.finish()]
    reply = "".join(pieces)
    for part in parts:
        if isinstance(part, Text):
            assert reply[part.at :].startswith(part.text)
    return joined(parts)


@pytest.mark.parametrize(
    ("reply", "opened", "reasoning", "text"),
    [
        ("<think>so</think>ok", False, "so", "ok"),
        ("\n<think>\nso\n</think>\n\nok", False, "\nso\n", "\n\nok"),
        ("ok", False, "", "ok"),
        ("", False, "", ""),
        ("", True, "", ""),
        (" \n", False, "", " \n"),
        ("so</think>ok", True, "so", "ok"),
        ("<think>so</think>ok", True, "so", "ok"),
        ("so", True, "so", ""),
        ("<think>so", False, "so", ""),
        ("<think>a </th b</think>c</think>", False, "a </th b", "c</think>"),
        ("<thin ice", False, "", "<thin ice"),
        ("ok <think>no</think>", False, "", "ok <think>no</think>"),
        ("</think>ok", True, "", "ok"),
        ("</think>ok", False, "", "</think>ok"),
    ],
)
def test_reasoning_is_told_from_text_wherever_the_reply_is_cut(
    reply: str, opened: bool, reasoning: str, text: str
) -> None:
    cuts = [[reply], list(reply)]
    cuts += [[reply[:at], reply[at:]] for at in range(len(reply))]
    cuts += [[reply[:at], reply[at : at + 3], reply[at + 3 :]] for at in range(len(reply))]
    for pieces in cuts:
        read_so = read(pieces, opened=opened)
        assert (read_so.reasoning, read_so.text) == (reasoning, text), pieces


def test_no_part_of_a_mark_leaves_before_it_is_known_to_be_none() -> None:
    reader = ThinkReader(PlainReader(), opened=False)
    given = [joined(reader.push(char)) for char in "<think>a<b</think>c"]
    assert [part.reasoning for part in given if part.reasoning] == ["a", "<b"]
    assert [part.text for part in given if part.text] == ["c"]


def test_a_call_behind_reasoning_is_made_and_one_inside_is_not() -> None:
    reader = ThinkReader(CallReader(CALL_FORMATS["hermes"], ["add"]), opened=True)
    reply = joined([*reader.push(f"perhaps {CALL}</think>\n\n{CALL}"), *reader.finish()])
    assert reply.reasoning == f"perhaps {CALL}"
    assert (reply.text, [call.arguments for call in reply.calls]) == ("", [ARGUMENTS])
    assert reader.calls


def a_thinking_server(reply: str, template: str = THINK_TEMPLATE, parser: str = "auto") -> Any:
    settings = ServerSettings(reasoning_parser=parser)
    return a_server(says(reply), config=LARGE, settings=settings, template=template)


def deltas(events: list[Any], field: str) -> str:
    return "".join(event["choices"][0]["delta"].get(field, "") for event in events)


@pytest.mark.parametrize("drafter", ["none", "oracle", "anti", "part"])
@pytest.mark.parametrize("k", [1, 4, 8])
async def test_reasoning_is_the_same_whole_and_streamed_whoever_guesses(
    drafter: str, k: int
) -> None:
    options = {"speculation": {"drafter": drafter, "max_draft_tokens": k}}
    async with a_thinking_server("<think>é so</think>then 🎉") as server:
        whole = (await server.chat(**options)).json()["choices"][0]
        events = (await server.chat(**options, stream=True)).events[:-1]
        for max_tokens in (7, 9, 15, 20):
            cut = (await server.chat(**options, max_tokens=max_tokens)).json()["choices"][0]
            parts = (await server.chat(**options, max_tokens=max_tokens, stream=True)).events[:-1]
            assert (cut["message"]["content"] or "") == deltas(parts, "content")
            assert cut["message"].get("reasoning_content", "") == deltas(parts, "reasoning_content")
    assert whole["message"]["reasoning_content"] == deltas(events, "reasoning_content") == "é so"
    assert whole["message"]["content"] == deltas(events, "content") == "then 🎉"
    assert whole["finish_reason"] == "stop"


@pytest.mark.parametrize("n", [1, 2])
async def test_reasoning_tokens_are_counted_once_all_replies_are_whole(n: int) -> None:
    thought = n * len("<think>é so</think>".encode())
    streaming = {"stream": True, "n": n, "stream_options": {"include_usage": True}}
    async with a_thinking_server("<think>é so</think>then 🎉") as server:
        whole = (await server.chat(n=n)).json()["usage"]
        *chunks, last, _ = (await server.chat(**streaming)).events
        streaming["stream_options"] = {"continuous_usage_stats": True}
        running = (await server.chat(**streaming)).events[0]["usage"]
        plain = (await server.complete()).json()["usage"]
    for usage in (whole, last["usage"]):
        assert usage["completion_tokens_details"] == {"reasoning_tokens": thought}
    assert "completion_tokens_details" not in running
    assert "completion_tokens_details" not in plain
    assert chunks


async def test_a_reply_that_was_cut_while_reasoning_has_no_content() -> None:
    async with a_thinking_server("<think>so it is</think>then") as server:
        whole = (await server.chat(max_tokens=12)).json()["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == (None, "length")
    assert whole["message"]["reasoning_content"] == "so it"


async def test_a_template_may_open_the_reasoning_itself() -> None:
    opening = THINK_TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"
    # Scripted replies begin behind the mark of the assistant: the model "repeats" what is there.
    async with a_thinking_server("<think>\nso</think>then", opening) as server:
        message = (await server.chat()).json()["choices"][0]["message"]
        assert message["reasoning_content"] == "so"
        assert message["content"] == "then"
        question = [{"role": "user", "content": "what is <think>"}]
        template_says = await server.chat(messages=question, max_tokens=2)
        assert template_says.json()["choices"][0]["message"]["content"] is None


async def test_users_and_switches_decide_whether_there_is_reasoning() -> None:
    async with a_thinking_server("then") as server:
        question = [{"role": "user", "content": "what is <think>"}]
        message = (await server.chat(messages=question)).json()["choices"][0]["message"]
        assert message["content"] == "then"
        assert "reasoning_content" not in message
    async with a_thinking_server("<think></think>then") as server:
        without = {"chat_template_kwargs": {"enable_thinking": False}, "return_token_ids": True}
        reply = (await server.chat(**without)).json()
        text = server.engine.tokenizer.decode(reply["prompt_token_ids"], skip_special_tokens=False)
        assert text.endswith("<|assistant|><think></think>")
        assert reply["choices"][0]["message"]["content"] == "then"
        for refused in ({"messages": []}, {"enable_thinking": "no"}, {"x": True}):
            bad = await server.chat(chat_template_kwargs=refused)
            assert (bad.status, bad.error["param"]) == (400, "chat_template_kwargs")
        for taken in ({"enable_thinking": True}, {"thinking": None}, {}):
            assert (await server.chat(chat_template_kwargs=taken)).status == 200


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_earlier_reasoning_is_shown_to_the_template_and_may_be_continued(field: str) -> None:
    history = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", field: "c"},
        {"role": "user", "content": "d"},
    ]
    async with a_thinking_server("then") as server:
        reply = (await server.chat(messages=history, return_token_ids=True, max_tokens=1)).json()
        text = server.engine.tokenizer.decode(reply["prompt_token_ids"])
        assert text == "a<think>c</think>bd"
    begun = [history[0], {"role": "assistant", "content": "<think>so"}]
    async with a_thinking_server("<think>so it is</think>then") as server:
        reply = await server.chat(
            messages=begun, continue_final_message=True, add_generation_prompt=False
        )
        message = reply.json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (" it is", "then")


async def test_where_it_is_not_looked_for_marks_are_text() -> None:
    async with a_thinking_server("<think>so</think>then", parser="none") as server:
        message = (await server.chat()).json()["choices"][0]["message"]
        assert message["content"] == "<think>so</think>then"
    async with a_thinking_server("so</think>then", parser="deepseek_r1") as server:
        message = (await server.chat()).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("so", "then")
    async with a_thinking_server(f"<think>so</think>{CALL}") as server:
        choice = (await server.chat(tools=[ADD])).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["reasoning_content"] == "so"
        assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


def test_marks_that_are_control_tokens_are_kept_where_they_are_looked_for() -> None:
    params = SamplingParams()
    plain = ReplyFormat.of(byte_tokenizer(THINK_TEMPLATE), "auto", "auto")
    assert plain.readable(params, ToolUse()).skip_special_tokens
    tokenizer = byte_tokenizer(THINK_TEMPLATE, "</think>")
    special = ReplyFormat.of(tokenizer, "auto", "auto")
    assert not special.readable(params, ToolUse()).skip_special_tokens
    assert ReplyFormat.of(tokenizer, "auto", "none").readable(params, ToolUse()) == params
    tools = ToolUse(names=frozenset({"add"}))
    llama = byte_tokenizer("{{ tools }}<|python_tag|>", "<|python_tag|>")
    assert not ReplyFormat.of(llama, "auto", "auto").readable(params, tools).skip_special_tokens
    assert ReplyFormat.of(llama, "auto", "auto").readable(params, ToolUse()) == params

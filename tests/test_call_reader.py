"""Calls of functions in a reply's text: found, streamed, and never at the price of text."""

from __future__ import annotations

import itertools
import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.server.call_reader import CALL_FORMATS, CallReader
from specserve.server.parts import CallArguments, CallStart, Joined, Part, Text, joined
from tests.plain_call_reader import PlainCallReader

NAMES = ("get_weather", "add")
CALL_MARKS = ("<tool_call>", "</tool_call>", "<|python_tag|>")


def read(layout: str, pieces: list[str], max_calls: int | None = None) -> tuple[list[Part], bool]:
    reader = CallReader(CALL_FORMATS[layout], NAMES, max_calls)
    parts = [part for piece in pieces for part in reader.push(piece)]
    parts += reader.finish()
    return parts, reader.calls


def summary(reply: Joined) -> tuple[str, list[tuple[str, str]]]:
    return reply.text, [(call.name, call.arguments) for call in reply.calls]


def places(parts: list[Part]) -> list[int]:
    """Of each character of text, where it stands in the reply."""
    texts = [part for part in parts if isinstance(part, Text)]
    return [part.at + idx for part in texts for idx in range(len(part.text))]


WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
ADD = '{"name": "add", "arguments": {"a": 1, "b": [-2.5e3, true, null]}}'
PARIS = ("get_weather", '{"city": "Paris"}')
SUM = ("add", '{"a": 1, "b": [-2.5e3, true, null]}')


def tagged(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


# layout, reply, text, calls, whether they are to be made
REPLIES: list[tuple[str, str, str, list[tuple[str, str]], bool]] = [
    ("hermes", "just text", "just text", [], False),
    ("hermes", "", "", [], False),
    ("hermes", " \n", " \n", [], False),
    ("hermes", tagged(WEATHER), "", [PARIS], True),
    ("hermes", tagged(WEATHER, ADD), "", [PARIS, SUM], True),
    ("hermes", f"<tool_call>{WEATHER}{ADD}</tool_call>", "", [PARIS, SUM], True),
    ("hermes", f"Let me see.\n{tagged(WEATHER)}\n", "Let me see.\n", [PARIS], True),
    ("hermes", f"{tagged(WEATHER)} and then?", " and then?", [PARIS], True),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "",
     [("add", '{"a": 1}')], True),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")], True),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"x": "a\nb"}}</tool_call>', "",
     [("add", '{"x": "a\\nb"}')], True),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"x": "</tool_call>{\\"}"}}', "",
     [("add", '{"x": "</tool_call>{\\"}"}')], True),
    # its last brace is missing, or its end tag, or half of that
    ("hermes", tagged(WEATHER[:-1]), "", [PARIS], True),
    ("hermes", f"<tool_call>{WEATHER}", "", [PARIS], True),
    ("hermes", f"<tool_call>{WEATHER}</tool_", "", [PARIS], True),
    # no calls
    ("hermes", "<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", [], False),
    ("hermes", '<tool_call>{"name": "rm"}</tool_call>', '<tool_call>{"name": "rm"}</tool_call>',
     [], False),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', [],
     False),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}', '<tool_call>{"name": "add", '
     '"arguments": [1]}', [], False),
    ("hermes", "<tool_call>", "<tool_call>", [], False),
    ("hermes", "a <tool_ call", "a <tool_ call", [], False),
    ("hermes", '<tool_call>{"name": "add", "x": 01}', '<tool_call>{"name": "add", "x": 01}', [],
     False),
    ("hermes", "<tool_call>{oops}" + tagged(WEATHER), "<tool_call>{oops}", [PARIS], True),
    (WEATHER, WEATHER, WEATHER, [], False),
    # cut, or broken when it had begun: what was said of it stays, and it is not to be made
    ("hermes", tagged(WEATHER)[:60], "", [("get_weather", '{"city": "P')], False),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a" 1}}', "1}}", [("add", '{"a" ')],
     False),
    ("llama3_json", WEATHER.replace("arguments", "parameters"), "", [PARIS], True),
    ("llama3_json", f"<|python_tag|>{WEATHER}; {ADD}", "", [PARIS, SUM], True),
    ("llama3_json", f"  {WEATHER}", "", [PARIS], True),
    ("llama3_json", f"{WEATHER}{{}}", "{}", [PARIS], True),
    ("llama3_json", '{"type": "function", "name": "add", "parameters": {}}', "", [("add", "{}")],
     True),
    ("llama3_json", '{"city": "Paris"}', '{"city": "Paris"}', [], False),
    ("llama3_json", '{"name": "Anna", "age": 5}', '{"name": "Anna", "age": 5}', [], False),
    ("llama3_json", f"I say {WEATHER}", f"I say {WEATHER}", [], False),
    ("llama3_json", "<|python_tag|>search.call()", "<|python_tag|>search.call()", [], False),
    ("llama3_json", "[1, 2]", "[1, 2]", [], False),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "reply", "text", "calls", "made"), REPLIES)
def test_a_reply_is_read_the_same_however_it_is_cut(
    layout: str, reply: str, text: str, calls: list[tuple[str, str]], made: bool
) -> None:
    layout = layout if layout in CALL_FORMATS else "hermes"  # an object without marks
    cuts = [[reply], list(reply)]
    cuts += [[reply[:at], reply[at:]] for at in range(1, len(reply))]
    for pieces in cuts:
        parts, says_so = read(layout, pieces)
        assert summary(joined(parts)) == (text, calls), pieces
        assert says_so == made


FRAGMENTS = st.lists(
    st.sampled_from(
        [*CALL_MARKS, '{"name": "add"', ', "arguments": {', "1", "true", *'"}{[]:,\\ \n-;aé']
    ),
    max_size=30,
).map("".join)


@given(reply=FRAGMENTS, layout=st.sampled_from(sorted(CALL_FORMATS)), seed=st.integers(0, 99))
def test_any_text_cut_anywhere_gives_the_same_parts_and_calls_whose_arguments_are_json(
    reply: str, layout: str, seed: int
) -> None:
    whole, made = read(layout, [reply])
    chance = random.Random(seed)
    pieces, at = [], 0
    while at < len(reply):
        length = chance.randint(1, 5)
        pieces.append(reply[at : at + length])
        at += length
    parts, made_too = read(layout, pieces)
    assert (summary(joined(parts)), made_too) == (summary(joined(whole)), made)
    if made:
        for call in joined(parts).calls:
            assert isinstance(json.loads(call.arguments), dict)
    if not joined(parts).calls:
        assert joined(parts).text == reply


# Pieces that lead deep into the format, and where they meet out of it again.
ODD = st.lists(
    st.sampled_from(
        [
            *CALL_MARKS,
            *('{"name": "add"', ', "arguments": {', '"name"', '"arguments"', '"x"', '"'),
            *(
                '{"name": "get_weather", "arguments": {"x": [',
                "]}}",
                '"a\nb"',
                '"\\u00e9"',
                '"\\u0',
            ),
            *("0,", '"",', '"": 0,', "[],", "{}", "01", "-", "1e5", "true", "nul", "9" * 399),
            *("[" * 30, "]" * 30, '{"":' * 20, "}" * 20, "\x00", "\u2028", "\\", " " * 60),
            *"{}[]:,;-+.eE \n\tn",
        ]
    ),
    max_size=40,
).map("".join)


@settings(max_examples=600, deadline=None)
@given(
    reply=st.one_of(ODD, FRAGMENTS),
    layout=st.sampled_from(sorted(CALL_FORMATS)),
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=8),
    begin=st.sampled_from(["", '{"name": "add", "arguments": {"x": [', '{"x": ', WEATHER]),
)
def test_the_quick_reader_gives_after_every_piece_what_the_readable_one_gives(
    reply: str, layout: str, lengths: list[int], begin: str
) -> None:
    reply = f"{CALL_FORMATS[layout].opens if begin else ''}{begin}{reply}"
    quick = CallReader(CALL_FORMATS[layout], NAMES)
    plain = PlainCallReader(CALL_FORMATS[layout], NAMES)
    by_quick: list[Part] = []
    by_plain: list[Part] = []
    at = 0
    for length in itertools.cycle(lengths):
        piece = reply[at : at + length]
        by_quick += quick.push(piece)
        by_plain += plain.push(piece)
        assert summary(joined(by_quick)) == summary(joined(by_plain)), reply[: at + length]
        at += length
        if at >= len(reply):
            break
    by_quick += quick.finish()
    by_plain += plain.finish()
    assert summary(joined(by_quick)) == summary(joined(by_plain))
    assert places(by_quick) == places(by_plain)
    assert "".join(reply[at] for at in places(by_quick)) == joined(by_quick).text
    assert quick.calls == plain.calls


def test_arguments_leave_while_they_are_written_and_the_name_leaves_once() -> None:
    reader = CallReader(CALL_FORMATS["hermes"], NAMES)
    pushed = [reader.push(char) for char in tagged(WEATHER)]
    starts = [part for parts in pushed for part in parts if isinstance(part, CallStart)]
    assert [start.name for start in starts] == ["get_weather"]
    assert starts[0].call_id.startswith("call_")
    pieces = [part.text for parts in pushed for part in parts if isinstance(part, CallArguments)]
    assert len(pieces) == len('{"city": "Paris"}')


def test_text_waits_only_while_it_may_begin_a_mark() -> None:
    reader = CallReader(CALL_FORMATS["hermes"], NAMES)
    assert joined(reader.push("a <")).text == "a "
    assert joined(reader.push("b")).text == "<b"
    assert joined(reader.push("<tool_call>{")).text == ""
    assert joined(reader.push("x")).text == "<tool_call>{x"


def test_only_the_first_call_counts_where_one_was_asked_for() -> None:
    parts, made = read("hermes", [tagged(WEATHER, ADD)], max_calls=1)
    assert summary(joined(parts)) == ("", [PARIS])
    assert made


def test_nesting_without_end_is_no_call() -> None:
    deep = '<tool_call>{"name": "add", "x": ' + "[" * 10_000
    parts, made = read("hermes", [deep])
    assert summary(joined(parts)) == (deep, [])
    assert not made

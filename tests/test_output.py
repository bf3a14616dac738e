"""Stop conditions, token by token: what leaves, and when. One token is one character here."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.output import OutputProcessor, Stop, longest_stop_prefix
from specserve.types import Request, SamplingParams

EOS = 0


class CharDecoder:
    """Token id = code point."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def finish(self) -> str:
        return ""


def a_processor(
    *,
    stop: tuple[str, ...] = (),
    max_tokens: int = 100,
    min_tokens: int = 0,
    include: bool = False,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
) -> OutputProcessor:
    params = SamplingParams(
        stop=stop,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        include_stop_str_in_output=include,
        stop_token_ids=stop_token_ids,
    )
    stops = frozenset(stop_token_ids) | (frozenset() if ignore_eos else {EOS})
    request = Request(
        request_id="r",
        prompt_ids=(1,),
        params=params,
        seed=0,
        drafter="none",
        max_draft_tokens=0,
        verify="replay",
        stop_ids=frozenset(stops),
        eos_ids=frozenset({EOS}),
    )
    return OutputProcessor(request, CharDecoder())


def feed(processor: OutputProcessor, text: str) -> tuple[list[str], Stop | None]:
    """Deltas after each token, and the stop that ended it."""
    deltas = []
    for char in text:
        stop = processor.push(ord(char))
        deltas.append(processor.take_text())
        if stop is not None:
            return deltas, stop
    return deltas, None


@pytest.mark.parametrize(
    ("stops", "text", "shown", "reason"),
    [
        (("DEF",), "ABCDEFGHIJ", "ABC", "DEF"),
        (("XYZ", "GHI"), "ABCDEFGHIJ", "ABCDEF", "GHI"),
        ((" ha ha ha",), "x ha ha ha ha", "x", " ha ha ha"),
        (("aab",), "aaab", "a", "aab"),
        (("bcd", "c"), "abcd", "ab", "c"),
    ],
)
def test_text_ends_before_the_stop_string(
    stops: tuple[str, ...], text: str, shown: str, reason: str
) -> None:
    deltas, stop = feed(a_processor(stop=stops), text)
    assert ("".join(deltas), stop) == (shown, Stop("stop", reason))


def test_no_character_of_a_stop_string_is_shown_before_the_match() -> None:
    deltas, _ = feed(a_processor(stop=("DEF",)), "ABCDEF")
    assert deltas == ["A", "B", "C", "", "", ""]


def test_a_false_prefix_is_released_as_soon_as_it_is_false() -> None:
    deltas, stop = feed(a_processor(stop=("DEF",)), "ABDEX")
    assert (deltas, stop) == (["A", "B", "", "", "DEX"], None)


def test_the_stop_string_is_shown_when_asked_for() -> None:
    deltas, stop = feed(a_processor(stop=("DEF",), include=True), "ABCDEFG")
    assert ("".join(deltas), stop) == ("ABCDEF", Stop("stop", "DEF"))


def test_eos_ends_without_text_and_releases_what_was_held() -> None:
    deltas, stop = feed(a_processor(stop=("DEF",)), "AD\0x")
    assert (deltas, stop) == (["A", "", "D"], Stop("stop", None))


def test_a_stop_token_id_is_named_as_the_reason() -> None:
    _, stop = feed(a_processor(stop_token_ids=(ord("q"),)), "abq")
    assert stop == Stop("stop", ord("q"))


def test_ignored_eos_is_an_ordinary_token() -> None:
    deltas, stop = feed(a_processor(ignore_eos=True, max_tokens=3), "a\0b")
    assert ("".join(deltas), stop) == ("a\0b", Stop("length"))


def test_nothing_stops_before_min_tokens() -> None:
    processor = a_processor(stop=("b",), min_tokens=3)
    deltas, stop = feed(processor, "b\0bb")
    assert ("".join(deltas), stop) == ("b\0b", Stop("stop", "b"))


@pytest.mark.parametrize("max_tokens", range(1, 6))
def test_exactly_max_tokens_are_counted(max_tokens: int) -> None:
    processor = a_processor(max_tokens=max_tokens, stop=("cx",))
    deltas, stop = feed(processor, "abcdefgh")
    assert (len(deltas), stop) == (max_tokens, Stop("length"))
    assert "".join(deltas) == "abcdefgh"[:max_tokens]  # a held "c" is released at the end
    assert processor.num_output_tokens == max_tokens


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_streamed_text_equals_cutting_the_whole_text(text: str, stops: list[str]) -> None:
    deltas, stop = feed(a_processor(stop=tuple(stops)), text)
    ends = [text.find(word) + len(word) for word in stops if word in text]
    if not ends:
        assert stop is None
        shown = "".join(deltas)
        assert text.startswith(shown)
        # Only what may begin a stop string is held back.
        assert len(text) - len(shown) == longest_stop_prefix(text, tuple(stops))
        return
    first_end = min(ends)
    starts = [first_end - len(w) for w in stops if text[:first_end].endswith(w)]
    assert "".join(deltas) == text[: min(starts)]
    assert stop is not None
    assert len(deltas) == first_end


def test_merged_chunks_say_what_they_said_apart() -> None:
    from specserve.stream import merge
    from specserve.types import TokenChunk

    first = TokenChunk(request_id="r", text="ab", token_ids=(1, 2), num_output_tokens=2)
    second = TokenChunk(
        request_id="r", text="c", token_ids=(3,), num_output_tokens=3, finish_reason="length"
    )
    assert merge(first, second) == msgspec.structs.replace(second, text="abc", token_ids=(1, 2, 3))

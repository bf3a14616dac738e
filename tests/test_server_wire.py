"""The edge without sockets: bodies in, shapes out, numbers that agree with each other."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specserve.errors import RequestError
from specserve.server.errors import public_text
from specserve.server.logprobs import chat_logprobs, completion_logprobs, output_offsets
from specserve.server.middleware import valid_request_id
from specserve.server.params import chat_params, completion_params, refuse_unsupported
from specserve.server.prompts import plain_messages, split_prompts
from specserve.server.tally import Tally
from specserve.server.tracing import valid_traceparent
from specserve.server.wire import ChatBody, CompletionBody, parse_body
from specserve.types import RequestTimes, SpecStats, TokenChunk, TokenLogprobs
from tests.scripted import byte_tokenizer


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b"", None),
        (b"[]", None),
        (b"null", None),
        (b"{} trailing", None),
        (b'\xef\xbb\xbf{"prompt": "a"}', None),
        (b'{"temperature": NaN}', None),
        (b'{"temperature": -Infinity}', None),
        (b'{"temperature": 1e400}', "temperature"),
        (b'{"temperature": "1"}', "temperature"),
        (b'{"max_tokens": 1.5}', "max_tokens"),
        (b'{"max_tokens": true}', "max_tokens"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "max_tokens"),
        (b'{"prompt": "\\ud800"}', None),
        (b'{"prompt": "\xff"}', None),
        (b'{"prompt": [1, true]}', "prompt[1]"),
        (b'{"prompt": [[1, "a"]]}', "prompt[0][1]"),
        (b'{"stop": 5}', "stop"),
        (b'{"logit_bias": {"5": null}}', "logit_bias[...]"),
        (b'{"speculation": {"verify": "hope"}}', "speculation.verify"),
        (b'{"speculation": {"max_draft_tokens": "3"}}', "speculation.max_draft_tokens"),
        (b'{"n": 1, "n": 2}', "n"),
        (b'{"metadata": {"a": 1, "a": 2}}', "a"),
        (b'{"unknown": ' + b"[" * 100_000, None),
        (b'{"suffix": ' + b'{"a":' * 100_000, None),
    ],
)
def test_a_damaged_body_is_refused_by_name(raw: bytes, param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        parse_body(raw, CompletionBody)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(caught.value.message) < 300


def test_a_missing_message_field_is_named_with_its_place() -> None:
    with pytest.raises(RequestError) as caught:
        parse_body(b'{"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}', ChatBody)
    assert caught.value.param == "messages[1].role"


def test_null_in_every_optional_field_means_the_default() -> None:
    nulls = msgspec.json.encode(dict.fromkeys(CompletionBody.__struct_fields__))
    assert parse_body(nulls, CompletionBody) == CompletionBody()
    nulls = msgspec.json.encode(dict.fromkeys(ChatBody.__struct_fields__))
    assert parse_body(nulls, ChatBody) == ChatBody()


def test_unknown_fields_and_long_numbers_in_them_are_ignored() -> None:
    raw = b'{"store": true, "x_number": ' + b"9" * 6000 + b', "metadata": {"a": "b"}}'
    assert parse_body(raw, CompletionBody) == CompletionBody()


UNSUPPORTED = {
    "suffix": "x",
    "logits_processors": ["x"],
    "use_beam_search": True,
    "length_penalty": 0.5,
    "guided_json": {"type": "object"},
    "guided_regex": "a+",
    "guided_choice": ["a"],
    "guided_grammar": "root ::= a",
}
UNSUPPORTED_CHAT = {
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
    "chat_template": "{{ 1 }}",
    "documents": [{"text": "a"}],
    "audio": {"voice": "a"},
}


def check_unsupported(body: CompletionBody | ChatBody, name: str) -> None:
    with pytest.raises(RequestError, match=name) as caught:
        refuse_unsupported(body)
    assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_completions_do_not_support_yet_is_refused_by_name(name: str) -> None:
    raw = msgspec.json.encode({name: UNSUPPORTED[name]})
    check_unsupported(parse_body(raw, CompletionBody), name)


@pytest.mark.parametrize("name", UNSUPPORTED_CHAT)
def test_what_chat_does_not_support_yet_is_refused_by_name(name: str) -> None:
    raw = msgspec.json.encode({name: UNSUPPORTED_CHAT[name]})
    check_unsupported(parse_body(raw, ChatBody), name)


@pytest.mark.parametrize(
    "document",
    [
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none"},
        {"tool_choice": "auto", "functions": [], "function_call": "none"},
        {"echo": False, "length_penalty": 1.0, "use_beam_search": False, "guided_json": None},
    ],
)
def test_a_field_that_asks_for_nothing_is_accepted(document: dict[str, object]) -> None:
    refuse_unsupported(parse_body(msgspec.json.encode(document), ChatBody))


@pytest.mark.parametrize(
    ("document", "param"),
    [
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"1.0": 1}}, "logit_bias"),
        ({"logit_bias": {"": 1}}, "logit_bias"),
        ({"logit_bias": {"\u0663": 1}}, "logit_bias"),
    ],
)
def test_completion_parameters_out_of_range_are_named(
    document: dict[str, object], param: str
) -> None:
    body = parse_body(msgspec.json.encode(document), CompletionBody)
    with pytest.raises(RequestError) as caught:
        completion_params(body)
    assert caught.value.param == param


@pytest.mark.parametrize("top", [21, -1, 10**9])
def test_chat_logprobs_out_of_range_are_named(top: int) -> None:
    with pytest.raises(RequestError) as caught:
        chat_params(ChatBody(logprobs=True, top_logprobs=top))
    assert caught.value.param == "top_logprobs"


def test_top_logprobs_without_logprobs_is_refused_and_zero_is_not() -> None:
    with pytest.raises(RequestError, match="logprobs is not true"):
        chat_params(ChatBody(top_logprobs=3))
    assert chat_params(ChatBody(top_logprobs=0)).logprobs is None
    assert chat_params(ChatBody(logprobs=True)).logprobs == 0


def test_newer_names_win_and_logit_bias_keys_become_ids() -> None:
    assert chat_params(ChatBody(max_tokens=3, max_completion_tokens=7)).max_tokens == 7
    params = completion_params(CompletionBody(logit_bias={"5": 1.5, "-1": 2}, stop="a"))
    assert params.logit_bias == {5: 1.5, -1: 2.0}  # admission refuses -1: it knows the vocabulary
    assert params.stop == ("a",)


@pytest.mark.parametrize("prompt", [None, "", [], [[]], [""], ["a", ""], [[1], []], ["a", 1]])
def test_an_empty_or_mixed_prompt_is_refused(prompt: object) -> None:
    body = parse_body(msgspec.json.encode({"prompt": prompt}), CompletionBody)
    with pytest.raises(RequestError) as caught:
        split_prompts(body.prompt)
    assert caught.value.param == "prompt"


def test_each_kind_of_prompt_is_split() -> None:
    assert split_prompts("a") == ["a"]
    assert split_prompts([1, 2]) == [[1, 2]]
    assert split_prompts(["a", "b"]) == ["a", "b"]
    assert split_prompts([[1], [2, 3]]) == [[1], [2, 3]]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "foo", "content": "a"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "function_call": {"name": "f"}}],
         "messages[1].function_call"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}],
         "messages[0].content[0]"),
    ],
)  # fmt: skip
def test_a_message_that_cannot_be_read_is_named(messages: list[object], param: str) -> None:
    body = parse_body(msgspec.json.encode({"messages": messages}), ChatBody)
    with pytest.raises(RequestError) as caught:
        plain_messages(body.messages)
    assert caught.value.param == param


def test_text_parts_are_joined_and_the_developer_is_the_system() -> None:
    raw = msgspec.json.encode(
        {
            "messages": [
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": text} for text in "ab"]},
                {"role": "assistant", "content": None},
            ]
        }
    )  # fmt: skip
    assert plain_messages(parse_body(raw, ChatBody).messages) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": ""},
    ]


def test_an_error_that_leaves_has_no_path_address_or_second_line() -> None:
    text = "cannot read /srv/models/x.bin at 0x7f00deadbeef near 1/2 of http://host/a\nTraceback"
    assert public_text(text) == "cannot read <path> at <address> near 1/2 of http://host/a"


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        ("00-" + "a" * 32 + "-" + "b" * 16 + "-01", True),
        ("ff-" + "a" * 32 + "-" + "b" * 16 + "-01", False),
        ("00-" + "0" * 32 + "-" + "b" * 16 + "-01", False),
        ("00-" + "a" * 32 + "-" + "0" * 16 + "-01", False),
        ("00-" + "A" * 32 + "-" + "b" * 16 + "-01", False),
        ("00-" + "a" * 32 + "-" + "b" * 16 + "-01-x", False),
        ("", False),
    ],
)
def test_only_a_traceparent_that_names_a_span_is_passed_on(value: str, valid: bool) -> None:
    assert (valid_traceparent(value) == value) is valid


@pytest.mark.parametrize(
    ("value", "valid"),
    [("a-B_9.:", True), ("", False), ("a b", False), ("é", False), ("a" * 129, False)],
)  # fmt: skip
def test_request_ids_have_a_charset_and_a_length(value: str, valid: bool) -> None:
    assert valid_request_id(value) is valid


def test_logprobs_are_finite_and_name_parts_of_characters_by_bytes() -> None:
    tokenizer = byte_tokenizer()
    ids = list("aé".encode())
    entries = [TokenLogprobs(-math.inf, ((ord("b"), -0.5), (ord("a"), -math.inf)))] * 3
    offsets, next_offset = output_offsets(tokenizer, ids, 10)
    shaped = completion_logprobs(tokenizer, ids, entries, offsets, 2)
    assert shaped.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9"]
    assert shaped.token_logprobs == [-9999.0] * 3
    assert shaped.top_logprobs[0] == {"b": -0.5, "a": -9999.0}
    assert (shaped.text_offset, next_offset) == ([10, 11, 12], 12)  # é is one character
    chat = chat_logprobs(tokenizer, ids, entries).content
    assert [token.bytes for token in chat] == [[97], [0xC3], [0xA9]]
    assert chat[0].top_logprobs[0].logprob == -0.5


@st.composite
def sequences(draw: st.DrawFn) -> TokenChunk:
    """The last chunk of one sequence with any acceptance pattern."""
    k = draw(st.integers(0, 7))
    drafted = draw(st.lists(st.integers(1, k), max_size=12)) if k else []
    accepted = [draw(st.integers(0, count)) for count in drafted]
    emitted = sum(accepted) + len(accepted)
    return TokenChunk(
        request_id="r",
        finish_reason="length",
        num_output_tokens=emitted + 1,
        num_cached_tokens=2,
        stats=SpecStats(
            drafters=("a",) if drafted else (),
            max_draft_tokens=k,
            num_spec_steps=len(drafted),
            num_draft_tokens=sum(drafted),
            num_accepted_draft_tokens=sum(accepted),
            num_spec_emitted_tokens=emitted,
            num_steps=len(drafted) + 1,
            per_step_drafted=tuple(drafted),
            per_step_accepted=tuple(accepted),
        ),
        times=RequestTimes(arrival=1.0, scheduled=2.0, first_token=4.0, finished=7.0),
    )


@given(st.lists(sequences(), min_size=1, max_size=4))
def test_the_numbers_of_a_reply_agree_with_each_other(chunks: list[TokenChunk]) -> None:
    tally = Tally([3], len(chunks), detailed=True)
    for idx, chunk in enumerate(chunks):
        assert not tally.complete
        tally.add(idx, chunk)
    assert tally.complete
    spec, ours = tally.metrics().speculative_decoding, tally.metrics().specserve
    histogram = spec.acceptance_histogram
    assert sum(histogram) == spec.num_spec_steps
    assert sum(j * count for j, count in enumerate(histogram)) == spec.num_accepted_draft_tokens
    assert spec.num_accepted_draft_tokens <= spec.num_draft_tokens
    assert len(histogram) == spec.num_spec_tokens + 1
    assert spec.per_step_accepted == [
        n for one in chunks if one.stats for n in one.stats.per_step_accepted
    ]
    assert list(ours.drafted_per_position) == sorted(ours.drafted_per_position, reverse=True)
    assert sum(ours.drafted_per_position) == spec.num_draft_tokens
    assert sum(ours.accepted_per_position) == spec.num_accepted_draft_tokens
    if spec.num_spec_steps:
        assert spec.mean_acceptance_length == pytest.approx(
            1 + spec.num_accepted_draft_tokens / spec.num_spec_steps
        )
        assert spec.draft_acceptance_rate == pytest.approx(
            spec.num_accepted_draft_tokens / spec.num_draft_tokens
        )
    else:
        assert (spec.mean_acceptance_length, spec.draft_acceptance_rate) == (0.0, 0.0)
    usage = tally.usage()
    assert usage.prompt_tokens == 3  # once, however many texts it gets
    assert usage.prompt_tokens_details.cached_tokens == 2
    assert usage.completion_tokens == sum(chunk.num_output_tokens for chunk in chunks)
    assert (ours.queue_seconds, ours.prefill_seconds, ours.decode_seconds) == (1.0, 2.0, 3.0)

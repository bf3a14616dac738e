"""Text to ids and back: against llama.cpp's ids, against a slow BPE, and streamed against whole."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from specserve.errors import ModelError, RequestError
from specserve.gguf_tokenizer import build_tokenizer
from specserve.tokenizer import Tokenizer
from tests.small_tokenizers import saved, words

GOLDEN = json.loads((Path(__file__).parent / "data" / "tokenizer_golden.json").read_text())
TEXTS: list[str] = GOLDEN["texts"]
PIECES = [
    "🎉", "你", "👩‍🚀", "é", "e\u0301", " ", "  ", "\n", "a", " the", "don't", "1", "42", "٣",
    "<|im_end|>", "\u00a0", "\u200d", "\ufffd", "\U0010ffff", "ß", "Ж", "\t", "_", "👍🏽",
]  # fmt: skip
# SmolLM2's vocabulary lacks six control characters and the unassigned planes from U+40000
CHARACTERS = st.characters(
    codec="utf-8", max_codepoint=0x3FFFF, exclude_characters="\x04\x06\x13\x14\x16\x1d"
)
MESSY_TEXT = st.one_of(st.text(CHARACTERS), st.lists(st.sampled_from(PIECES)).map("".join))
RELAXED = settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def demo(demo_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(demo_model_dir)


@pytest.fixture(scope="module")
def demo_json(demo_model_dir: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((demo_model_dir / "tokenizer.json").read_text())
    return document


@pytest.fixture(scope="module")
def library(demo_model_dir: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    golden = GOLDEN["sentencepiece"]
    metadata = {f"tokenizer.ggml.{key}": golden[key] for key in ("tokens", "token_type", "scores")}
    metadata |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return _from_metadata(metadata, tmp_path_factory.mktemp("sentencepiece"))


def _from_metadata(metadata: dict[str, Any], directory: Path) -> Tokenizer:
    backend, config = build_tokenizer(metadata)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(directory)


# Ids


@pytest.mark.demo
@pytest.mark.parametrize("text_idx", range(len(TEXTS)))
def test_ids_equal_llama_cpps(text_idx: int, demo: Tokenizer) -> None:
    assert demo.encode(TEXTS[text_idx]) == GOLDEN["ids"][text_idx]


@pytest.mark.demo
@pytest.mark.parametrize("pre", GOLDEN["pre_tokenizers"])
def test_each_pre_tokenizer_equals_llama_cpps(
    pre: str, demo_json: dict[str, Any], tmp_path: Path
) -> None:
    vocab = demo_json["model"]["vocab"]
    control = {token["content"] for token in demo_json["added_tokens"]}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.__getitem__),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in demo_json["model"]["merges"]],
        "tokenizer.ggml.token_type": [
            3 if token in control else 1 for token in sorted(vocab, key=vocab.__getitem__)
        ],
    }
    tokenizer = _from_metadata(metadata, tmp_path)
    for text, ids in zip(TEXTS, GOLDEN["pre_tokenizers"][pre], strict=True):
        if pre == "qwen2" and "e\u0301" in text:
            continue  # Qwen2 as published composes accents first (NFC); llama.cpp does not
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


def test_sentencepiece_ids_equal_llama_cpps(sentencepiece: Tokenizer) -> None:
    golden = GOLDEN["sentencepiece"]
    for text, ids, with_bos in zip(TEXTS, golden["ids"], golden["ids_with_bos"], strict=True):
        assert sentencepiece.encode(text, add_special_tokens=False) == ids, text
        assert sentencepiece.encode(text) == with_bos, text


def test_an_unknown_pre_tokenizer_is_refused_by_name() -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "novel",
        "tokenizer.ggml.tokens": ["a"],
    }
    with pytest.raises(ModelError, match=r"'novel' is not one of smollm"):
        build_tokenizer(metadata)


@pytest.fixture(scope="module")
def slow_bpe(demo_json: dict[str, Any]) -> Callable[[str], list[int]]:
    """Byte-pair encoding as its paper has it, with SmolLM2's splitting; no library."""
    vocab = demo_json["model"]["vocab"]
    ranks = {tuple(merge): rank for rank, merge in enumerate(demo_json["model"]["merges"])}
    words = regex.compile(
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    )
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}

    def encode(text: str) -> list[int]:
        ids = []
        for part in regex.split(r"(\p{N})", text):
            for word in words.findall(part):
                symbols = [letters[byte] for byte in word.encode()]
                while len(symbols) > 1:
                    pairs = list(itertools.pairwise(symbols))
                    best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
                    if best not in ranks:
                        break
                    at = pairs.index(best)
                    symbols[at : at + 2] = ["".join(best)]
                ids += [vocab[symbol] for symbol in symbols]
        return ids

    return encode


@pytest.mark.demo
@RELAXED
@given(text=MESSY_TEXT)
def test_plain_ids_equal_a_slow_bpes(
    text: str, demo: Tokenizer, slow_bpe: Callable[[str], list[int]]
) -> None:
    assert demo.encode_plain(text) == slow_bpe(text)


@pytest.mark.demo
def test_special_tokens_in_text_are_control_or_plain_as_asked(demo: Tokenizer) -> None:
    text = "<|im_start|>system\nobey<|im_end|>"
    assert demo.encode(text)[0] == 1
    assert demo.encode(text)[-1] == 2
    plain = demo.encode_plain(text)
    assert demo.special_ids.isdisjoint(plain)
    assert demo.decode(plain) == text


@pytest.mark.demo
@pytest.mark.parametrize("method", ["encode", "encode_plain"])
def test_a_lone_surrogate_is_a_request_error(method: str, demo: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"U\+D83D at character 2"):
        getattr(demo, method)("a \ud83d b")


def test_bos_is_added_once(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.encode("hi").count(1) == 1
    assert sentencepiece.encode("<s>hi").count(1) == 1
    assert sentencepiece.encode("")[:2] == [1]


# Text


@pytest.mark.demo
@RELAXED
@given(text=MESSY_TEXT)
def test_a_stream_cut_anywhere_equals_the_whole_and_shows_no_half_character(
    text: str, demo: Tokenizer
) -> None:
    ids = demo.encode_plain(text)
    stream = demo.stream_decoder()
    so_far = ""
    for count, token_id in enumerate(ids, 1):
        delta = stream.push(token_id)
        so_far += delta
        assert delta.count("�") <= text.count("�")
        assert text.startswith(so_far)
        assert so_far == demo.decode(ids[:count])
    assert so_far + stream.finish() == text


@pytest.mark.demo
def test_an_emoji_in_single_byte_tokens_appears_whole(demo: Tokenizer) -> None:
    text = "🎉你👩‍🚀"
    single = {
        demo.token_bytes(i): i for i in range(demo.vocab_size) if len(demo.token_bytes(i)) == 1
    }
    stream = demo.stream_decoder()
    deltas = [stream.push(single[bytes([byte])]) for byte in text.encode()]
    assert [delta for delta in deltas if delta] == ["🎉", "你", "👩", "\u200d", "🚀"]
    assert stream.finish() == ""


@pytest.mark.demo
@RELAXED
@given(ids=st.lists(st.integers(0, 49151)), skip=st.booleans())
def test_any_ids_decode_as_the_tokenizers_library_decodes_them(
    ids: list[int], skip: bool, demo: Tokenizer, library: tokenizers.Tokenizer
) -> None:
    expected = library.decode(ids, skip_special_tokens=skip)
    ours = demo.decode(ids, skip_special_tokens=skip)
    # They show an unfinished last character as U+FFFD, we drop it
    assert expected in (ours, ours + "�")


@pytest.mark.demo
def test_bytes_that_are_no_utf8_become_a_replacement_once_that_is_certain(demo: Tokenizer) -> None:
    of_byte = {demo.token_bytes(i): i for i in range(demo.vocab_size)}
    stream = demo.stream_decoder()
    assert stream.push(of_byte[b"\xf0"]) == ""
    assert stream.push(of_byte[b"a"]) == "�a"


@pytest.mark.demo
def test_special_tokens_are_shown_only_when_asked(demo: Tokenizer) -> None:
    ids = [*demo.encode("hi"), 2]
    assert demo.decode(ids) == "hi"
    assert demo.decode(ids, skip_special_tokens=False) == "hi<|im_end|>"


@pytest.mark.demo
def test_an_id_beyond_the_vocabulary_has_no_text(demo: Tokenizer) -> None:
    """A model whose embedding is padded can choose one."""
    assert demo.token_bytes(demo.vocab_size + 5) == b""
    assert demo.decode([*demo.encode("hi"), demo.vocab_size + 5]) == "hi"


@pytest.mark.demo
@RELAXED
@given(text=MESSY_TEXT)
def test_token_bytes_add_up_to_the_text(text: str, demo: Tokenizer) -> None:
    ids = demo.encode_plain(text)
    assert b"".join(map(demo.token_bytes, ids)) == text.encode()


@pytest.mark.demo
def test_a_token_that_is_no_text_is_shown_as_bytes(demo: Tokenizer) -> None:
    assert [demo.token_text(i) for i in demo.encode(" the")] == [" the"]
    assert demo.token_text(demo.encode("你")[0]) == "bytes:\\xe4\\xbd"


@RELAXED
@given(text=st.text(st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_sentencepiece_streams_give_the_text_back(text: str, sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode_plain(text)
    stream = sentencepiece.stream_decoder()
    deltas = [stream.push(token_id) for token_id in ids]
    assert "".join(deltas) == sentencepiece.decode(ids) == text
    assert all(delta.count("�") <= text.count("�") for delta in deltas)


def test_word_tokenizers_stream_with_spaces_between(tmp_path: Path) -> None:
    backend = words("?", "one", "two", "three", "four", "five", "six", "seven")
    tokenizer = saved(backend, tmp_path)
    ids = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    stream = tokenizer.stream_decoder()
    deltas = [stream.push(token_id) for token_id in ids]
    assert deltas[:3] == ["one", " two", " three"]
    assert "".join(deltas) == tokenizer.decode(ids) == backend.decode(ids)


def test_word_pieces_join_in_a_stream(tmp_path: Path) -> None:
    tokens = ["?", "play", "##ing", "##s", "the", "piano"]
    backend = tokenizers.Tokenizer(
        models.WordPiece({t: i for i, t in enumerate(tokens)}, unk_token="?")
    )
    backend.decoder = decoders.WordPiece()
    tokenizer = saved(backend, tmp_path)
    assert tokenizer.decode([1, 2, 4, 5, 3, 1, 3]) == "playing the pianos plays"


@pytest.mark.demo
def test_a_directory_with_only_vocabulary_and_merges_loads_too(
    demo_json: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps(demo_json["model"]["vocab"]))
    merges = [" ".join(merge) for merge in demo_json["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = Tokenizer.load(tmp_path)
    text = TEXTS[0]
    assert tokenizer.encode(text, add_special_tokens=False) == GOLDEN["pre_tokenizers"]["gpt-2"][0]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.demo
def test_threads_may_share_it(demo: Tokenizer) -> None:
    """Plain and parsing calls interleave: a switch inside one shared object would show."""
    text = "<|im_start|>x<|im_end|> " * 50
    parsed, plain = demo.encode(text), demo.encode_plain(text)
    with ThreadPoolExecutor(4) as pool:
        jobs = [(pool.submit(demo.encode, text), pool.submit(demo.encode_plain, text))] * 50
        for parsing, plainly in jobs:
            assert parsing.result() == parsed
            assert plainly.result() == plain


@pytest.mark.demo
def test_encoding_a_long_text_lets_other_threads_run(demo: Tokenizer) -> None:
    text = "The quick brown fox, été 你好 1234. " * 40_000
    ticks, done = [0], threading.Event()

    def tick() -> None:
        while not done.is_set():
            time.sleep(0.001)
            ticks[0] += 1

    other = threading.Thread(target=tick)
    other.start()
    before = ticks[0]
    demo.encode(text)
    during = ticks[0] - before
    done.set()
    other.join()
    assert during > 10  # a call that holds the interpreter lets one or two through

"""What a server reads beside the vocabulary, and whether two vocabularies are one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tokenizers

from specserve.errors import ModelError
from specserve.tokenizer import Tokenizer, check_same_vocabulary
from tests.small_tokenizers import saved, words


@pytest.fixture(scope="module")
def demo(demo_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(demo_model_dir)


@pytest.mark.demo
def test_the_demo_tokenizer_knows_its_ends(demo: Tokenizer) -> None:
    assert demo.vocab_size == len(demo.vocab()) == 49152
    assert demo.eos_ids == {2}
    assert demo.bos_id == 1
    assert demo.chat_template is not None
    assert "SmolLM" in demo.chat_template


def test_ends_are_collected_from_every_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 1}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    eos = {"content": "four", "lstrip": False}
    tokenizer = saved(words("?", "one", "two", "three", "four"), tmp_path, eos_token=eos)
    assert tokenizer.eos_ids == {1, 2, 3, 4}


def test_a_template_file_wins_and_named_templates_have_a_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert saved(words("?"), tmp_path, chat_template=named).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert Tokenizer.load(tmp_path).chat_template == "F"


def test_a_damaged_tokenizer_file_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"')
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.demo
def test_truncation_left_in_a_tokenizer_file_is_ignored(
    demo_model_dir: Path, tmp_path: Path, demo: Tokenizer
) -> None:
    backend = tokenizers.Tokenizer.from_file(str(demo_model_dir / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    text = "one two three four five six"
    assert saved(backend, tmp_path).encode(text) == demo.encode(text)


@pytest.mark.demo
def test_a_directory_without_any_tokenizer_is_a_model_error(
    demo_model_dir: Path, tmp_path: Path
) -> None:
    shutil.copy(demo_model_dir / "config.json", tmp_path)
    with pytest.raises(ModelError, match="tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.demo
def test_a_vocabulary_is_the_same_as_itself(demo: Tokenizer, demo_model_dir: Path) -> None:
    check_same_vocabulary(demo, Tokenizer.load(demo_model_dir))


def test_a_few_more_added_tokens_are_allowed_either_way(tmp_path: Path) -> None:
    small = saved(words("?", "a", "b"), tmp_path / "s")
    large = saved(words("?", "a", "b", "c", "d"), tmp_path / "l")
    check_same_vocabulary(small, large)
    check_same_vocabulary(large, small)


def test_the_first_id_that_differs_is_named(tmp_path: Path) -> None:
    target = saved(words("?", "a", "b", "c"), tmp_path / "t")
    draft = saved(words("?", "a", "x", "y"), tmp_path / "d")
    with pytest.raises(ModelError, match=r"id 2 is 'b' in the target .* and 'x' in the draft"):
        check_same_vocabulary(target, draft)


def test_a_much_smaller_draft_vocabulary_is_refused(tmp_path: Path) -> None:
    names = [f"w{idx}" for idx in range(1000)]
    target = saved(words(*names), tmp_path / "t")
    draft = saved(words(*names[:100]), tmp_path / "d")
    with pytest.raises(ModelError, match="has 100 tokens and the target's 1000"):
        check_same_vocabulary(target, draft)

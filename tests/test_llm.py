"""Offline use, on the demo model."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specserve import LLM, SamplingParams
from specserve.constraint import GrammarSpec
from specserve.errors import ConfigError, RequestError
from specserve.types import Speculation

pytestmark = [pytest.mark.demo, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def llm(demo_model_dir: Path) -> Iterator[LLM]:
    with LLM("demo", dtype="fp32") as loaded:
        yield loaded


def test_three_prompts_are_answered_in_order(llm: LLM) -> None:
    prompts = ["hi my name is", "today is a beautiful summer day", "hello there"]
    results = llm.generate(prompts)
    assert [result.prompt for result in results] == prompts
    for result in results:
        [output] = result.outputs
        assert output.text
        assert 1 <= len(output.token_ids) <= 16
        assert output.finish_reason in ("length", "stop")


def test_a_script_that_never_shuts_down_ends() -> None:
    script = """
from specserve import LLM, SamplingParams
llm = LLM("demo", kv_cache_gb=0.2, drafters="suffix")
print(len(llm.generate("Hello", SamplingParams(max_tokens=2))[0].outputs[0].token_ids))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "2\n")
    assert "Error" not in done.stderr
    assert "destroyed" not in done.stderr


def test_greedy_text_is_sensible_and_the_same_alone_and_beside_others(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    [alone] = llm.generate("The capital of France is", params)
    beside = llm.generate(["Hello", "The capital of France is", "def f(x):"], params)
    assert "Paris" in alone.outputs[0].text
    assert beside[1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_a_text_read_again_as_a_prompt_is_worth_what_it_was_when_it_was_made(llm: LLM) -> None:
    [made] = llm.generate("The capital of", SamplingParams(seed=1, max_tokens=9, logprobs=3))
    [output] = made.outputs
    whole = [*made.prompt_token_ids, *output.token_ids]
    [read] = llm.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=3))
    assert read.prompt_logprobs is not None
    assert output.logprobs is not None
    assert (read.prompt_logprobs[0], len(read.prompt_logprobs)) == (None, len(whole))
    again = [(one.logprob, one.top) for one in read.prompt_logprobs[-9:] if one is not None]
    assert again == [(one.logprob, one.top) for one in output.logprobs]
    assert made.prompt_logprobs is None


def test_texts_look_as_asked_for_whoever_guesses(llm: LLM) -> None:
    form = GrammarSpec(kind="regex", text="(yes|no), because [a-z ]{5,20}!", param="text_format")
    params = SamplingParams(temperature=0.8, seed=1, n=2, max_tokens=40)
    texts = {
        tuple(
            output.text
            for result in llm.chat(
                [{"role": "user", "content": "Is the sky green?"}],
                params,
                speculation=Speculation(drafter=drafter),
                text_format=form,
            )
            for output in result.outputs
        )
        for drafter in ("none", "auto", "grammar")
    }
    [both] = texts
    assert len(both) == 2
    assert all(re.fullmatch(form.text, text) for text in both)
    with pytest.raises(RequestError, match="text_format cannot be used"):
        llm.generate("Hello", text_format=GrammarSpec(kind="regex", text="a(", param="text_format"))


def test_chat_goes_through_the_models_template(llm: LLM) -> None:
    [result] = llm.chat(
        [{"role": "user", "content": "What is the capital of France? One word."}],
        SamplingParams(temperature=0, max_tokens=16),
    )
    assert "Paris" in result.outputs[0].text


def test_lists_single_strings_and_n_are_taken_as_people_write_them(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=8, n=2, stop="\n")  # type: ignore[arg-type] # as vLLM allows
    [result] = llm.generate([[19556, 905]], params, speculation=Speculation(drafter="none"))
    assert result.prompt is None
    assert result.prompt_token_ids == [19556, 905]
    first, second = result.outputs
    assert (first.index, second.index) == (0, 1)
    assert first.token_ids != second.token_ids


def test_a_bad_request_is_refused_and_the_next_one_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match="temperature is -1"):
        llm.generate("Hello", SamplingParams(temperature=-1))
    assert llm.generate("Hello", SamplingParams(max_tokens=1))[0].outputs[0].token_ids


def test_the_model_path_holds_the_weights(llm: LLM, demo_model_dir: Path) -> None:
    assert llm.model_path == demo_model_dir
    assert (llm.model_path / "model.safetensors").is_file()


def test_generate_on_the_command_line(demo_model_dir: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "specserve", "generate", "The capital of France is"),
            *("--max-tokens", "8"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "8 tokens in" in done.stderr


def test_the_model_as_its_own_draft_is_always_right(demo_model_dir: Path) -> None:
    # A draft looks at its 256 best tokens only: with top-k it may know them all.
    params = [
        SamplingParams(temperature=temperature, top_k=50, max_tokens=16, seed=7, ignore_eos=True)
        for temperature in (0.0, 0.8)
    ]
    prompts = ["Once upon a time", "Once upon a time"]
    options = {"drafters": "draft_model:demo", "speculation": "fixed", "draft_sharpness": 1.0}
    with LLM("demo", dtype="fp32", draft_dtype="fp32", kv_cache_gb=0.2, **options) as llm:
        drafted = llm.generate(prompts, params)
        plain = llm.generate(prompts, params, speculation=Speculation(drafter="none"))
    for with_draft, without in zip(drafted, plain, strict=True):
        assert with_draft.outputs[0].token_ids == without.outputs[0].token_ids
        stats = with_draft.outputs[0].speculation
        assert stats is not None
        assert stats.num_accepted_draft_tokens == stats.num_draft_tokens > 8


def test_an_option_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="draftrs"):
        LLM("demo", draftrs="none")
    with pytest.raises(ConfigError, match="draft_tokens"):
        LLM("demo", draft_tokens="many")

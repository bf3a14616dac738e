"""What gets installed: the wheel, its names, its command, and that Hugging Face's loading lives."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {
    "specserve",
    "specserve_kernels",
    "specserve_drafts",
    "specserve_observability",
    "specserve_loadgen",
}
# transformers looks for Hugging Face's package `kernels` while it builds a model class.
BUILD_A_MODEL = """
import specserve, specserve_kernels, sys
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32,
    num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1))
print(specserve.__file__, sum(p.numel() for p in model.parameters()))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
            *("--no-build-isolation", "--wheel-dir", str(out), str(ROOT)),
        ],
        check=True,
        timeout=200,
    )
    [found] = out.glob("*.whl")
    return found


def test_the_wheel_installs_only_our_names_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        entry_points = next(name for name in files if name.endswith("entry_points.txt"))
        assert "specserve = specserve.cli:main" in archive.read(entry_points).decode()
    names = {name.split("/")[0] for name in files}
    assert {name for name in names if not name.endswith(".dist-info")} == OURS
    assert "specserve_loadgen/data/prompts.jsonl" in files
    assert {f"{name}/py.typed" for name in OURS} <= set(files)


def test_a_transformers_model_builds_beside_the_installed_wheel(
    wheel: Path, tmp_path: Path
) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"),
            *("--target", str(tmp_path / "site"), str(wheel)),
        ],
        check=True,
        timeout=200,
    )
    done = subprocess.run(
        [sys.executable, "-c", BUILD_A_MODEL],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "PATH": "", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path / "site" / "specserve"))


def test_a_transformers_model_builds_from_the_repository_root(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUILD_A_MODEL],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert not (ROOT / "kernels" / "__init__.py").exists()

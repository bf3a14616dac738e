"""What gets installed: the wheel, its names, its command, and that Hugging Face's loading lives."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from specserve_kernels import build_native

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


def has_compiler() -> bool:
    try:
        build_native.find_compiler()
    except build_native.BuildError:
        return False
    return True


def build_wheel(out: Path, **environment: str) -> Path:
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
            *("--no-build-isolation", "--wheel-dir", str(out), str(ROOT)),
        ],
        check=True,
        timeout=250,
        env={**os.environ, **environment},
    )
    [found] = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def native_files(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return [name for name in archive.namelist() if "/_native/" in name]


@pytest.mark.skipif(not has_compiler(), reason="no C++ compiler on this machine")
def test_a_wheel_built_with_a_compiler_carries_the_library_and_its_platform(wheel: Path) -> None:
    name = build_native.library_path().name
    assert native_files(wheel) == [f"specserve_kernels/_native/{name}"]
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl")


def test_without_a_compiler_the_wheel_is_pure_and_can_be_completed_later(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, CXX="/no/such/compiler")
    assert native_files(wheel) == []
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert "specserve_kernels/native/gemm.h" in archive.namelist()


def test_the_wheel_installs_only_our_names_and_the_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = archive.namelist()
        entry_points = next(name for name in files if name.endswith("entry_points.txt"))
        assert "specserve = specserve.cli:main" in archive.read(entry_points).decode()
    names = {name.split("/")[0] for name in files}
    assert {name for name in names if not name.endswith(".dist-info")} == OURS
    assert "specserve_loadgen/data/prompts.jsonl" in files
    assert {"specserve/server/static/index.html", "specserve/server/static/app.js"} <= set(files)
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

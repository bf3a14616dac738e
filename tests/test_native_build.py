"""How the native library is built and found: incrementally, whole, and never out of date."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specserve_kernels import build_native
from specserve_kernels.native_library import load, why_not

HEADER = "inline int number() { return 42; }\n"
ANSWER = """// build: -DPLUS=1
#include "number.h"
extern "C" __attribute__((visibility("default"))) int answer() { return number() + PLUS; }
"""


def has_compiler() -> bool:
    try:
        build_native.find_compiler()
    except build_native.BuildError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler on this machine")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package directory with a header, a file that includes it, and one for another machine."""
    native = tmp_path / "native"
    native.mkdir()
    (native / "number.h").write_text(HEADER)
    (native / "answer.cpp").write_text(ANSWER)
    (native / "elsewhere.cpp").write_text("// build[pdp11]: -mfloat-of-its-own\n#error not here\n")
    return tmp_path


def built(package: Path) -> list[str]:
    """What a build said it did, a word or two each."""
    said: list[str] = []
    build_native.build(package, said.append)
    return [" ".join(line.split()[:2]) for line in said if "stamp-" not in line]


def call(package: Path) -> int:
    """answer(), in a process of its own: one process keeps the library it has loaded."""
    code = (
        "import sys; from pathlib import Path; from specserve_kernels.native_library import load\n"
        "library = load(Path(sys.argv[1])); print(library.answer())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(package)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@needs_compiler
def test_a_file_is_compiled_with_the_flags_of_its_first_line(package: Path) -> None:
    assert built(package) == ["compiled answer.cpp", "linked libspecserve_native.so"]
    assert call(package) == 43


@needs_compiler
def test_only_what_changed_is_compiled_again(package: Path) -> None:
    built(package)
    assert built(package) == []
    (package / "native" / "other.cpp").write_text("int other() { return 0; }\n")
    assert built(package) == ["compiled other.cpp", "linked libspecserve_native.so"]
    (package / "native" / "number.h").write_text(HEADER.replace("42", "7"))
    assert built(package) == [
        *("compiled answer.cpp", "compiled other.cpp", "linked libspecserve_native.so")
    ]
    assert call(package) == 8


@needs_compiler
def test_a_library_older_than_its_sources_is_refused_with_the_command_that_rebuilds(
    package: Path,
) -> None:
    build_native.build(package)
    (package / "native" / "number.h").write_text(HEADER.replace("42", "7"))
    assert load(package) is None
    assert "older than its sources" in (said := str(why_not(package)))
    assert build_native.COMMAND in said


@needs_compiler
def test_a_library_without_sources_beside_it_is_used_as_it_came(package: Path) -> None:
    build_native.build(package)
    shutil.rmtree(package / "native")
    assert why_not(package) is None
    assert load(package) is load(package)


@needs_compiler
def test_what_does_not_compile_is_said_and_leaves_the_old_library_whole(package: Path) -> None:
    library = build_native.build(package)
    before = library.read_bytes()
    (package / "native" / "answer.cpp").write_text("int answer( { }\n")
    with pytest.raises(build_native.BuildError, match=r"answer\.cpp"):
        build_native.build(package)
    assert library.read_bytes() == before
    assert [path.name for path in library.parent.glob(".*")] == []


def test_without_a_library_the_reason_names_the_command(package: Path) -> None:
    assert load(package) is None
    assert build_native.COMMAND in str(why_not(package))


def test_a_compiler_that_is_not_there_is_named(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/no/such/c++ -m64")
    with pytest.raises(build_native.BuildError, match="/no/such/c"):
        build_native.build(package)
    assert "/no/such/c++" in str(why_not(package))

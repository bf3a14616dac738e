"""From a model's name to its directory, and from a directory to tensors. Safetensors only.

Pickled weights (`pytorch_model.bin`) run code when they are read, so they are refused, not guarded.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any  # JSON documents

from safetensors import SafetensorError, safe_open
from torch import Tensor

from specserve.demo import Progress, pull_demo
from specserve.errors import ModelError
from specserve.files import read_json
from specserve.gguf_import import cached_conversion

DEMO = "demo"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What is fetched from the hub: never pickles, never code
HUB_FILES = ["*.json", "*.jinja", "*.safetensors", "tokenizer.model", "*.tiktoken", "merges.txt"]


def resolve_model(name: str, progress: Progress | None = None) -> Path:
    """The local directory of a model: `demo`, a directory, a .gguf file, or a hub id `owner/name`.

    Fetches and converts what is not yet in the cache; `progress` is called with a line of text
    per stage of the demo model's pull. ModelError says what to do otherwise.
    """
    if name == DEMO:
        return pull_demo(progress)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"{path} has no config.json: give a Hugging Face model directory, a .gguf file, "
                "a hub id or 'demo'"
            )
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"{path} is a file but not a .gguf: give its directory instead")
        return cached_conversion(path)
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name
    if looks_like_path or path.suffix == ".gguf":
        raise ModelError(f"there is no model at {name!r}: check the path")
    return _from_hub(name)


def read_config(directory: Path) -> dict[str, Any]:
    """config.json. ModelError when it is missing, damaged, or asks for code of its own."""
    config = read_json(directory / "config.json")
    if not config:
        raise ModelError(f"{directory} has no config.json, or an empty one")
    if "auto_map" in config and "model_type" not in config:
        raise ModelError(
            f"{directory} needs Python code from the model's repository (auto_map), "
            "which is never run here: use a model of a built-in architecture"
        )
    return config


def load_weights(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by its name, dtype and shape as stored, memory-mapped.

    Nothing is read from disk until a tensor is used. Tensors are private copy-on-write maps: to
    write to one does not change the file. ModelError when files are missing or damaged.
    """
    index = read_json(directory / INDEX)
    if not index:
        if not (directory / SINGLE).is_file():
            raise ModelError(_why_no_weights(directory))
        return _load_file(directory / SINGLE)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{directory / INDEX} has no weight_map: download the model again")
    weights: dict[str, Tensor] = {}
    for file_name in sorted(set(weight_map.values())):
        if file_name != os.path.basename(file_name) or not file_name.endswith(".safetensors"):
            raise ModelError(f"{directory / INDEX} names {file_name!r}: not a file beside it")
        weights |= _load_file(directory / file_name)
    if missing := sorted(set(weight_map) - set(weights)):
        raise ModelError(
            f"{directory} lacks {len(missing)} tensors that its index names, the first of them "
            f"{missing[0]}: download the model again"
        )
    return weights


def _load_file(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise ModelError(f"{path} is missing: download the model again") from error
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ModelError(f"{path} is damaged ({error}): download the model again") from error


def _why_no_weights(directory: Path) -> str:
    pickled = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern)]
    if pickled:
        return (
            f"{directory} has weights only as {', '.join(sorted(pickled)[:3])}: a pickle, which "
            "can run code when it is read, so it is refused. Save the model as safetensors "
            "(save_pretrained does)"
        )
    return f"{directory} has no {SINGLE} and no {INDEX}"


def _from_hub(name: str) -> Path:
    """Through huggingface_hub's own cache: its token, mirror and offline settings apply."""
    # Imported here: needed only for hub ids, and costs a third of a second
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        directory = Path(snapshot_download(name, allow_patterns=HUB_FILES))
    except HFValidationError as error:
        raise ModelError(
            f"{name!r} is neither a directory, a .gguf file, 'demo' nor a valid hub id: {error}"
        ) from error
    except HfHubHTTPError as error:
        raise ModelError(
            f"the Hugging Face hub refused {name!r} ({error}): check the name, and log in "
            "(`hf auth login`) if the model is gated"
        ) from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"{name!r} is not a local directory or .gguf file, not in the Hugging Face cache, and "
            "the hub cannot be reached. Offline: use 'demo' (once pulled), a local directory, or "
            f"fetch it elsewhere with `hf download {name}` and copy it here"
        ) from error
    if not (directory / "config.json").is_file():
        raise ModelError(f"the hub repository {name!r} has no config.json: it is no usable model")
    return directory

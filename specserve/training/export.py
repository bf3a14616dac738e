"""A trained draft as a checkpoint that any engine of its public format loads.

int8 follows compressed-tensors: a matrix as int8 beside `<name>_scale` [out, 1], symmetric per row.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from specserve.files import write_json
from specserve.training.layers import Params
from specserve.training.students import Student

FORMS = ("auto", "bf16", "int8")
LIMIT = 16_000_000  # bytes of a draft that is to be shipped
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def chosen_form(student: Student, asked: str) -> str:
    """auto: bf16 where that stays below LIMIT, else int8 where the format has it."""
    if asked != "auto":
        return asked
    num_bytes = sum(2 * own.numel() for own in student.params.values())
    return "int8" if num_bytes > LIMIT and student.kind == "eagle3" else "bf16"


def export(student: Student, directory: Path, form: str, tokenizer_from: Path | None) -> int:
    """Writes config.json and model.safetensors, one after the other whole; returns their bytes.

    tokenizer_from: where a language model's tokenizer files lie, which it needs beside it
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = student.config()
    if form == "int8":
        config |= {"quantization_config": _quantization()}
    tensors = as_int8(student.params) if form == "int8" else as_bf16(student.params)
    tensors |= student.constants()
    partial = directory / "model.safetensors.partial"
    save_file(
        {name: own.cpu().contiguous() for name, own in tensors.items()},
        partial,
        metadata={"format": "pt"},
    )
    partial.chmod(0o644)  # safetensors make it private; a draft is there to be shared
    os.replace(partial, directory / "model.safetensors")
    write_json(directory / "config.json.partial", config)
    os.replace(directory / "config.json.partial", directory / "config.json")
    if tokenizer_from is not None:
        for name in _TOKENIZER_FILES:
            if (tokenizer_from / name).is_file():
                shutil.copyfile(tokenizer_from / name, directory / name)
    return sum((directory / n).stat().st_size for n in ("model.safetensors", "config.json"))


def as_bf16(params: Params) -> dict[str, Tensor]:
    return {name: own.detach().to(torch.bfloat16) for name, own in params.items()}


def as_int8(params: Params) -> dict[str, Tensor]:
    """Matrices int8 with a scale per row, vectors bf16."""
    tensors: dict[str, Tensor] = {}
    for name, own in params.items():
        if own.dim() != 2:
            tensors[name] = own.detach().to(torch.bfloat16)
            continue
        matrix = own.detach().float()
        scale = (matrix.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-30)
        tensors[name] = (matrix / scale).round().to(torch.int8)
        tensors[f"{name}_scale"] = scale
    return tensors


def _quantization() -> dict[str, object]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": [],
    }

"""A training run on disk: parameters, optimiser and place in the data, whole or not at all.

Everything else a step depends on is a function of the run's settings, so a run that goes on from
here makes the very same numbers as one that was never stopped.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specserve.training.layers import Params

_FILE = "state.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """step: done so far; epoch, batch_idx: what comes next; seconds: spent in training"""

    step: int = 0
    epoch: int = 0
    batch_idx: int = 0
    seconds: float = 0.0
    num_places: int = 0  # learned from so far, repetitions counted


def save_state(
    directory: Path, params: Params, optimiser: torch.optim.AdamW, position: Position
) -> None:
    tensors: dict[str, Tensor] = {f"param/{name}": own for name, own in params.items()}
    for name, own in params.items():
        for moment in _MOMENTS:
            if moment in optimiser.state[own]:
                tensors[f"{moment}/{name}"] = optimiser.state[own][moment]
    tensors = {name: own.detach().cpu().contiguous() for name, own in tensors.items()}
    directory.mkdir(parents=True, exist_ok=True)
    partial = directory / f"{_FILE}.partial"
    save_file(tensors, partial, metadata={"position": msgspec.json.encode(position).decode()})
    os.replace(partial, directory / _FILE)


def has_state(directory: Path) -> bool:
    return (directory / _FILE).is_file()


def load_state(directory: Path, params: Params, optimiser: torch.optim.AdamW) -> Position:
    """Into params and optimiser, in place."""
    with safe_open(directory / _FILE, framework="pt", device="cpu") as file:
        position = msgspec.json.decode(file.metadata()["position"], type=Position)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    with torch.no_grad():
        for name, own in params.items():
            own.copy_(tensors[f"param/{name}"])
    for name, own in params.items():
        if f"{_MOMENTS[0]}/{name}" in tensors:
            optimiser.state[own] = {
                "step": torch.tensor(float(position.step)),
                **{m: tensors[f"{m}/{name}"].to(own.device).clone() for m in _MOMENTS},
            }
    return position

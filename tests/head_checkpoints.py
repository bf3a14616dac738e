"""Tiny checkpoints of drafters that read hidden states, and a target whose states are made up.

The target's state at a position is a pseudo-random function of the tokens up to it, so a drafter
that mixes up positions, sequences or branches meets other numbers.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from specserve.drafting import Outcome
from specserve.types import Request
from specserve_drafts.head_files import TargetParts

V, D, NUM_LAYERS = 96, 16, 8
NORM_EPS = 1e-5


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    file_name: str = "model.safetensors",
) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / file_name
    )
    return str(directory)


def random_tensor(generator: torch.Generator, *shape: int) -> Tensor:
    """fp32, matrices scaled by their width, vectors near 1."""
    noise = torch.randn(*shape, generator=generator)
    return 1 + 0.2 * noise if len(shape) == 1 else noise * (1.5 / shape[-1] ** 0.5)


def norm_weight() -> Tensor:
    return 1 + 0.1 * torch.arange(D, dtype=torch.float64) / D


def target_parts(**changes: Any) -> TargetParts:
    """In float64, so that a test's own arithmetic agrees to many digits."""
    generator = torch.Generator().manual_seed(99)
    given: dict[str, Any] = {
        "num_layers": NUM_LAYERS,
        "hidden_size": D,
        "max_positions": 512,
        "embedding": random_tensor(generator, V, D).double(),
        "final_norm": lambda x: F.rms_norm(x, (D,), norm_weight().to(x.dtype), NORM_EPS),
        "dtype": torch.float64,
    }
    return TargetParts(**(given | changes))


def states(token_ids: Seq[int], num_layers: int) -> Tensor:
    """[len(token_ids), num_layers, D]: each position's depends on all tokens up to it."""
    rows = [_state(tuple(token_ids[:end]), num_layers) for end in range(1, len(token_ids) + 1)]
    return torch.stack(rows) if rows else torch.empty(0, num_layers, D, dtype=torch.float64)


@functools.cache
def _state(token_ids: tuple[int, ...], num_layers: int) -> Tensor:
    digest = hashlib.sha256(repr(token_ids).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(num_layers, D, generator=generator, dtype=torch.float64)


def an_outcome(
    history: Seq[int],
    start: int,
    num_computed: int,
    request: Request,
    *,
    num_states: int,
    seq_id: int = 0,
) -> Outcome:
    """A step that computed positions start .. start + num_computed - 1 of what is now history."""
    end = start + num_computed
    return Outcome(
        seq_id=seq_id,
        request=request,
        start=start,
        token_ids=tuple(history[start : end + 1]),
        num_computed=num_computed,
        drafter="none",
        num_drafted=0,
        num_accepted=0,
        hidden=states(history[:end], num_states)[start:] if num_states else None,
    )

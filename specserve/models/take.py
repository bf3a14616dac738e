"""Takes tensors out of a checkpoint by name, checks shapes, and knows what was never taken."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specserve.errors import ModelError


class WeightTaker:
    """weights: Hugging Face names. dtype: what tensors are converted to; None: left as they are."""

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype | None) -> None:
        self._weights = weights
        self._dtype = dtype
        self._taken: set[str] = set()

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of that name; ModelError where there is none, or one of another shape."""
        tensor = self._weights.get(name)
        if tensor is None:
            raise ModelError(f"the checkpoint has no tensor {name!r}, its config.json needs it")
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"tensor {name!r} has shape {list(tensor.shape)}, config.json says {list(shape)}"
            )
        self._taken.add(name)
        return tensor if self._dtype is None else tensor.to(self._dtype)

    def refuse_leftovers(self) -> None:
        """A tensor nobody reads (a bias, another architecture's part) would be silently dropped."""
        # Old checkpoints store RoPE's frequencies; a tied head may be stored beside the embedding.
        known = ("rotary_emb.inv_freq", "lm_head.weight")
        unknown = [n for n in self._weights if n not in self._taken and not n.endswith(known)]
        if unknown:
            raise ModelError(
                f"the checkpoint has {len(unknown)} tensors its config.json has no place for, the "
                f"first of them {min(unknown)!r}: the architecture is another one"
            )

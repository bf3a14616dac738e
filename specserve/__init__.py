"""specserve: a streaming LLM server built around speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specserve.spinning import spin_briefly
from specserve.version import __version__

__all__ = ["LLM", "SamplingParams", "Speculation", "__version__"]

if TYPE_CHECKING:
    from specserve.llm import LLM
    from specserve.types import SamplingParams, Speculation


def __getattr__(name: str) -> object:
    # Lazily: `specserve --help` must not load torch.
    if name == "LLM":
        spin_briefly()
        from specserve.llm import LLM

        return LLM
    if name in ("SamplingParams", "Speculation"):
        from specserve import types

        return types.__dict__[name]
    raise AttributeError(f"module 'specserve' has no attribute {name!r}")

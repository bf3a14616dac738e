"""An EAGLE-3 checkpoint as what runs it: packed for native code where the target says so."""

from __future__ import annotations

from specserve_drafts.eagle3_model import Eagle3Layer
from specserve_drafts.eagle3_native import NativeEagle3Weights
from specserve_drafts.head_files import TargetParts


def load_eagle3_head(
    path: str, target: TargetParts, vocab_size: int
) -> Eagle3Layer | NativeEagle3Weights:
    """vocab_size: ids of the target's tokenizer. ModelError says what does not fit."""
    if target.native is None:
        return Eagle3Layer.load(path, target, vocab_size)
    return NativeEagle3Weights.load(path, target, target.native, vocab_size)

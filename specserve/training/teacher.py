"""The target as a teacher: its states and its law at every place of an answer.

Computed with the decoder that serves, so the head learns from the very numbers it will be shown,
int8 rounding included. Kept on disk up to a limit, since every epoch asks again. States are kept in
bf16 and used in bf16 whether they come from disk or not, so that a limit changes no result.
"""

from __future__ import annotations

import os
from collections.abc import Sequence as Seq
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from specserve.loading import AnyDecoder
from specserve.models.interface import Capture
from specserve.training.lessons import Document, Lesson, Studied, make_lesson
from specserve.training.losses import Law, law_of
from specserve_kernels.interface import PagedBatch

_BLOCK = 16


class Teacher:
    def __init__(
        self,
        decoder: AnyDecoder,
        *,
        hidden_layers: tuple[int, ...],
        target_ids: Tensor,
        vocab_size: int,
        num_top: int,
        temperature: float,
        max_length: int,
        cache: Path | None = None,
        cache_bytes: int = 0,
    ) -> None:
        """target_ids: [W] of the draft's entries; vocab_size: ids that the target may say

        num_top, temperature: of the laws; cache: directory of what was computed, or None
        """
        self._decoder = decoder
        self._layers = hidden_layers
        self._target_ids = target_ids
        self._vocab_size = vocab_size
        self._num_top = num_top
        self._temperature = temperature
        self._num_blocks = -(-max_length // _BLOCK)
        self._kv_cache = decoder.new_kv_cache(self._num_blocks, _BLOCK)
        self._cache = cache
        self._room = cache_bytes
        if cache is not None:
            cache.mkdir(parents=True, exist_ok=True)
            self._room -= sum(file.stat().st_size for file in cache.glob("*.safetensors"))

    @property
    def target_ids(self) -> Tensor:
        """[W] of the draft's entries"""
        return self._target_ids

    def lesson(self, documents: Seq[Document]) -> Lesson:
        return make_lesson([self.study(one) for one in documents])

    def study(self, document: Document) -> Studied:
        path = None if self._cache is None else self._cache / f"{document.doc_id:07}.safetensors"
        if path is not None and path.is_file():
            return _read(path, document)
        studied = self._computed(document)
        if path is not None and self._room > 0:
            self._room -= _write(path, studied)
        return studied

    @torch.inference_mode()
    def _computed(self, document: Document) -> Studied:
        num_tokens = len(document.token_ids)
        batch = PagedBatch(
            query_start_loc=(0, num_tokens),
            context_lens=(0,),
            block_tables=(tuple(range(self._num_blocks)),),
            parents=(None,),
            block_size=_BLOCK,
        )
        width = self._decoder.config.hidden_size
        kind = torch.promote_types(self._decoder.dtype, torch.float32)
        states = torch.empty(num_tokens, len(self._layers), width, dtype=kind)
        logits = self._decoder.forward(
            torch.tensor(document.token_ids),
            torch.arange(num_tokens),
            batch,
            self._kv_cache,
            range(document.prompt_len, num_tokens - 1),
            capture=Capture(self._layers, states) if self._layers else None,
        )
        law = law_of(
            logits[:, : self._vocab_size].float(),
            self._target_ids,
            self._num_top,
            self._temperature,
        )
        kept = states.to(torch.bfloat16) if self._layers else None
        return Studied(document, None if kept is None else kept.clone(), law)


def _write(path: Path, studied: Studied) -> int:
    tensors = {
        "entries": studied.law.entries.to(torch.int32),
        "log_probs": studied.law.log_probs,
        "is_known": studied.law.is_known,
    }
    if studied.states is not None:
        tensors["states"] = studied.states
    partial = path.with_suffix(".partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
    os.replace(partial, path)
    return path.stat().st_size


def _read(path: Path, document: Document) -> Studied:
    with safe_open(path, framework="pt", device="cpu") as file:
        names = set(file.keys())
        law = Law(
            file.get_tensor("entries").long(),
            file.get_tensor("log_probs"),
            file.get_tensor("is_known"),
        )
        return Studied(document, file.get_tensor("states") if "states" in names else None, law)

"""Tokenizers small enough to read, saved and loaded like real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from specserve.tokenizer import Tokenizer


def saved(backend: tokenizers.Tokenizer, directory: Path, **config: Any) -> Tokenizer:
    directory.mkdir(exist_ok=True)
    backend.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.load(directory)


def words(*tokens: str) -> tokenizers.Tokenizer:
    """A vocabulary of whole words."""
    backend = tokenizers.Tokenizer(
        models.WordLevel({t: i for i, t in enumerate(tokens)}, tokens[0])
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return backend

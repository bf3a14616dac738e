"""The draft that comes with the package: who gets it, and that anybody could load it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from specserve.compose import drafter_specs
from specserve.options import EngineOptions
from specserve.training.card import Card
from specserve_drafts.head_files import read_checkpoint
from specserve_drafts.shipped import SHIPPED, checkpoint_of, expand

LIMIT = 16_000_000  # bytes: what a package may weigh


def test_auto_adds_the_draft_that_was_trained_for_the_model() -> None:
    assert expand("auto", "demo") == "suffix,grammar,eagle3:demo"
    assert expand("auto", "some/other-model") == "suffix,grammar"
    assert expand(" auto ", "demo") == expand("auto", "demo")


@pytest.mark.parametrize("spec", ["none", "suffix", "ngram,eagle3:my-draft", "auto,ngram"])
def test_what_is_named_is_what_is_loaded(spec: str) -> None:
    assert expand(spec, "demo") == spec


def test_the_default_of_a_server_is_auto() -> None:
    assert drafter_specs(EngineOptions()) == [
        ("suffix", None),
        ("grammar", None),
        ("eagle3", "demo"),
    ]
    assert drafter_specs(EngineOptions(model="/some/model")) == [
        ("suffix", None),
        ("grammar", None),
    ]


def test_a_name_that_is_not_shipped_is_a_path() -> None:
    assert checkpoint_of("eagle3", "my-draft") == "my-draft"
    assert checkpoint_of("medusa", "demo") == "demo"


@pytest.mark.parametrize("model", SHIPPED)
def test_what_is_shipped_is_whole_small_and_says_what_it_was_made_of(model: str) -> None:
    drafter, directory = SHIPPED[model]
    card = msgspec.json.decode((directory / "card.json").read_bytes(), type=Card)
    assert card.kind == drafter
    assert card.model == model
    assert card.held_out
    assert (directory / "CARD.md").is_file()
    assert sum(path.stat().st_size for path in directory.iterdir()) <= LIMIT
    _, tensors = read_checkpoint(checkpoint_of(drafter, model))
    assert tensors["lm_head.weight"].shape[0] == card.draft_vocab_size
    assert Path(checkpoint_of(drafter, model)) == directory

"""The drafts that come with this package, and who guesses where `--drafters` says `auto`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from specserve.weights import DEMO

AUTO: Final = "auto"
# suffix finds all that ngram finds: asking both took 0.3 ms of a step. grammar is asked about
# requests that have one.
WITHOUT_MODEL: Final = "suffix,grammar"


class Shipped(NamedTuple):
    """drafter: as in --drafters; directory: its checkpoint"""

    drafter: str
    directory: Path


# By the name of the target
SHIPPED: Final[Mapping[str, Shipped]] = {
    DEMO: Shipped("eagle3", Path(__file__).with_name("demo_eagle3")),
}


def expand(spec: str, model: str) -> str:
    """`auto` -> what needs no file, and the draft that was trained for this model, if any.

    spec: --drafters; model: --model. Other specs come back unchanged.
    """
    if spec.strip() != AUTO:
        return spec
    own = SHIPPED.get(model)
    return f"{WITHOUT_MODEL},{own.drafter}:{model}" if own else WITHOUT_MODEL


def checkpoint_of(drafter: str, argument: str) -> str:
    """Where `drafter:argument` lies: `eagle3:demo` is the one shipped for the demo model."""
    own = SHIPPED.get(argument)
    return str(own.directory) if own and own.drafter == drafter else argument

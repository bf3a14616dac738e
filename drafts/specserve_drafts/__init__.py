"""Drafters: they only ever suggest. Names, factories, and how a command line asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from specserve.drafting import Drafter
from specserve.errors import ConfigError
from specserve_drafts.block_parallel import make_pard
from specserve_drafts.draft_model import make_draft_model
from specserve_drafts.eagle3 import make_eagle3
from specserve_drafts.grammar import make_grammar
from specserve_drafts.known import make_anti, make_oracle, make_synthetic
from specserve_drafts.medusa import make_medusa
from specserve_drafts.mlp_speculator import make_mlp_speculator
from specserve_drafts.ngram import make_ngram
from specserve_drafts.none import make_none
from specserve_drafts.resources import DrafterResources, Script, Truth, recorded
from specserve_drafts.scripted import make_scripted
from specserve_drafts.suffix import make_suffix

__all__ = [
    "DRAFTERS",
    "DrafterResources",
    "Script",
    "Truth",
    "parse_drafter_spec",
    "recorded",
]

DRAFTERS: Final[dict[str, Callable[[DrafterResources], Drafter]]] = {
    "none": make_none,
    "suffix": make_suffix,
    "ngram": make_ngram,
    "grammar": make_grammar,
    "draft_model": make_draft_model,
    "pard": make_pard,
    "eagle3": make_eagle3,
    "medusa": make_medusa,
    "mlp_speculator": make_mlp_speculator,
    "scripted": make_scripted,
    "oracle": make_oracle,
    "anti": make_anti,
    "synthetic": make_synthetic,
}


def parse_drafter_spec(spec: str) -> list[tuple[str, str | None]]:
    """`ngram,draft_model:PATH,synthetic:0.8,0.6` -> [(name, argument or None)], in order.

    A part that is a number belongs to the argument before it. ConfigError names what is wrong.
    """
    found: list[tuple[str, str | None]] = []
    for part in (part.strip() for part in spec.split(",")):
        if not part:
            continue
        if found and found[-1][1] is not None and _is_number(part):
            found[-1] = (found[-1][0], f"{found[-1][1]},{part}")
            continue
        name, colon, argument = part.partition(":")
        if name not in DRAFTERS:
            raise ConfigError(
                f"--drafters names {name!r}, but the known drafters are: {', '.join(DRAFTERS)}"
            )
        if any(name == known for known, _ in found):
            raise ConfigError(
                f"--drafters names {name!r} twice: a request chooses by name, so give each once"
            )
        found.append((name, argument if colon else None))
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

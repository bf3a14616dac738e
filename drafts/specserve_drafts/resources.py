"""What a drafter is made from; the composition root fills it in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import msgspec

from specserve.drafting import Draft, DraftRow
from specserve.errors import ConfigError
from specserve.kv_cache import KVCache
from specserve.models.interface import CausalLM, ChainGrower
from specserve.types import Request
from specserve_drafts.head_files import Head, TargetParts

# The output that a request is known to get, as recorded from a run without speculation.
Truth = Callable[[Request], Seq[int] | None]
# What to guess for a row; it may branch.
Script = Callable[[DraftRow], Draft]


class DrafterResources(msgspec.Struct, frozen=True, kw_only=True):
    """argument: what follows the name and a colon in --drafters

    model:         of a draft model; its KV shares block ids with the target's
    chains:        from that model's KV to what grows chains where it runs; None: by forwards
    max_positions: the most positions that model can represent; None: as many as the target
    target:        of drafters that read hidden states: what they share with the target
    head:          of those drafters: what `heads.py` has loaded; None: load it now
    truth, script: of the drafters that tests and studies compose
    """

    argument: str | None = None
    vocab_size: int
    num_blocks: int
    block_size: int
    model: CausalLM | None = None
    chains: Callable[[KVCache], ChainGrower] | None = None
    max_positions: int | None = None
    target: TargetParts | None = None
    head: Head | None = None
    truth: Truth | None = None
    script: Script | None = None


def recorded(table: Mapping[tuple[int, ...], Seq[int]]) -> Truth:
    """The truth of prompts with recorded outputs: prompt ids -> output ids."""
    return lambda request: table.get(request.prompt_ids)


def refuse_argument(name: str, resources: DrafterResources) -> None:
    if resources.argument is not None:
        raise ConfigError(
            f"drafter {name!r} takes no argument, but got {resources.argument!r}: write {name}"
        )


def need_truth(name: str, resources: DrafterResources) -> Truth:
    if resources.truth is None:
        raise ConfigError(
            f"drafter {name!r} guesses from recorded outputs and is composed in tests and studies "
            "only (DrafterResources.truth): on a server use ngram or draft_model:PATH"
        )
    return resources.truth

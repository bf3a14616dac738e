"""No speculation, as a drafter: the special case is a value."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specserve.drafting import NO_DRAFT, Draft, DraftRow
from specserve_drafts.resources import DrafterResources, refuse_argument


class NoDrafter:
    name = "none"
    keeps_kv = False
    hidden_layers: tuple[int, ...] = ()

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        return [NO_DRAFT] * len(rows)

    def forget(self, seq_id: int) -> None:
        return


def make_none(resources: DrafterResources) -> NoDrafter:
    refuse_argument("none", resources)
    return NoDrafter()

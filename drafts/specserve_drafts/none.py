"""No speculation, as a drafter: the special case is a value."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specserve.drafting import NO_DRAFT, Draft, DraftRow
from specserve_drafts.resources import DrafterResources, refuse_argument


class NoDrafter:
    name = "none"
    keeps_kv = False

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        return [NO_DRAFT] * len(rows)

    def observe(self, seq_id: int, token_ids: Seq[int], num_accepted: int) -> None:
        return

    def forget(self, seq_id: int) -> None:
        return


def make_none(resources: DrafterResources) -> NoDrafter:
    refuse_argument("none", resources)
    return NoDrafter()

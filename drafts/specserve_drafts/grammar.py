"""What a request's grammar forces: text that must come next is guessed without asking anybody."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

from specserve.drafting import NO_DRAFT, Draft, DraftRow, chain
from specserve.types import Request
from specserve_drafts.resources import DrafterResources, refuse_argument

# Of the last guess it is open whether the model's token ends there, too.
_MOST: Final = 64
_SCORES: Final = (*(1.0,) * (_MOST - 1), 0.5)


class GrammarDrafter:
    """A guess may still be wrong: the model may cut the same text into other tokens."""

    name = "grammar"
    keeps_kv = False
    hidden_layers: tuple[int, ...] = ()

    def serves(self, request: Request) -> bool:
        return request.constraint is not None

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        return [_guess(row) for row in rows]

    def forget(self, seq_id: int) -> None:
        return


def _guess(row: DraftRow) -> Draft:
    constraint = row.request.constraint
    if constraint is None or row.max_tokens == 0:
        return NO_DRAFT
    most = min(row.max_tokens, _MOST)
    forced = constraint.forced(row.history, len(row.request.prompt_ids), most)
    return chain(forced, scores=_SCORES[-len(forced) :] if forced else ())


def make_grammar(resources: DrafterResources) -> GrammarDrafter:
    refuse_argument("grammar", resources)
    return GrammarDrafter()

"""Guesses that somebody wrote down, trees included: for tests of everything behind a drafter."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specserve.drafting import NO_DRAFT, Draft, DraftRow, leading
from specserve.errors import ConfigError
from specserve_drafts.resources import DrafterResources, Script, refuse_argument


class ScriptedDrafter:
    name = "scripted"
    keeps_kv = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, script: Script) -> None:
        self._script = script

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Of a longer script the first max_tokens nodes: parents come before children."""
        return [
            leading(self._script(row), row.max_tokens) if wants_guesses(row) else NO_DRAFT
            for row in rows
        ]

    def forget(self, seq_id: int) -> None:
        return


def wants_guesses(row: DraftRow) -> bool:
    """Not a prefill chunk that ends before the last known token, and K > 0."""
    return row.max_tokens > 0 and row.num_known == len(row.history)


def make_scripted(resources: DrafterResources) -> ScriptedDrafter:
    refuse_argument("scripted", resources)
    if resources.script is None:
        raise ConfigError(
            "drafter 'scripted' says what a test wrote down (DrafterResources.script): on a server "
            "use ngram or draft_model:PATH"
        )
    return ScriptedDrafter(resources.script)

"""Keeps what hindsight needs: every proposal with what was believed of it, until the text is known.

Opt-in, in memory; `steps()` once the texts are there. A run of an hour at 20 steps a second and 8
rows is about a gigabyte, so it is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from specserve.speculation.chosen import StepFacts
from specserve.speculation.costs import VerifyCosts
from specserve.speculation.hindsight import RecordedRow, RecordedStep
from specserve.speculation.offers import AutoRow


class _Row(NamedTuple):
    seq_id: int
    position: int  # of the first guess
    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    chances: tuple[float, ...]
    kept: tuple[bool, ...]


class _Step(NamedTuple):
    num_rows: int
    rows: list[_Row]
    ladder: tuple[float, ...]
    fixed: float
    per_emitted: float


class Recording:
    """One writer: the speculator."""

    def __init__(self, most_steps: int = 20_000) -> None:
        self._most = most_steps
        self._steps: list[_Step] = []

    def add(
        self,
        facts: StepFacts,
        rows: Seq[AutoRow],
        nodes: Mapping[int, Seq[int]],
        costs: VerifyCosts,
        fixed: float,
    ) -> None:
        """facts: of the step before any guess was chosen; nodes: by AutoRow.idx, the verified"""
        if len(self._steps) >= self._most:
            return
        kept_rows = []
        for row in rows:
            if row.judged is None:
                continue
            count = len(row.judged.chances)
            chosen = set(nodes.get(row.idx, ()))
            kept_rows.append(
                _Row(
                    row.plan.seq_id,
                    len(row.plan.history),
                    row.judged.draft.token_ids[:count],
                    row.judged.draft.parents[:count],
                    tuple(row.judged.chances),
                    tuple(node in chosen for node in range(count)),
                )
            )
        most = sum(len(row.chances) for row in kept_rows)
        ladder = costs.ladder(
            facts.num_tokens, facts.num_logits, facts.attended, facts.context, most
        )
        self._steps.append(
            _Step(facts.num_logits, kept_rows, tuple(ladder), fixed, costs.per_emitted)
        )

    def steps(self, texts: Mapping[int, Seq[int]]) -> list[RecordedStep]:
        """texts: by seq_id, prompt included. Guesses beyond a text's end are left out."""
        return [
            RecordedStep(
                step.num_rows,
                tuple(_with_truth(row, texts[row.seq_id]) for row in step.rows),
                step.ladder,
                step.fixed,
                step.per_emitted,
            )
            for step in self._steps
        ]


def _with_truth(row: _Row, text: Seq[int]) -> RecordedRow:
    right: list[bool] = []
    depths: list[int] = []
    for token_id, parent in zip(row.token_ids, row.parents, strict=True):
        depth = 0 if parent < 0 else depths[parent] + 1
        position = row.position + depth
        if position >= len(text):
            break
        depths.append(depth)
        right.append((parent < 0 or right[parent]) and token_id == text[position])
    count = len(right)
    return RecordedRow(row.chances[:count], row.parents[:count], tuple(right), row.kept[:count])

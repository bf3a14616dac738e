"""Keeps what hindsight needs: each proposal with what was believed of it, until the text is known.

Opt-in (`serve --record-steps FILE`), in memory, bounded. A row's history is the sequence's own
list, which grows into the text that came out, stop trimming included: nothing is copied while
serving, and whether a guess was right is read off the text afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from specserve.errors import ConfigError
from specserve.speculation.chosen import StepFacts
from specserve.speculation.costs import VerifyCosts
from specserve.speculation.hindsight import RecordedRow, RecordedStep
from specserve.speculation.offers import AutoRow

SCHEMA: Final = "specserve.recorded-steps/1"


class _Header(msgspec.Struct, frozen=True):
    """The first line of a file; num_left_out: steps that came when the bound was reached."""

    schema: str
    num_steps: int
    num_left_out: int


class _Row(NamedTuple):
    text: Seq[int]  # the sequence's own list, prompt included: it goes on growing
    position: int  # of the first guess
    drafter: str
    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    chances: tuple[float, ...]
    kept: tuple[bool, ...]
    seq_id: int


class _Step(NamedTuple):
    num_rows: int
    rows: list[_Row]
    ladder: tuple[float, ...]
    fixed: float
    per_emitted: float
    named: bool


class Recording:
    """One writer: the speculator. Read once no step runs any more."""

    def __init__(self, most_steps: int = 20_000) -> None:
        self._most = most_steps
        self._steps: list[_Step] = []
        self._num_left_out = 0

    def add(
        self,
        facts: StepFacts,
        rows: Seq[AutoRow],
        nodes: Mapping[int, Seq[int]],
        costs: VerifyCosts,
        fixed: float,
        *,
        named: bool = False,
    ) -> None:
        """facts: of the step before any guess was chosen; nodes: by AutoRow.idx, the verified

        named: the rows' requests named a drafter and K
        """
        if len(self._steps) >= self._most:
            self._num_left_out += 1
            return
        kept_rows = []
        for row in rows:
            if row.judged is None:
                continue
            count = len(row.judged.chances)
            chosen = set(nodes.get(row.idx, ()))
            kept_rows.append(
                _Row(
                    row.plan.history,
                    len(row.plan.history),
                    row.name,
                    row.judged.draft.token_ids[:count],
                    row.judged.draft.parents[:count],
                    tuple(row.judged.chances),
                    tuple(node in chosen for node in range(count)),
                    row.plan.seq_id,
                )
            )
        most = sum(len(row.chances) for row in kept_rows)
        ladder = costs.ladder(
            facts.num_tokens, facts.num_logits, facts.attended, facts.context, most
        )
        self._steps.append(
            _Step(facts.num_logits, kept_rows, tuple(ladder), fixed, costs.per_emitted, named)
        )

    def steps(self) -> list[RecordedStep]:
        """Guesses beyond a text's end are left out."""
        return [
            RecordedStep(
                step.num_rows,
                tuple(_with_truth(row) for row in step.rows),
                step.ladder,
                step.fixed,
                step.per_emitted,
                step.named,
            )
            for step in self._steps
        ]

    def write(self, path: Path) -> int:
        """JSON lines, a header and one step each; how many steps. OSError where it cannot be."""
        steps = self.steps()
        encode = msgspec.json.encode
        with path.open("wb") as file:
            file.write(encode(_Header(SCHEMA, len(steps), self._num_left_out)) + b"\n")
            file.writelines(encode(step) + b"\n" for step in steps)
        return len(steps)


def read_steps(path: Path) -> list[RecordedStep]:
    """What `Recording.write` wrote. ConfigError names file and line."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    steps: list[RecordedStep] = []
    try:
        header = msgspec.json.decode(lines[0] if lines else b"", type=_Header)
        if header.schema != SCHEMA:
            raise ConfigError(f"{path} holds {header.schema}, this version reads {SCHEMA}")
        steps += [msgspec.json.decode(line, type=RecordedStep) for line in lines[1:]]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not what serve --record-steps writes: {error}") from error
    if len(steps) != header.num_steps:
        raise ConfigError(f"{path} was cut: {len(steps)} of {header.num_steps} steps")
    return steps


def _with_truth(row: _Row) -> RecordedRow:
    right: list[bool] = []
    depths: list[int] = []
    for token_id, parent in zip(row.token_ids, row.parents, strict=True):
        depth = 0 if parent < 0 else depths[parent] + 1
        position = row.position + depth
        if position >= len(row.text):
            break
        depths.append(depth)
        right.append((parent < 0 or right[parent]) and token_id == row.text[position])
    count = len(right)
    return RecordedRow(
        row.chances[:count],
        row.parents[:count],
        tuple(right),
        row.kept[:count],
        row.drafter,
        row.seq_id,
        row.position,
    )

"""What passes between the controller and whoever asks drafters on its behalf, during one step."""

from __future__ import annotations

import msgspec

from specserve.speculation.survival import Judged
from specserve.types import RowPlan


class AutoRow:
    """One row whose guesses are the controller's choice, during one step."""

    __slots__ = (
        "asked",
        "cap",
        "expected",
        "fixed",
        "forced",
        "idx",
        "judged",
        "name",
        "plan",
        "replay",
    )

    def __init__(self, idx: int, plan: RowPlan) -> None:
        self.idx = idx
        self.plan = plan
        self.cap = plan.max_draft_tokens
        self.replay = plan.request.verify == "replay"
        self.asked: list[str] = []  # drafters
        self.name = ""
        self.judged: Judged | None = None
        self.expected = 0.0
        self.fixed = False  # all of its guesses are verified: its law needs that
        self.forced = False  # the same, because it is tried

    def offer(self, name: str, judged: Judged) -> None:
        """Keep the better of what was proposed."""
        expected = judged.expected
        if self.judged is None or expected > self.expected:
            self.name, self.judged, self.expected = name, judged, expected


class Call(msgspec.Struct, frozen=True):
    """A drafter to be asked: rows with how many guesses each, and children per node.

    is_trial: what comes is verified although it looks not worth it
    is_paid:  what it costs more than it brings is taken from the allowance
    """

    name: str
    rows: tuple[tuple[AutoRow, int], ...]
    width: int = 1
    is_trial: bool = False
    is_paid: bool = False

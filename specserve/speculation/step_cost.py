"""What one step cost, and how much of that was for the sake of guesses."""

from __future__ import annotations

import msgspec

from specserve.speculation.chosen import Learned, StepFacts
from specserve.speculation.costs import VerifyCosts
from specserve.speculation.overhead import Overhead


class StepCost(msgspec.Struct):
    """What is remembered of a step until the next one begins.

    last_seq:  some sequence of it; is_plain: there were decode rows only
    attended:  keys that all queries attend to, guesses left out
    elsewhere: seconds in the forward, in choosing tokens and in drafters
    expected:  seconds of the forward
    extra:     seconds that it would not have taken without guesses, estimated
    """

    num_rows: int = 0
    num_asked: int = 0
    num_guesses: int = 0
    last_seq: int = -1
    is_plain: bool = False
    attended: float = 0.0
    elsewhere: float = 0.0
    expected: float = 0.0
    extra: float = 0.0

    def set_extra(
        self,
        facts: StepFacts,
        learned: Learned,
        draft_seconds: float,
        costs: VerifyCosts,
        overhead: Overhead,
    ) -> None:
        """Drafting is measured, and so is the rest, of which the costs tell the part: a step that
        a busy neighbour made slow would have been slow without guesses, too."""
        self.extra = draft_seconds + overhead.per_ask * self.num_asked
        if not self.num_guesses:
            return
        self.extra += overhead.per_guess * self.num_guesses
        num_logits = facts.num_logits - self.num_guesses
        plain = costs.seconds(facts.num_tokens - self.num_guesses, num_logits, self.attended)
        if self.expected:
            self.extra += learned.forward_seconds * max(0.0, 1.0 - plain / self.expected)
        if learned.num_emitted > num_logits:
            self.extra += learned.verify_seconds * (1.0 - num_logits / learned.num_emitted)

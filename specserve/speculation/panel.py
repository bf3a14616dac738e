"""The drafters of a server and the bench they sit on when they fail.

A drafter may fail in any way (raise, return nonsense, return too much): the text must not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial

import msgspec

from specserve.drafting import (
    Draft,
    Drafter,
    DraftRow,
    Observer,
    Outcome,
    OutputReader,
    Selective,
    fault_of,
    leading,
)
from specserve.speculation.bench import Bench
from specserve.types import Ended, Request
from specserve_observability.logs import get_logger


class Panel:
    """Every call of a drafter goes through here."""

    def __init__(self, drafters: Mapping[str, Drafter], *, vocab_size: int) -> None:
        self._drafters = dict(drafters)
        self._observers = {
            name: drafter for name, drafter in drafters.items() if isinstance(drafter, Observer)
        }
        self._readers = {
            name: drafter for name, drafter in drafters.items() if isinstance(drafter, OutputReader)
        }
        self._selective = {
            name: drafter for name, drafter in drafters.items() if isinstance(drafter, Selective)
        }
        self._vocab_size = vocab_size
        self._bench = Bench(self._drafters)
        self._log = get_logger("specserve.speculation")
        self._step_idx = 0
        self._worked: set[str] = set()  # guessed in this step
        self.failed: list[str] = []  # in this step

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._drafters)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Every layer whose incoming residual stream some drafter wants to see, ascending."""
        wanted = {layer for drafter in self._drafters.values() for layer in drafter.hidden_layers}
        return tuple(sorted(wanted))

    @property
    def readers_of_states(self) -> tuple[str, ...]:
        """Drafters that make KV of the target's states: each state must be seen once."""
        return tuple(
            name for name, own in self._drafters.items() if own.keeps_kv and own.hidden_layers
        )

    def keeps_kv(self, name: str) -> bool:
        return self._drafters[name].keeps_kv

    def is_model(self, name: str) -> bool:
        """Whether it runs a model of its own: such a call is decided about before it is made."""
        return self._drafters[name].keeps_kv or bool(self._drafters[name].hidden_layers)

    def serves(self, name: str, request: Request) -> bool:
        selective = self._selective.get(name)
        return selective is None or selective.serves(request)

    def begin(self, step_idx: int) -> None:
        self._step_idx = step_idx
        self._worked = set()
        self.failed = []

    def may_play(self, name: str) -> bool:
        return self._bench.may_play(name, self._step_idx)

    def propose(self, name: str, rows: Seq[DraftRow]) -> list[Draft] | None:
        """One draft per row; None if the drafter sits out or fails."""
        if not self.may_play(name):
            return None
        proposals: list[Draft] = []

        def call() -> None:
            proposals.extend(self._drafters[name].propose(rows))
            if len(proposals) != len(rows):
                raise ValueError(f"{len(proposals)} drafts for {len(rows)} rows")
            for draft, row in zip(proposals, rows, strict=True):
                if fault := fault_of(draft):
                    raise ValueError(fault)
                if len(draft.token_ids) > row.max_tokens:
                    raise ValueError(f"{len(draft.token_ids)} guesses where K is {row.max_tokens}")

        if not self._guarded(name, call):
            return None
        self._worked.add(name)
        return proposals

    def _guarded(self, name: str, call: Callable[[], None]) -> bool:
        """A guesser may fail in any way; the text must not notice. False: it failed."""
        try:
            call()
        except Exception:
            num_steps = self._bench.failed(name, self._step_idx)
            self.failed.append(name)
            self._log.exception("drafter_failed", drafter=name, benched_steps=num_steps)
            return False
        return True

    def known_guesses(self, draft: Draft) -> Draft:
        """The leading guesses that exist in the target's vocabulary.

        Of drawn guesses all: to leave one out for what it is would bend the law. The verifier
        rejects a padding id, as the draw that it was.
        """
        if not draft.token_ids or draft.probs is not None:
            return draft
        if min(draft.token_ids) >= 0 and max(draft.token_ids) < self._vocab_size:
            return draft
        for at, token_id in enumerate(draft.token_ids):
            if not 0 <= token_id < self._vocab_size:
                return leading(draft, at)
        return draft

    @property
    def has_observers(self) -> bool:
        """Whether some drafter wants to see the outcome of every row."""
        return bool(self._observers)

    def observe(self, outcomes: Seq[Outcome]) -> None:
        layers = self.hidden_layers
        for name, observer in self._observers.items():
            if self.may_play(name):
                own = _with_own_layers(outcomes, self._drafters[name].hidden_layers, layers)
                if not self._guarded(name, partial(observer.observe, own)):
                    self._worked.discard(name)
        for name in self._worked:
            self._bench.worked(name)

    def forget(self, seq_ids: Seq[int], ended: Seq[Ended]) -> None:
        for seq_id in seq_ids:
            for name, drafter in self._drafters.items():
                self._guarded(name, partial(drafter.forget, seq_id))
        for one in ended:
            for name, reader in self._readers.items():
                self._guarded(name, partial(reader.read_output, one.request, one.output_ids))


def _with_own_layers(
    outcomes: Seq[Outcome], own: Seq[int], captured: Seq[int]
) -> tuple[Outcome, ...]:
    """Outcomes whose hidden states are those of a drafter's own layers, in its order."""
    columns = [captured.index(layer) for layer in own]
    if columns == list(range(len(captured))):
        return tuple(outcomes)  # as they are: choosing columns copies
    return tuple(
        msgspec.structs.replace(
            outcome,
            hidden=outcome.hidden[:, columns] if columns and outcome.hidden is not None else None,
        )
        for outcome in outcomes
    )

"""Every drafter the replay tests run under: real ones, and those that know the truth."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from specserve.config import EngineConfig
from specserve.drafting import Draft, Drafter, DraftRow, Observer, Outcome
from specserve.models.decoder import Decoder
from specserve_drafts import DRAFTERS, DrafterResources, Script, Truth, recorded
from tests.tiny_heads import parts_of, tiny_head

HEADS = ["eagle3", "medusa", "mlp_speculator"]
GUESSERS = ["ngram", "draft_model", "oracle", "anti", "synthetic", "tree", *HEADS]


ARGUMENTS = {"synthetic": "0.8,0.5"} | dict.fromkeys(HEADS, "tiny")


def every_guesser(
    model: Decoder, truth: Mapping[tuple[int, ...], Seq[int]], config: EngineConfig
) -> dict[str, Drafter]:
    """All of them in one server, as "auto" has them."""
    return {name: make_guesser(name, model, truth, config) for name in GUESSERS}


def make_guesser(
    name: str,
    model: Decoder,
    truth: Mapping[tuple[int, ...], Seq[int]],
    config: EngineConfig,
) -> Drafter:
    """draft_model is the target itself; tree branches at every depth."""
    table = recorded(truth)
    resources = DrafterResources(
        argument=ARGUMENTS.get(name),
        vocab_size=model.vocab_size,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        model=model if name == "draft_model" else None,
        truth=table,
        script=branching(table, model.vocab_size),
        target=parts_of(model) if name in HEADS else None,
        head=tiny_head(name, model) if name in HEADS else None,
    )
    return DRAFTERS["scripted" if name == "tree" else name](resources)


class _Failing:
    """Another drafter, of whose calls every n-th raises or returns nonsense, in turn."""

    def __init__(self, inner: Drafter, every: int) -> None:
        self.name, self.keeps_kv, self.hidden_layers = (
            inner.name,
            inner.keeps_kv,
            inner.hidden_layers,
        )
        self._inner = inner
        self._every = every
        self._num_calls = 0

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        drafts = self._inner.propose(rows)
        self._num_calls += 1
        if self._num_calls % self._every:
            return drafts
        if self._num_calls // self._every % 2:
            raise ZeroDivisionError("a guesser's own bug")
        return [Draft(token_ids=(1, 2), parents=(0, 1))] * len(rows)

    def observe(self, outcomes: Seq[Outcome]) -> None:
        if isinstance(self._inner, Observer):
            self._inner.observe(outcomes)

    def forget(self, seq_id: int) -> None:
        self._inner.forget(seq_id)


def failing(inner: Drafter, *, every: int) -> Drafter:
    return _Failing(inner, every)


def branching(truth: Truth, vocab_size: int) -> Script:
    """Two children per node of the right path, the wrong one first: accepted KV has gaps."""

    def script(row: DraftRow) -> Draft:
        output = truth(row.request)
        if output is None:
            return Draft()
        start = len(row.history) - len(row.request.prompt_ids)
        token_ids: list[int] = []
        parents: list[int] = []
        parent = -1
        for right in output[start:]:
            token_ids += [(right + 1) % vocab_size, right]
            parents += [parent, parent]
            parent = len(token_ids) - 1
        return Draft(token_ids=tuple(token_ids), parents=tuple(parents))

    return script

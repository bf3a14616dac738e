"""Drafters that read hidden states, in a real engine: what they are shown must be the truth.

The drafter under test sees chunks, prefix hits, other rows and compacted trees. Before each of its
guesses a fresh one is shown the states of one plain forward over the whole text, and both must
agree. What is verified instead are trees in which the right guess comes second.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import msgspec
import pytest
import torch

from specserve.config import EngineConfig
from specserve.drafting import Draft, Drafter, DraftRow, Observer, Outcome
from specserve.models.decoder import Decoder
from specserve.models.interface import Capture
from specserve.types import SamplingParams, Speculation
from specserve_drafts import DRAFTERS, DrafterResources
from specserve_kernels.interface import PagedBatch
from tests.engines import serving
from tests.guessers import make_guesser
from tests.tiny_heads import parts_of, tiny_head
from tests.tiny_models import tiny_decoder

BLOCK, NUM_TOKENS = 4, 14
PROMPTS = [
    [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17],
    [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 3, 3],
    list(range(20, 43)),
    [1],
]
CONFIG = EngineConfig(
    block_size=BLOCK,
    num_blocks=256,
    max_model_len=64,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    max_prefill_chunk=5,
    enable_prefix_caching=True,
)


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.set_num_threads(1)
    return tiny_decoder(vocab=64, seed=3)


def a_head(name: str, model: Decoder) -> Drafter:
    return DRAFTERS[name](
        DrafterResources(
            argument="tiny",
            vocab_size=model.vocab_size,
            num_blocks=CONFIG.num_blocks,
            block_size=BLOCK,
            target=parts_of(model),
            head=tiny_head(name, model),
        )
    )


class Watched:
    """Asks the drafter under test and a fresh one, and guesses like the tree."""

    def __init__(self, name: str, model: Decoder, tree: Drafter) -> None:
        self._model = model
        self._drafter = a_head(name, model)
        self._tree = tree
        self.name = name
        self.keeps_kv = self._drafter.keeps_kv
        self.hidden_layers = self._drafter.hidden_layers
        self.compared: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.kv_lens: list[int] = []

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        drafts = self._drafter.propose(rows)
        for row, draft in zip(rows, drafts, strict=True):
            if draft.token_ids:
                fresh = self._fresh(row)
                # Kept for later: what a drafter raises costs its guesses, never the step.
                self.compared.append((draft.token_ids, fresh.token_ids))
                self.kv_lens.append(draft.kv_len)
        return [
            msgspec.structs.replace(guess, kv_len=draft.kv_len)
            for guess, draft in zip(self._tree.propose(rows), drafts, strict=True)
        ]

    def _fresh(self, row: DraftRow) -> Draft:
        """From one plain forward over all known tokens but the last."""
        known = list(row.history[:-1])
        states = torch.empty(
            len(known), len(set(self.hidden_layers)), self._model.config.hidden_size,
            dtype=torch.float64,
        )  # fmt: skip
        blocks = tuple(range(-(-len(row.history) // BLOCK) + 1))
        self._model.forward(
            torch.tensor(known),
            torch.arange(len(known)),
            PagedBatch((0, len(known)), (0,), (blocks,), (None,), BLOCK),
            self._model.new_kv_cache(len(blocks), BLOCK),
            [],
            capture=Capture(tuple(sorted(set(self.hidden_layers))), states),
        )
        fresh = a_head(self.name, self._model)
        alone = msgspec.structs.replace(row, kv_len=0, block_table=blocks)
        fresh.propose([msgspec.structs.replace(alone, max_tokens=0, num_known=len(known))])
        fresh.observe(
            [
                Outcome(
                    seq_id=row.seq_id,
                    request=row.request,
                    start=0,
                    token_ids=tuple(row.history),
                    num_computed=len(known),
                    drafter="none",
                    num_drafted=0,
                    num_accepted=0,
                    hidden=states,
                )
            ]
        )
        (draft,) = fresh.propose([alone])
        return draft

    def observe(self, outcomes: Seq[Outcome]) -> None:
        assert isinstance(self._drafter, Observer)
        self._drafter.observe(outcomes)

    def forget(self, seq_id: int) -> None:
        self._drafter.forget(seq_id)


async def run(
    model: Decoder,
    drafters: Mapping[str, Drafter],
    speculation: Speculation | None,
    temperature: float,
) -> list[tuple[int, ...]]:
    """Twice over, so that the second round hits the prefix cache."""
    texts = []
    async with serving(model, CONFIG, drafters=drafters) as served:
        for _ in range(2):
            requests = []
            for idx, prompt in enumerate(PROMPTS):
                params = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, seed=idx)
                requests += served.requests(prompt, params, name=str(idx), speculation=speculation)
            texts += [chunk.token_ids for chunk in await served.run(requests)]
    return texts


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", ["eagle3", "medusa", "mlp_speculator"])
async def test_what_a_drafter_is_shown_is_what_a_plain_forward_computes(
    model: Decoder, name: str, temperature: float
) -> None:
    plain = await run(model, {}, None, temperature)
    truth = {
        tuple(prompt): text for prompt, text in zip(PROMPTS, plain[: len(PROMPTS)], strict=True)
    }
    watched = Watched(name, model, make_guesser("tree", model, truth, CONFIG))
    told = await run(
        model, {name: watched}, Speculation(drafter=name, max_draft_tokens=6), temperature
    )
    assert told == plain
    # Four tokens and more per step: each text still takes a few.
    assert len(watched.compared) >= 2 * len(PROMPTS) * 2
    assert [one for one, _ in watched.compared] == [other for _, other in watched.compared]
    if watched.keeps_kv:
        assert max(watched.kv_lens) > 20

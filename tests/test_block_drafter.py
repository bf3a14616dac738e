"""PARD: a whole block from one forward, and KV that no mask has touched."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specserve.drafting import Draft, DraftRow
from specserve.errors import ConfigError, ModelError
from specserve.models.decoder import Decoder
from specserve.noise import Purpose, gumbel
from specserve_drafts import DRAFTERS, DrafterResources
from specserve_drafts.block_parallel import ParallelDrafter
from specserve_kernels.interface import PagedBatch
from tests.logit_rows import a_sampling_request
from tests.tiny_models import tiny_decoder

V, BLOCK, NUM_BLOCKS, MASK = 64, 4, 64, 63
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5)


@pytest.fixture(scope="module")
def model() -> Decoder:
    torch.set_num_threads(1)
    return tiny_decoder(vocab=V, seed=3)


def a_checkpoint(directory: Path, **config: Any) -> str:
    """Of PARD's own fields; the model itself is given."""
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    return str(directory)


def a_drafter(model: Decoder, **changes: Any) -> ParallelDrafter:
    given: dict[str, Any] = {
        "mask_token": MASK,
        "vocab_size": V - 1,
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK,
    }
    return ParallelDrafter(model, **(given | changes))


def a_row(
    history: Seq[int], *, seq_id: int = 0, max_tokens: int = 5, kv_len: int = 0, width: int = 1,
    num_known: int | None = None, **request: Any,
) -> DraftRow:  # fmt: skip
    return DraftRow(
        seq_id=seq_id,
        request=a_sampling_request(PROMPT, **({"temperature": 0.0} | request)),
        history=history,
        num_known=len(history) if num_known is None else num_known,
        max_tokens=max_tokens,
        kv_len=kv_len,
        block_table=tuple(range(seq_id, NUM_BLOCKS, 3)),
        width=width,
    )


def reference(model: Decoder, history: Seq[int], num_guesses: int) -> Tensor:
    """[num_guesses, V] of one plain forward over known tokens and masks, from nothing."""
    ids = torch.tensor([*history, *[MASK] * (num_guesses - 1)])
    batch = PagedBatch((0, len(ids)), (0,), (tuple(range(16)),), (None,), BLOCK)
    cache = model.new_kv_cache(16, BLOCK)
    logits = model.forward(
        ids, torch.arange(len(ids)), batch, cache, range(len(history) - 1, len(ids))
    )
    logits[:, MASK] = -torch.inf
    return logits


def test_each_row_of_one_forward_guesses_the_next_token(model: Decoder) -> None:
    (draft,) = a_drafter(model).propose([a_row(PROMPT)])
    assert list(draft.token_ids) == reference(model, PROMPT, 5).argmax(1).tolist()
    assert draft.parents == (-1, 0, 1, 2, 3)


def test_sampling_rows_share_the_targets_noise_place_by_place(model: Decoder) -> None:
    (draft,) = a_drafter(model).propose([a_row(PROMPT, temperature=0.8, seed=5)])
    logits = reference(model, PROMPT, 5)
    for idx, token_id in enumerate(draft.token_ids):
        noise = torch.from_numpy(gumbel(5, len(PROMPT) + idx, Purpose.TARGET, V))
        assert token_id == int((logits[idx] / 0.8 + noise).argmax())


def test_where_guesses_are_tested_the_likeliest_are_given(model: Decoder) -> None:
    (draft,) = a_drafter(model).propose([a_row(PROMPT, temperature=1.0, verify="rejection")])
    assert list(draft.token_ids) == reference(model, PROMPT, 5).argmax(1).tolist()
    assert draft.probs is None


def test_a_trees_levels_are_the_best_of_their_rows(model: Decoder) -> None:
    (draft,) = a_drafter(model).propose([a_row(PROMPT, max_tokens=12, width=3)])
    logits = reference(model, PROMPT, 12)
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    assert len(draft.token_ids) == 12
    for token_id, depth in zip(draft.token_ids, depths, strict=True):
        assert token_id in logits[depth].topk(3).indices.tolist()


def test_masks_and_refused_guesses_leave_no_trace(model: Decoder) -> None:
    """After any past it guesses what a drafter guesses that begins here."""
    drafter, chance = a_drafter(model), random.Random(2)
    histories = [list(PROMPT), [7], list(range(20, 33))]
    kv_lens = [0, 0, 0]
    for _ in range(8):
        rows = [
            a_row(history, seq_id=idx, kv_len=kv_lens[idx], max_tokens=chance.randrange(6))
            for idx, history in enumerate(histories)
        ]
        drafts = drafter.propose(rows)
        fresh = a_drafter(model).propose([a_row(h, seq_id=i, max_tokens=rows[i].max_tokens)
                                          for i, h in enumerate(histories)])  # fmt: skip
        assert [draft.token_ids for draft in drafts] == [draft.token_ids for draft in fresh]
        for idx, draft in enumerate(drafts):
            accepted = chance.randrange(len(draft.token_ids) + 1)
            kv_lens[idx] = draft.kv_len
            histories[idx] += [*draft.token_ids[:accepted], chance.randrange(V - 1)]


def test_it_never_claims_what_the_runner_would_count_on_from(model: Decoder) -> None:
    """A claim of all known tokens says that guesses were fed, too; here they were masks."""
    drafter = a_drafter(model)
    (some,) = drafter.propose([a_row(PROMPT)])
    (none,) = drafter.propose([a_row([*PROMPT, 8], max_tokens=0)])
    assert (some.kv_len, none.kv_len) == (len(PROMPT) - 1, len(PROMPT) + 1)


def test_it_catches_up_in_bounded_steps_and_stops_at_its_own_length(model: Decoder) -> None:
    slow = a_drafter(model, max_catch_up=5)
    drafts = [slow.propose([a_row(PROMPT)])[0] for _ in range(2)]
    assert [len(draft.token_ids) for draft in drafts] == [0, 5]
    (short,) = a_drafter(model, max_positions=len(PROMPT) + 1).propose([a_row(PROMPT)])
    assert len(short.token_ids) == 2
    (middle,) = a_drafter(model).propose([a_row(PROMPT, num_known=4)])
    assert middle == Draft(kv_len=4)


@pytest.mark.parametrize("field", ["pard_token", "ptd_token_id"])
def test_the_mask_is_named_by_the_checkpoint(model: Decoder, tmp_path: Path, field: str) -> None:
    given: dict[str, Any] = {
        "vocab_size": V - 1,
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK,
        "model": model,
        "argument": a_checkpoint(tmp_path, **{field: MASK}),
    }
    (draft,) = DRAFTERS["pard"](DrafterResources(**given)).propose([a_row(PROMPT)])
    assert list(draft.token_ids) == reference(model, PROMPT, 5).argmax(1).tolist()


@pytest.mark.parametrize(
    ("config", "words"),
    [({}, ["pard_token", "draft_model:PATH"]), ({"pard_token": V}, [str(V), "none of"])],
)
def test_a_model_without_a_usable_mask_is_refused(
    model: Decoder, tmp_path: Path, config: dict[str, Any], words: list[str]
) -> None:
    path = a_checkpoint(tmp_path, **config)
    with pytest.raises(ModelError) as caught:
        DRAFTERS["pard"](
            DrafterResources(
                vocab_size=V, num_blocks=NUM_BLOCKS, block_size=BLOCK, model=model, argument=path
            )
        )
    assert all(word in str(caught.value) for word in words)
    with pytest.raises(ConfigError, match="pard:PATH"):
        DRAFTERS["pard"](DrafterResources(vocab_size=V, num_blocks=8, block_size=BLOCK))

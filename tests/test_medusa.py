"""Medusa heads and the MLP speculator against references written here, one row at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specserve.drafting import Draft, Drafter, DraftRow
from specserve.errors import ConfigError, ModelError
from specserve.noise import Purpose, gumbel
from specserve_drafts import DRAFTERS, DrafterResources
from tests.head_checkpoints import (
    NORM_EPS,
    NUM_LAYERS,
    D,
    V,
    an_outcome,
    norm_weight,
    random_tensor,
    states,
    target_parts,
    write_checkpoint,
)
from tests.logit_rows import a_sampling_request

HEADS, BLOCKS, STEPS, INNER = 3, 2, 3, 24
HISTORY = (3, 1, 4, 1, 5, 9, 2, 6)


# --- checkpoints ---------------------------------------------------------------------------------


def medusa_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for head in range(HEADS):
        for block in range(BLOCKS):
            tensors[f"{head}.{block}.linear.weight"] = random_tensor(generator, D, D)
            tensors[f"{head}.{block}.linear.bias"] = random_tensor(generator, D) - 1
        tensors[f"{head}.{BLOCKS}.weight"] = random_tensor(generator, V, D) * 2
    return tensors


def medusa(directory: Path, file_name: str = "medusa_lm_head.safetensors", **fields: Any) -> str:
    config = {"medusa_num_heads": HEADS, "medusa_num_layers": BLOCKS} | fields
    return write_checkpoint(directory, config, medusa_tensors(), file_name)


def mlp_tensors(tied: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(8)
    tensors = {}
    for step in range(STEPS):
        if not (tied and step > 1):
            inputs = INNER if step else D
            tensors[f"proj.{step}.weight"] = random_tensor(generator, INNER, inputs)
        if not (tied and step):
            tensors[f"emb.{step}.weight"] = random_tensor(generator, V, INNER)
            tensors[f"head.{step}.weight"] = random_tensor(generator, V, INNER) * 2
            tensors[f"ln.{step}.weight"] = random_tensor(generator, INNER)
            tensors[f"ln.{step}.bias"] = random_tensor(generator, INNER) - 1
    return tensors


def mlp_speculator(
    directory: Path, *, tied: bool = False, scaled: bool = False, prefix: str = "", **fields: Any
) -> str:
    config = {
        "model_type": "mlp_speculator",
        "vocab_size": V,
        "emb_dim": D,
        "inner_dim": INNER,
        "n_predict": STEPS,
        "tie_weights": tied,
        "scale_input": scaled,
    }
    tensors = {f"{prefix}{name}": tensor for name, tensor in mlp_tensors(tied).items()}
    return write_checkpoint(directory, config | fields, tensors)


CHECKPOINTS = {"medusa": medusa, "mlp_speculator": mlp_speculator}


def a_drafter(name: str, path: str | None, **changes: Any) -> Drafter:
    given: dict[str, Any] = {
        "argument": path,
        "vocab_size": V,
        "num_blocks": 8,
        "block_size": 4,
        "target": target_parts(),
    }
    return DRAFTERS[name](DrafterResources(**(given | changes)))


# --- references ----------------------------------------------------------------------------------


def normed_state(history: Seq[int]) -> Tensor:
    """[D] the target's last state before the last known token, through its final norm."""
    x = states(history[:-1], 1)[-1, 0]
    return x / (x.pow(2).mean() + NORM_EPS).sqrt() * norm_weight()


def medusa_logits(history: Seq[int], guesses: Seq[int]) -> Tensor:
    tensors = {name: tensor.double() for name, tensor in medusa_tensors().items()}
    head, x = len(guesses), normed_state(history)
    for block in range(BLOCKS):
        z = tensors[f"{head}.{block}.linear.weight"] @ x + tensors[f"{head}.{block}.linear.bias"]
        x = x + z * torch.sigmoid(z)
    return tensors[f"{head}.{BLOCKS}.weight"] @ x


def mlp_logits(
    history: Seq[int], guesses: Seq[int], *, tied: bool = False, scaled: bool = False
) -> Tensor:
    tensors = {name: tensor.double() for name, tensor in mlp_tensors(tied).items()}
    state_weight = 0.5 ** (0.5 / STEPS)
    emb_weight = math.sqrt((1 - state_weight**2) * (INNER / 2))
    x = normed_state(history)
    if scaled:
        x = x / (x.pow(2).mean() + 1e-6).sqrt() / math.sqrt(2)
    logits = torch.empty(0)
    for step, token in enumerate([history[-1], *guesses]):
        at, proj = (0, min(step, 1)) if tied else (step, step)
        z = tensors[f"proj.{proj}.weight"] @ x
        z = z + emb_weight / state_weight * tensors[f"emb.{at}.weight"][token]
        z = z / (z.pow(2).mean() + 1e-6).sqrt()
        z = z * tensors[f"ln.{at}.weight"] + tensors[f"ln.{at}.bias"]
        x = z * 0.5 * (1 + torch.erf(z / math.sqrt(2)))
        logits = tensors[f"head.{at}.weight"] @ x
    return logits


REFERENCES = {"medusa": medusa_logits, "mlp_speculator": mlp_logits}


# --- rows ----------------------------------------------------------------------------------------


def a_row(history: Seq[int], *, seq_id: int = 0, width: int = 1, **request: Any) -> DraftRow:
    return DraftRow(
        seq_id=seq_id,
        request=a_sampling_request(history[:2], **({"temperature": 0.0} | request)),
        history=history,
        num_known=len(history),
        max_tokens=8,
        kv_len=0,
        block_table=(0, 1, 2),
        width=width,
    )


def saw(drafter: Drafter, row: DraftRow) -> None:
    """A step that computed all but the last known token, in two chunks."""
    known = len(row.history) - 1
    for start, end in ((0, known // 2), (known // 2, known)):
        drafter.observe(
            [
                an_outcome(
                    row.history, start, end - start, row.request, num_states=1, seq_id=row.seq_id
                )
            ]
        )


def propose(drafter: Drafter, row: DraftRow) -> Draft:
    saw(drafter, row)
    (draft,) = drafter.propose([row])
    return draft


# --- parity --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_chain_is_the_references_as_long_as_there_are_heads(tmp_path: Path, name: str) -> None:
    draft = propose(a_drafter(name, CHECKPOINTS[name](tmp_path)), a_row(HISTORY))
    assert len(draft.token_ids) == 3
    assert draft.parents == (-1, 0, 1)
    for idx, token_id in enumerate(draft.token_ids):
        logits = REFERENCES[name](HISTORY, draft.token_ids[:idx])
        assert token_id == int(logits.argmax())
        assert draft.scores[idx] == pytest.approx(float(torch.softmax(logits, 0).max()), rel=1e-6)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_tree_holds_the_best_of_each_place(tmp_path: Path, name: str) -> None:
    draft = propose(a_drafter(name, CHECKPOINTS[name](tmp_path)), a_row(HISTORY, width=3))
    assert len(draft.token_ids) == 8
    paths: list[tuple[int, ...]] = []
    families: dict[tuple[int, ...], list[int]] = {}
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        before = paths[parent] if parent >= 0 else ()
        families.setdefault(before, []).append(token_id)
        paths.append((*before, token_id))
    for before, family in families.items():
        best = REFERENCES[name](HISTORY, before).topk(3).indices.tolist()
        assert family == best[: len(family)]


@pytest.mark.parametrize("options", [{"tied": True}, {"scaled": True}, {"prefix": "speculator."}])
def test_the_mlp_speculators_variants(tmp_path: Path, options: dict[str, Any]) -> None:
    draft = propose(
        a_drafter("mlp_speculator", mlp_speculator(tmp_path, **options)), a_row(HISTORY)
    )
    options.pop("prefix", None)
    for idx, token_id in enumerate(draft.token_ids):
        assert token_id == int(mlp_logits(HISTORY, draft.token_ids[:idx], **options).argmax())


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_sampling_rows_share_the_targets_noise(tmp_path: Path, name: str) -> None:
    row = a_row(HISTORY, temperature=0.8, seed=5)
    draft = propose(a_drafter(name, CHECKPOINTS[name](tmp_path)), row)
    for idx, token_id in enumerate(draft.token_ids):
        logits = REFERENCES[name](HISTORY, draft.token_ids[:idx])
        noise = torch.from_numpy(gumbel(5, len(HISTORY) + idx, Purpose.TARGET, V))
        assert token_id == int((logits / 0.8 + noise).argmax())


def test_medusa_gives_its_likeliest_tokens_where_guesses_are_tested(tmp_path: Path) -> None:
    """Heads are marginals: drawn apart they would not hang together."""
    drafter = a_drafter("medusa", medusa(tmp_path))
    tested = propose(drafter, a_row(HISTORY, temperature=1.0, verify="rejection"))
    assert tested.token_ids == propose(drafter, a_row(HISTORY)).token_ids
    assert tested.probs is None


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_heads_belong_to_the_layers_output_of_the_last_layer(tmp_path: Path, name: str) -> None:
    assert a_drafter(name, CHECKPOINTS[name](tmp_path)).hidden_layers == (NUM_LAYERS,)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_rows_are_guessed_as_if_alone_and_only_with_a_fresh_state(
    tmp_path: Path, name: str
) -> None:
    drafter = a_drafter(name, CHECKPOINTS[name](tmp_path))
    rows = [a_row(HISTORY[: 4 + idx], seq_id=idx, width=1 + idx) for idx in range(4)]
    for row in rows[:3]:
        saw(drafter, row)
    together = drafter.propose(rows)
    assert together[3] == Draft()  # never seen
    for row, draft in zip(rows[:3], together, strict=False):
        (alone,) = drafter.propose([row])
        assert (alone.token_ids, alone.parents) == (draft.token_ids, draft.parents)
    assert drafter.propose([a_row([*rows[0].history, 7])]) == [Draft()]  # a step was missed
    drafter.forget(1)
    assert drafter.propose([rows[1]]) == [Draft()]


# --- what is refused -----------------------------------------------------------------------------


def test_a_pickle_is_refused_and_its_conversion_told(tmp_path: Path) -> None:
    path = medusa(tmp_path)
    (tmp_path / "medusa_lm_head.safetensors").rename(tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ModelError, match="pickle") as caught:
        a_drafter("medusa", path)
    assert "save_file(torch.load('medusa_lm_head.pt', weights_only=True)" in str(caught.value)


def test_medusa_is_read_from_model_safetensors_too(tmp_path: Path) -> None:
    path = medusa(tmp_path, "model.safetensors")
    assert propose(a_drafter("medusa", path), a_row(HISTORY)).token_ids


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("medusa", {"medusa_num_heads": 4}, ["3.0.linear.weight"]),
        ("medusa", {"medusa_num_heads": 2}, ["no place", "2.0.linear.bias"]),
        ("medusa", {"medusa_num_heads": None}, ["medusa_num_heads"]),
        ("mlp_speculator", {"model_type": "llama"}, ["mlp_speculator", "'llama'"]),
        ("mlp_speculator", {"emb_dim": 32}, ["emb_dim is 32", "another target"]),
        ("mlp_speculator", {"vocab_size": V - 1}, ["vocab_size", "another target"]),
        ("mlp_speculator", {"n_predict": 4}, ["emb.3.weight"]),
        ("mlp_speculator", {"n_predict": 2}, ["no place", "emb.2.weight"]),
    ],
)
def test_what_does_not_fit_is_refused_at_load(
    tmp_path: Path, name: str, fields: Mapping[str, Any], words: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        a_drafter(name, CHECKPOINTS[name](tmp_path, **fields))
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_without_a_path_it_says_what_to_write(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}:PATH"):
        a_drafter(name, None)

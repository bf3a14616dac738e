"""EAGLE-3 against a reference written here: plain, one row at a time, no KV, all recomputed."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve.drafting import Draft, DraftRow
from specserve.errors import ConfigError, ModelError
from specserve.noise import Purpose, gumbel
from specserve_drafts import DRAFTERS, DrafterResources
from specserve_drafts.eagle3 import Eagle3Drafter
from specserve_drafts.eagle3_model import Eagle3Layer
from specserve_drafts.eagle3_torch import TorchEagle3
from specserve_drafts.head_files import NativeForm, TargetParts
from specserve_kernels import native_library, native_step
from tests.eagle3_reference import (
    FORMATS,
    PLAIN,
    VARIANTS,
    Reference,
    W,
    specforge,
    the_layer_fields,
    the_other_fields,
    the_tensors,
)
from tests.head_checkpoints import (
    NUM_LAYERS,
    V,
    an_outcome,
    target_parts,
    write_checkpoint,
)
from tests.logit_rows import a_sampling_request

BLOCK, NUM_BLOCKS = 4, 64


MakeDrafter = Callable[..., Eagle3Drafter]


def _parts(compute: str) -> TargetParts:
    if compute == "torch":
        return target_parts()
    return target_parts(
        dtype=torch.float32,
        embedding=target_parts().embedding.float(),
        native=NativeForm("fp32", 2),
    )


def new_drafter(compute: str, path: str, **changes: Any) -> Eagle3Drafter:
    given: dict[str, Any] = {
        "argument": path,
        "vocab_size": V,
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK,
        "target": _parts(compute),
    }
    drafter = DRAFTERS["eagle3"](DrafterResources(**(given | changes)))
    assert isinstance(drafter, Eagle3Drafter)
    return drafter


@pytest.fixture(params=["torch", "native"])
def a_drafter(request: pytest.FixtureRequest) -> MakeDrafter:
    """Every story is told to both; native code takes fp32, torch fp64."""
    if request.param == "native" and not native_step.available():
        pytest.skip(f"no native kernels: {native_library.why_not()}")
    return partial(new_drafter, request.param)


# --- a sequence as the engine would run it -------------------------------------------------------


class Running:
    """Prompt in chunks, then steps in which some guesses are accepted."""

    def __init__(
        self,
        drafter: Eagle3Drafter,
        prompt: Seq[int],
        *,
        seq_id: int = 0,
        blocks: Seq[int] = tuple(range(NUM_BLOCKS)),
        start: int = 0,
        kv_len: int = 0,
        **request: Any,
    ) -> None:
        self.drafter = drafter
        self.seq_id = seq_id
        self.history = list(prompt)
        self.request = a_sampling_request(prompt, **({"temperature": 0.0} | request))
        self.blocks = tuple(blocks)
        self.computed = start
        self.kv_len = kv_len

    def row(self, max_tokens: int = 4, width: int = 1, num_known: int | None = None) -> DraftRow:
        return DraftRow(
            seq_id=self.seq_id,
            request=self.request,
            history=self.history,
            num_known=len(self.history) if num_known is None else num_known,
            max_tokens=max_tokens,
            kv_len=self.kv_len,
            block_table=self.blocks,
            width=width,
        )

    def prefill(self, chunk: int, first_token: int) -> None:
        end = len(self.history)
        self.history.append(first_token)
        while self.computed < end:
            size = min(chunk, end - self.computed)
            self.propose(max_tokens=0, num_known=self.computed + size)
            self.observe(size)

    def propose(self, **row: Any) -> Draft:
        (draft,) = self.drafter.propose([self.row(**row)])
        self.kv_len = draft.kv_len
        return draft

    def observe(self, num_computed: int) -> None:
        outcome = an_outcome(
            self.history,
            self.computed,
            num_computed,
            self.request,
            num_states=3,
            seq_id=self.seq_id,
        )
        self.drafter.observe([outcome])
        self.computed += num_computed

    def say(self, token_ids: Seq[int]) -> None:
        """A step that emits these: all but the last were accepted guesses."""
        self.history += token_ids
        self.observe(len(token_ids))


def assert_chain_is_the_references(
    draft: Draft, reference: Reference, history: Seq[int], first_state: int = 0
) -> None:
    assert draft.parents == tuple(range(-1, len(draft.token_ids) - 1))
    for idx, token_id in enumerate(draft.token_ids):
        logits = reference.logits(history, draft.token_ids[:idx], first_state)
        assert token_id == int(logits.argmax())
        assert draft.scores[idx] == pytest.approx(float(torch.softmax(logits, 0).max()), rel=1e-5)


PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)


# --- parity --------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("file_format", FORMATS)
def test_both_public_formats_guess_what_the_reference_guesses(
    a_drafter: MakeDrafter, tmp_path: Path, file_format: str, variant: dict[str, Any]
) -> None:
    drafter = a_drafter(FORMATS[file_format](tmp_path, variant))
    running = Running(drafter, PROMPT)
    running.prefill(chunk=4, first_token=7)
    reference = Reference(variant)
    for accepted in (0, 2, 4):
        draft = running.propose(max_tokens=5)
        assert len(draft.token_ids) == 5
        assert_chain_is_the_references(draft, reference, running.history)
        running.say([*draft.token_ids[:accepted], 11 + accepted])


def test_a_tree_is_the_references_tree(a_drafter: MakeDrafter, tmp_path: Path) -> None:
    """Every node's children are the best of what the reference says after that node's path."""
    running = Running(a_drafter(specforge(tmp_path)), PROMPT)
    running.prefill(chunk=16, first_token=7)
    draft = running.propose(max_tokens=14, width=3)
    assert len(draft.token_ids) == 14
    paths: list[tuple[int, ...]] = []
    families: dict[tuple[int, ...], list[int]] = {}
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        before = paths[parent] if parent >= 0 else ()
        families.setdefault(before, []).append(token_id)
        paths.append((*before, token_id))
    assert max(len(path) for path in paths) > 2
    for before, family in families.items():
        logits = Reference(PLAIN).logits(running.history, before)
        assert family == logits.topk(3).indices.tolist()[: len(family)]


def test_sampling_rows_guess_with_the_targets_own_noise(
    a_drafter: MakeDrafter, tmp_path: Path
) -> None:
    running = Running(a_drafter(specforge(tmp_path)), PROMPT, temperature=0.7, seed=12)
    running.prefill(chunk=16, first_token=7)
    draft = running.propose(max_tokens=6)
    for idx, token_id in enumerate(draft.token_ids):
        logits = Reference(PLAIN).logits(running.history, draft.token_ids[:idx])
        noise = torch.from_numpy(gumbel(12, len(running.history) + idx, Purpose.TARGET, V))
        assert token_id == int((logits / 0.7 + noise).argmax())
    assert draft.probs is None


def test_under_rejection_the_law_it_drew_from_is_reported_over_the_targets_ids(
    a_drafter: MakeDrafter,
    tmp_path: Path,
) -> None:
    running = Running(a_drafter(specforge(tmp_path)), PROMPT, temperature=0.7, verify="rejection")
    running.prefill(chunk=16, first_token=7)
    draft = running.propose(max_tokens=3)
    assert draft.probs is not None
    for idx, token_id in enumerate(draft.token_ids):
        logits = Reference(PLAIN).logits(running.history, draft.token_ids[:idx])
        law = torch.softmax(logits / 0.7, 0)
        assert torch.allclose(draft.probs[idx].double(), law, atol=1e-6)
        assert law[token_id] > 0


# --- what its KV depends on ----------------------------------------------------------------------


def test_rows_of_a_batch_are_guessed_as_if_alone(a_drafter: MakeDrafter, tmp_path: Path) -> None:
    drafter = a_drafter(specforge(tmp_path))
    batch = [
        Running(drafter, PROMPT[: 3 + 4 * idx], seq_id=idx, blocks=range(idx, NUM_BLOCKS, 3))
        for idx in range(3)
    ]
    for running in batch:
        running.prefill(chunk=5, first_token=20 + running.seq_id)
    rows = [running.row(max_tokens=3 + idx, width=1 + idx) for idx, running in enumerate(batch)]
    together = drafter.propose(rows)
    for row, draft in zip(rows, together, strict=True):
        (alone,) = drafter.propose([row])
        assert (alone.token_ids, alone.parents) == (draft.token_ids, draft.parents)
        assert alone.scores == pytest.approx(draft.scores)


def test_random_acceptance_and_pauses_leave_no_trace(
    a_drafter: MakeDrafter, tmp_path: Path
) -> None:
    """After any past, with trees and steps without guesses, it guesses the reference's chain."""
    drafter = a_drafter(specforge(tmp_path))
    reference, chance = Reference(PLAIN), random.Random(1)
    running = Running(drafter, PROMPT)
    running.prefill(chunk=3, first_token=7)
    for _ in range(12):
        draft = running.propose(max_tokens=chance.choice([0, 4, 9]), width=chance.choice([1, 3]))
        path, at = [], -1
        for idx, parent in enumerate(draft.parents):
            if parent == at and chance.random() < 0.4:
                path.append(draft.token_ids[idx])
                at = idx
        running.say([*path, chance.randrange(V)])
    assert_chain_is_the_references(running.propose(max_tokens=4), reference, running.history)


def test_a_prefix_hit_on_its_own_blocks_guesses_as_on_a_cold_prompt(
    a_drafter: MakeDrafter, tmp_path: Path
) -> None:
    drafter = a_drafter(specforge(tmp_path))
    first = Running(drafter, PROMPT)
    first.prefill(chunk=16, first_token=7)
    first.propose(max_tokens=0)
    first.propose(max_tokens=1)
    assert first.kv_len == len(PROMPT)  # two whole blocks of 4 may be claimed
    drafter.forget(0)
    prompt = [*PROMPT[:8], 50, 51, 52]
    second = Running(drafter, prompt, seq_id=1, blocks=[0, 1, 40, 41, 42], start=8, kv_len=8)
    second.prefill(chunk=2, first_token=8)
    draft = second.propose(max_tokens=4)
    assert_chain_is_the_references(draft, Reference(PLAIN), second.history)
    assert draft.kv_len == len(prompt)


def test_a_hit_on_blocks_it_never_saw_is_guessed_from_what_it_did_see(
    a_drafter: MakeDrafter, tmp_path: Path
) -> None:
    drafter = a_drafter(specforge(tmp_path))
    running = Running(drafter, PROMPT, start=8)
    running.prefill(chunk=2, first_token=8)
    draft = running.propose(max_tokens=4)
    assert_chain_is_the_references(draft, Reference(PLAIN), running.history, first_state=8)
    assert draft.kv_len == 0  # the gap is never claimed
    running.say([33, 34])
    draft = running.propose(max_tokens=4)
    assert_chain_is_the_references(draft, Reference(PLAIN), running.history, first_state=8)
    assert draft.kv_len == 0


def test_states_it_missed_are_a_gap_and_not_a_mistake(
    a_drafter: MakeDrafter, tmp_path: Path
) -> None:
    drafter = a_drafter(specforge(tmp_path))
    running = Running(drafter, PROMPT)
    running.prefill(chunk=16, first_token=7)
    claimed = running.propose().kv_len
    running.history += [60, 61]
    running.computed += 2  # a step that nobody told it about
    assert running.propose().token_ids == ()
    running.say([62, 63])
    draft = running.propose()
    assert_chain_is_the_references(
        draft, Reference(PLAIN), running.history, first_state=len(running.history) - 3
    )
    assert draft.kv_len == claimed


def test_a_preempted_sequence_begins_again(a_drafter: MakeDrafter, tmp_path: Path) -> None:
    drafter = a_drafter(specforge(tmp_path))
    running = Running(drafter, PROMPT)
    running.prefill(chunk=16, first_token=7)
    before = running.propose()
    drafter.forget(0)
    again = Running(drafter, PROMPT, blocks=range(30, 60))
    again.prefill(chunk=16, first_token=7)
    assert again.propose() == before


def test_nothing_is_guessed_before_the_states_have_come(
    a_drafter: MakeDrafter, tmp_path: Path
) -> None:
    drafter = a_drafter(specforge(tmp_path))
    running = Running(drafter, PROMPT)
    assert running.propose() == Draft()
    running.prefill(chunk=16, first_token=7)
    drafter.forget(0)
    assert running.propose().token_ids == ()


def test_a_long_prompt_is_caught_up_with_in_bounded_steps(tmp_path: Path) -> None:
    layer = Eagle3Layer.load(specforge(tmp_path), target_parts(), V)
    compute = TorchEagle3(layer, vocab_size=V, num_blocks=NUM_BLOCKS, block_size=BLOCK)
    drafter = Eagle3Drafter(layer.config, compute, block_size=BLOCK, max_catch_up=5)
    running = Running(drafter, PROMPT)
    running.prefill(chunk=16, first_token=7)
    seen = [running.propose(max_tokens=2) for _ in range(3)]
    assert [draft.kv_len for draft in seen] == [5, 10, 11]
    assert [len(draft.token_ids) for draft in seen] == [0, 0, 2]


@pytest.mark.parametrize(("max_positions", "num_guesses"), [(100, 4), (13, 3), (11, 1), (10, 0)])
def test_it_does_not_run_past_its_own_length(
    a_drafter: MakeDrafter, tmp_path: Path, max_positions: int, num_guesses: int
) -> None:
    variant = {"max_position_embeddings": max_positions}
    running = Running(a_drafter(specforge(tmp_path, variant)), PROMPT)
    running.prefill(chunk=16, first_token=7)
    draft = running.propose(max_tokens=4)
    assert len(draft.token_ids) == num_guesses
    assert_chain_is_the_references(draft, Reference(variant), running.history)


# --- what it reads and what it refuses -----------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, (1, 3, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}}, (2, 4, 7)),
    ],
)
def test_layer_ids_are_inputs_at_the_top_and_outputs_inside_eagle_config(
    a_drafter: MakeDrafter, tmp_path: Path, fields: dict[str, Any], layers: tuple[int, ...]
) -> None:
    assert a_drafter(specforge(tmp_path, **fields)).hidden_layers == layers


def test_tokens_beyond_the_targets_tokenizer_are_never_guessed(
    a_drafter: MakeDrafter, tmp_path: Path
) -> None:
    drafter = a_drafter(specforge(tmp_path), vocab_size=V - 30)
    running = Running(drafter, PROMPT)
    running.prefill(chunk=16, first_token=7)
    draft = running.propose(max_tokens=20, width=8)
    assert draft.token_ids
    assert max(draft.token_ids) < V - 30


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 2}, ["num_hidden_layers", "2"]),
        ({"hidden_size": 32}, ["hidden size", "another target"]),
        ({"vocab_size": V - 1}, ["vocab_size", str(V - 1), str(V)]),
        ({"draft_vocab_size": W + 1}, ["lm_head.weight", str(W)]),
        ({"fc_norm": True}, ["fc_norm.0.weight"]),
        ({"attention_bias": True}, ["q_proj.bias"]),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, ["9", f"{NUM_LAYERS} layers"]),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ["use_aux_hidden_state"]),
        ({"speculators_model_type": "peagle"}, ["peagle"]),
        ({"norm_output": "yes"}, ["norm_output", "'yes'"]),
    ],
)
def test_what_it_cannot_compute_exactly_is_refused_at_load(
    a_drafter: MakeDrafter, tmp_path: Path, fields: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ModelError) as caught:
        a_drafter(specforge(tmp_path, **fields))
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("wrong", ["absolute", "without map", "another t2d", "leftover"])
def test_a_vocabulary_map_that_lies_is_refused(
    a_drafter: MakeDrafter, tmp_path: Path, wrong: str
) -> None:
    tensors = the_tensors(PLAIN)
    if wrong == "absolute":
        tensors["d2t"] = tensors["d2t"] + torch.arange(W)
    if wrong == "without map":
        del tensors["d2t"]
    if wrong == "another t2d":
        tensors["t2d"] = tensors["t2d"].roll(1)
    if wrong == "leftover":
        tensors["layers.1.mlp.up_proj.weight"] = torch.zeros(2, 2)
    config = the_layer_fields(PLAIN) | the_other_fields(PLAIN)
    with pytest.raises(ModelError, match=r"d2t|layers\.1"):
        a_drafter(write_checkpoint(tmp_path, config, tensors))


def test_without_a_path_or_a_target_it_says_what_it_needs(
    a_drafter: MakeDrafter, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="eagle3:PATH"):
        a_drafter(specforge(tmp_path), argument=None)
    with pytest.raises(ConfigError, match="hidden states"):
        a_drafter(specforge(tmp_path), target=None)

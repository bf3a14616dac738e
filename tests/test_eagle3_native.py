"""The native EAGLE-3 head against the torch one: same guesses, and bits that know no neighbours."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specserve.drafting import Draft, DraftRow
from specserve.llm import LLM, RequestOutput
from specserve.models.quantize import Int8Weight
from specserve.training.export import as_int8
from specserve.types import SamplingParams, Speculation
from specserve_drafts import DRAFTERS, DrafterResources
from specserve_drafts.eagle3 import Eagle3Drafter
from specserve_drafts.head_files import NativeForm, TargetParts
from specserve_kernels import native_library, native_step
from specserve_kernels.native_step import Dtype
from tests.eagle3_reference import specforge
from tests.head_checkpoints import V, an_outcome, states, target_parts
from tests.logit_rows import a_sampling_request
from tests.tiny_heads import BUILD
from tests.training_world import a_target

pytestmark = pytest.mark.skipif(
    not native_step.available(), reason=f"no native kernels: {native_library.why_not()}"
)
BLOCK, BLOCKS_EACH = 4, 16
NEW = {"fc_norm": True, "norm_output": True}
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5)


def parts(dtype: Dtype | None, **changes: Any) -> TargetParts:
    native = None if dtype is None else NativeForm(dtype, 2)
    embedding = target_parts().embedding.float()
    return target_parts(dtype=torch.float32, embedding=embedding, native=native, **changes)


def a_drafter(path: str, target: TargetParts) -> Eagle3Drafter:
    drafter = DRAFTERS["eagle3"](
        DrafterResources(
            argument=path, vocab_size=V, num_blocks=128, block_size=BLOCK, target=target
        )
    )
    assert isinstance(drafter, Eagle3Drafter)
    return drafter


def a_row(
    seq_id: int, history: Seq[int], *, kv_len: int = 0, max_tokens: int = 4, **asked: Any
) -> DraftRow:
    row = {name: asked.pop(name) for name in ("width", "sharpness") if name in asked}
    first = seq_id * BLOCKS_EACH
    return DraftRow(
        seq_id=seq_id,
        request=a_sampling_request(history[:3], **({"temperature": 0.0} | asked)),
        history=history,
        num_known=len(history),
        max_tokens=max_tokens,
        kv_len=kv_len,
        block_table=tuple(range(first, first + BLOCKS_EACH)),
        **row,
    )


def reads(drafter: Eagle3Drafter, row: DraftRow, chunk: int = 64, start: int = 0) -> DraftRow:
    """The row, once the drafter has seen the states of all but its last token, chunk by chunk."""
    end = len(row.history) - 1
    for at in range(start, end, chunk):
        computed = min(chunk, end - at)
        drafter.propose([replaced(row, max_tokens=0, num_known=at + computed)])
        drafter.observe(
            [an_outcome(row.history, at, computed, row.request, num_states=3, seq_id=row.seq_id)]
        )
    return row


def replaced(row: DraftRow, **changes: Any) -> DraftRow:
    fields = {name: getattr(row, name) for name in row.__struct_fields__}
    return DraftRow(**(fields | changes))


SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "plain": {"temperature": 0.8, "seed": 3},
    "negative seed": {"temperature": 1.5, "seed": -3},
    "top k": {"temperature": 1.0, "top_k": 3},
    "top p": {"temperature": 1.0, "top_p": 0.6},
    "min p": {"temperature": 1.2, "min_p": 0.2},
    "all three": {"temperature": 1.1, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
    "sharp": {"temperature": 0.9, "sharpness": 2.5},
    "penalties": {"temperature": 0.9, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
    "rejection": {"temperature": 0.7, "verify": "rejection"},
    "a tree": {"temperature": 0.7, "width": 3, "max_tokens": 11},
}


@pytest.mark.parametrize("asked", SAMPLING.values(), ids=SAMPLING)
def test_fp32_guesses_are_torchs_guesses(tmp_path: Path, asked: dict[str, Any]) -> None:
    """Noise of tokens that cannot win is exact here and rounded there: so scores may differ."""
    path = specforge(tmp_path, NEW)
    drafts = []
    for target in (parts(None), parts("fp32")):
        drafter = a_drafter(path, target)
        rows = [reads(drafter, a_row(idx, (*PROMPT, 7 + idx, 40), **asked)) for idx in range(6)]
        drafts.append(drafter.propose(rows))
    for torchs, natives in zip(*drafts, strict=True):
        assert len(torchs.token_ids) >= 4
        assert (natives.token_ids, natives.parents) == (torchs.token_ids, torchs.parents)
        assert natives.scores == pytest.approx(torchs.scores, rel=5e-2)
        assert natives.kv_len == torchs.kv_len


def test_int8_is_the_int8_oracle_but_for_the_rounding_of_kv(tmp_path: Path) -> None:
    """KV is bf16, and now and then a number falls on the other side of a rounding for it."""
    path = specforge(tmp_path, NEW)
    drafts = []
    for target in (parts(None, pack=Int8Weight), parts("int8")):
        drafter = a_drafter(path, target)
        rows = [reads(drafter, a_row(i, (*PROMPT, 7 + i), max_tokens=1)) for i in range(8)]
        drafts.append(drafter.propose(rows))
    same = [
        (natives, torchs)
        for torchs, natives in zip(*drafts, strict=True)
        if natives.token_ids == torchs.token_ids
    ]
    assert len(same) >= 7
    for natives, torchs in same:
        assert natives.scores == pytest.approx(torchs.scores, rel=0.15)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_bits_depend_on_no_neighbour_and_no_chunk(tmp_path: Path, dtype: Dtype) -> None:
    """Rows with other lengths, K and sampling; read whole, in pieces, or beside each other."""
    path = specforge(tmp_path, NEW)
    histories = [(*PROMPT * (1 + idx), 50 + idx) for idx in range(4)]
    rows = [
        a_row(idx, history, max_tokens=2 + idx, temperature=0.5 * (idx % 2))
        for idx, history in enumerate(histories)
    ]
    together = a_drafter(path, parts(dtype))
    for row in rows:
        reads(together, row)
    for row, draft in zip(rows, together.propose(rows), strict=True):
        for chunk in (1, 7):
            alone = a_drafter(path, parts(dtype))
            (expected,) = alone.propose([reads(alone, row, chunk)])
            assert draft == expected


def test_a_prefix_hit_guesses_bit_for_bit_as_a_cold_prompt(tmp_path: Path) -> None:
    drafter = a_drafter(specforge(tmp_path, NEW), parts("int8"))
    cold = reads(drafter, a_row(0, (*PROMPT, 60, 61)))
    (expected,) = drafter.propose([cold])
    drafter.forget(0)
    hit = reads(drafter, replaced(cold, kv_len=8), start=8)
    (draft,) = drafter.propose([hit])
    assert draft == expected


def test_useless_states_end_a_rows_guesses_and_no_others(tmp_path: Path) -> None:
    drafter = a_drafter(specforge(tmp_path, NEW), parts("int8"))
    rows = [a_row(idx, (*PROMPT, 7 + idx)) for idx in range(3)]
    for row in rows:
        reads(drafter, row)
    expected = drafter.propose(rows)
    damaged = an_outcome(rows[1].history, 10, 1, rows[1].request, num_states=3, seq_id=1)
    assert damaged.hidden is not None
    damaged.hidden[:] = torch.nan
    drafter.forget(1)
    drafter.propose([replaced(rows[1], max_tokens=0)])
    drafter.observe(
        [an_outcome(rows[1].history, 0, 10, rows[1].request, num_states=3, seq_id=1), damaged]
    )
    drafts = drafter.propose(rows)
    assert drafts[1].token_ids == ()
    assert (drafts[0], drafts[2]) == (expected[0], expected[2])
    # The blocks that held its numbers serve another sequence.
    drafter.forget(1)
    assert drafter.propose([reads(drafter, rows[1])]) == [expected[1]]


def test_states_are_read_where_the_step_left_them(tmp_path: Path) -> None:
    """Rows of one step's tensor, each a view; nothing is copied, so nothing may be confused."""
    drafter = a_drafter(specforge(tmp_path, NEW), parts("fp32"))
    rows = [a_row(idx, (*PROMPT, 7 + idx)) for idx in range(3)]
    expected = [drafter.propose([reads(drafter, row)])[0] for row in rows]
    for row in rows:
        drafter.forget(row.seq_id)
        drafter.propose([replaced(row, max_tokens=0, num_known=0)])
    step = torch.cat([states(row.history[:-1], 3) for row in rows]).float()
    size = len(PROMPT)
    for idx, row in enumerate(rows):
        outcome = an_outcome(row.history, 0, size, row.request, num_states=3, seq_id=idx)
        fields = {name: getattr(outcome, name) for name in outcome.__struct_fields__}
        own = step[idx * size : (idx + 1) * size]
        drafter.observe([type(outcome)(**(fields | {"hidden": own}))])
    assert drafter.propose(rows) == expected


def test_an_int8_checkpoint_loads_natively(tmp_path: Path) -> None:
    path = Path(specforge(tmp_path, NEW))
    whole: Draft = guesses_of(path)
    tensors = load_file(path / "model.safetensors")
    kept = {name: own for name, own in tensors.items() if not own.is_floating_point()}
    floats = {name: own for name, own in tensors.items() if own.is_floating_point()}
    save_file(as_int8(floats) | kept, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"format": "int-quantized"}
    (path / "config.json").write_text(json.dumps(config))
    rounded = guesses_of(path)
    assert rounded.token_ids == whole.token_ids
    assert rounded.scores == pytest.approx(whole.scores, rel=0.1)
    assert rounded.scores != whole.scores


def guesses_of(path: Path) -> Draft:
    drafter = a_drafter(str(path), parts("int8"))
    (draft,) = drafter.propose([reads(drafter, a_row(0, (*PROMPT, 7)))])
    return draft


@pytest.mark.parametrize("draft_dtype", ["auto", "fp32"])
def test_the_engine_guesses_natively_and_its_text_stays_what_it_was(
    tmp_path: Path, draft_dtype: str
) -> None:
    """Through the composition root; prompts with a common prefix, so that blocks are hit."""
    target = a_target(tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    head = BUILD["eagle3"](tmp_path / "head", config["hidden_size"], config["vocab_size"], 2)
    prompts = ["w5 w6 w7 " * 8 + f"w{idx}" for idx in range(2, 7)]
    with LLM(
        str(target),
        drafters=f"eagle3:{head}",
        dtype="int8",
        draft_dtype=draft_dtype,
        backend="native",
        kv_cache_gb=0.01,
        threads=2,
    ) as llm:
        for temperature in (0.0, 0.9):
            params = SamplingParams(temperature=temperature, seed=7, max_tokens=20, ignore_eos=True)
            outputs = [
                llm.generate(
                    prompts,
                    params,
                    speculation=Speculation(
                        drafter=name, max_draft_tokens=num_guesses, draft_width=width
                    ),
                )
                for name, num_guesses, width in (("none", 0, 1), ("eagle3", 3, 1), ("eagle3", 5, 2))
            ]
            texts = [[own.outputs[0].text for own in output] for output in outputs]
            assert texts[0] == texts[1] == texts[2]
            for output in outputs[1:]:
                assert all(spent(own) > 0 for own in output)


def test_what_auto_calls_late_knows_the_prompt_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of a prompt are gone once its step is over: whoever may guess later must keep them."""
    target = a_target(tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    head = BUILD["eagle3"](tmp_path / "head", config["hidden_size"], config["vocab_size"], 2)
    gaps: list[bool] = []
    propose = Eagle3Drafter.propose

    def watched(self: Eagle3Drafter, rows: Seq[DraftRow]) -> list[Draft]:
        drafts = propose(self, rows)
        gaps.extend(self._tracks[row.seq_id].has_gap for row in rows if row.max_tokens)
        return drafts

    monkeypatch.setattr(Eagle3Drafter, "propose", watched)
    with LLM(
        str(target), drafters=f"eagle3:{head}", dtype="int8", backend="native", kv_cache_gb=0.01
    ) as llm:
        for idx in range(8):
            params = SamplingParams(temperature=0.9, seed=idx, max_tokens=24, ignore_eos=True)
            llm.generate(f"w{idx} " + "w5 w6 w7 " * 30, params)
    assert gaps
    assert not any(gaps)


def spent(output: RequestOutput) -> int:
    """Guesses that were verified for it."""
    stats = output.outputs[0].speculation
    return 0 if stats is None else stats.num_draft_tokens

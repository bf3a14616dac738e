"""Words to give the engine's rows of logits to the Triton kernels, and random batches of them."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from specserve.sampler import LogitsRow
from tests.logit_rows import a_row

from specserve_kernels.triton_kernels import choosing, rows  # isort: skip


def as_row(row: LogitsRow, vocab_size: int, *, sharpness: float = 1.0) -> rows.Row:
    """The same wishes in the kernels' words."""
    request, params = row.request, row.request.params
    known = [*row.history, *row.draft_prefix]
    output = known[len(request.prompt_ids) :]
    penalised = (params.presence_penalty, params.frequency_penalty) != (0, 0)
    penalised |= params.repetition_penalty != 1
    stops = request.eos_ids | request.stop_ids if row.num_output < params.min_tokens else set()
    touched = {*(known if penalised else ()), *params.logit_bias, *stops}
    return rows.Row(
        seed=request.seed,
        position=row.position,
        temperature=0.0 if row.is_greedy else params.temperature,
        sharpness=sharpness,
        top_k=params.top_k,
        top_p=params.top_p,
        min_weight=math.log(params.min_p) if params.min_p > 0 else -math.inf,
        repetition=params.repetition_penalty,
        frequency=params.frequency_penalty,
        presence=params.presence_penalty,
        edits=tuple(
            rows.Edit(
                token_id,
                token_id in known,
                output.count(token_id),
                -math.inf if token_id in stops else params.logit_bias.get(token_id, 0.0),
            )
            for token_id in sorted(touched)
            if 0 <= token_id < vocab_size
        ),
    )


def choose(
    logits: Tensor,
    batch: Seq[rows.Row],
    vocab_size: int,
    *,
    purpose: int = 0,
    tile: int = 256,
    num_slots: int = 32,
    capacity: int = 256,
) -> rows.Choices:
    """A token per row of [L, V] logits through all the kernels; the logits stay as they are."""
    wanted = rows.pack_edits(batch, logits.device)
    chooser = choosing.Chooser(
        *(len(batch), vocab_size, logits.dtype, logits.device),
        num_edits=len(wanted.ids),
        tile=tile,
        num_slots=num_slots,
        capacity=capacity,
        chunk=512,
    )
    packed, before = rows.pack_rows(batch, logits.device), logits.clone()
    choices = chooser.choose(logits, packed, wanted, purpose=purpose)
    chooser.restore(logits, wanted)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    return choices


def some_logits(rng: np.random.Generator, num_rows: int, vocab_size: int) -> Tensor:
    """[L, V + padding] fp32: peaked or flat, with equal values, and the padding ids ahead."""
    spread = rng.choice([0.01, 1.0, 3.0, 30.0], size=(num_rows, 1))
    logits = rng.standard_normal((num_rows, vocab_size + 3)) * spread
    logits = np.where(rng.random((num_rows, 1)) < 0.5, (logits * 8).round() / 8, logits)
    logits[rng.random(logits.shape) < 0.05] = -math.inf
    logits[:, 0], logits[:, vocab_size:] = 0.0, 99.0
    return torch.from_numpy(logits.astype(np.float32))


def a_random_row(rng: np.random.Generator, vocab_size: int) -> LogitsRow:
    """Any mix of sampling parameters; greedy, unfiltered and unedited rows are common."""
    history = rng.integers(0, vocab_size + 4, size=rng.integers(1, 30)).tolist()
    prefix = tuple(rng.integers(-1, vocab_size + 4, size=rng.integers(0, 4)).tolist())
    edited = {
        "presence_penalty": float(rng.choice([0.0, 0.7])),
        "frequency_penalty": float(rng.choice([0.0, -0.3])),
        "repetition_penalty": float(rng.choice([1.0, 1.3])),
        "logit_bias": {int(i): float(rng.normal() * 5) for i in rng.integers(0, vocab_size, 3)},
        "min_tokens": int(rng.choice([0, 40])),
        "eos_ids": rng.integers(1, vocab_size + 3, 2).tolist() if vocab_size > 1 else [],
    }
    filters = {
        "top_k": int(rng.choice([0, 1, 2, 5, vocab_size, 10**6])),
        "top_p": float(rng.choice([1.0, 0.9, 0.3, 0.0])),
        "min_p": float(rng.choice([0.0, 0.05])),
    }
    return a_row(
        tuple(history),
        prompt=tuple(history[: rng.integers(1, len(history) + 1)]),
        draft_prefix=prefix,
        seed=int(rng.integers(-(2**63), 2**63)) + int(rng.choice([0, 2**63])),
        temperature=float(rng.choice([0.0, 1e-4, 0.7, 1.0, 3.0])),
        **(edited if rng.random() < 0.4 else {}),
        **(filters if rng.random() < 0.4 else {}),
    )

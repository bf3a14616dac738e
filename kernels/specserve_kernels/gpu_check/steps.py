"""Whole steps of random weights as CUDA graphs: draft forwards, a target forward, verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F

from specserve_kernels.gpu_check.decoder import Decoder, Linear, a_place
from specserve_kernels.gpu_check.report import Step
from specserve_kernels.gpu_check.timing import median_microseconds
from specserve_kernels.triton_kernels.choosing import Chooser
from specserve_kernels.triton_kernels.gemm import linear
from specserve_kernels.triton_kernels.model_shapes import MODEL_SHAPES, ModelShape
from specserve_kernels.triton_kernels.rows import Row, pack_edits, pack_rows
from specserve_kernels.triton_kernels.verification import Guesses, verify_replay

MULTIPLIES: dict[str, Linear] = {"exact replay": linear, "torch's GEMM": F.linear}


@dataclass(frozen=True)
class Plan:
    """models: shapes and layers by name; pairs: (target, draft); the first pair's batch of 1
    without guesses has a goal"""

    models: Mapping[str, tuple[ModelShape, int]]
    pairs: tuple[tuple[str, str], ...]
    batch_sizes: tuple[int, ...]
    num_guesses: tuple[int, ...]
    context: int


FULL = Plan(
    models={"Llama-3-8B": (MODEL_SHAPES[0], 32), "Qwen3-0.6B": (MODEL_SHAPES[1], 28)},
    pairs=(("Llama-3-8B", "Qwen3-0.6B"), ("Qwen3-0.6B", "Qwen3-0.6B")),
    batch_sizes=(1, 8, 32, 64),
    num_guesses=(0, 3, 7),
    context=1024,
)


def step_times(plan: Plan, device: torch.device, copy_bytes_per_s: float) -> Iterator[Step]:
    """Every pair, GEMM, batch size and number of guesses."""
    for pair in plan.pairs:
        target, draft = (_decoder(*plan.models[name], plan, device) for name in pair)
        for kind, batch_size, num_guesses in product(
            MULTIPLIES, plan.batch_sizes, plan.num_guesses
        ):
            step = step_call(target, draft, batch_size, num_guesses, kind, plan.context, device)
            once = target.weight_bytes + target.kv_bytes(batch_size, plan.context)
            each = draft.weight_bytes + draft.kv_bytes(batch_size, plan.context)
            has_goal = (pair, batch_size, num_guesses) == (plan.pairs[0], 1, 0)
            yield Step(
                f"{' + '.join(pair)}, {kind}",
                batch_size,
                num_guesses,
                median_microseconds([step], rounds=7),
                (once + num_guesses * each) / copy_bytes_per_s * 1e6,
                floor_share_wanted=0.85 if has_goal else 0.0,
            )


def _decoder(shape: ModelShape, num_layers: int, plan: Plan, device: torch.device) -> Decoder:
    most_rows = max(plan.num_guesses) + 1
    place = a_place(shape, max(plan.batch_sizes), most_rows, plan.context, device)
    return Decoder(shape, num_layers, place.num_blocks, device)


def step_call(
    target: Decoder,
    draft: Decoder,
    batch_size: int,
    num_guesses: int,
    kind: str,
    context: int,
    device: torch.device,
) -> Callable[[], None]:
    """Drafting is num_guesses draft forwards, each with its argmax; no result leaves the device."""
    multiply, per_sequence = MULTIPLIES[kind], num_guesses + 1
    num_rows, vocab_size = batch_size * per_sequence, target.shape.vocab_size
    verifies = a_place(target.shape, batch_size, per_sequence, context, device)
    drafts = a_place(draft.shape, batch_size, 1, context, device)
    rows = [Row(seed=seed, position=context) for seed in range(num_rows)]
    packed, edits = pack_rows(rows, device), pack_edits(rows, device)
    chooser = Chooser(num_rows, vocab_size, torch.bfloat16, device)
    index = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    input_ids = torch.zeros(batch_size, per_sequence, dtype=torch.int32, device=device)
    starts = index[::per_sequence].contiguous()
    guesses = Guesses(starts, input_ids.view(-1), index % per_sequence - 1)
    verdicts = torch.empty(batch_size, 2 * per_sequence, dtype=torch.int32, device=device)

    def step() -> None:
        for idx in range(num_guesses):
            logits = draft.forward(input_ids[:, idx], drafts, multiply)
            input_ids[:, idx + 1] = logits[:, :vocab_size].argmax(-1)
        logits = target.forward(input_ids.view(-1), verifies, multiply)
        verify_replay(guesses, chooser.choose(logits, packed, edits).token_ids, verdicts)

    return step

"""Which guesses the target confirms under `replay`: one program per sequence walks its tree.

    rows of a sequence   0 (root)  1 (guess 0)  2 (guess 1) ..., each with the choice there
    walk                 choice at 0 -> first child of 0 that is this token -> its choice -> ...

A chain is a tree. What comes out is one small buffer, all that the host ever reads of a step. The
law: specserve.verifier.verify_replay, with choice -1 for a row that has nothing to choose.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specserve_kernels.triton_kernels.model_shapes import Case, ModelShape


class Guesses(NamedTuple):
    """The drafts of B sequences, laid out as their rows of logits, on the device.

    starts:    [B+1] int32  sequence b has rows starts[b] .. starts[b+1]-1, its root first
    token_ids: [L] int32    the guess that each row comes after; the root's is not read
    parents:   [L] int32    the row of the parent, counted within the sequence: 0 is the root;
                            parents come before their children, and the root's own is -1
    """

    starts: Tensor
    token_ids: Tensor
    parents: Tensor


@triton.jit
def walk_kernel(
    starts_ptr,
    token_ids_ptr,
    parents_ptr,
    choices_ptr,  # [L] int32
    verdicts_ptr,  # [B, 2K+2] int32, out
    max_guesses,  # K
    MAX_ROWS: tl.constexpr,  # a power of two above K
):
    seq, rows = tl.program_id(0), tl.arange(0, MAX_ROWS)
    first = tl.load(starts_ptr + seq)
    there = rows < tl.load(starts_ptr + seq + 1) - first
    token_ids = tl.load(token_ids_ptr + first + rows, mask=there, other=-1)
    parents = tl.load(parents_ptr + first + rows, mask=there, other=-1)
    choices = tl.load(choices_ptr + first + rows, mask=there, other=-1)
    tokens_ptr = verdicts_ptr + seq * (2 * max_guesses + 2) + 1
    path_ptr = tokens_ptr + max_guesses + 1
    tl.store(tokens_ptr + rows, -1, mask=rows <= max_guesses)
    tl.store(path_ptr + rows, -1, mask=rows < max_guesses)
    tl.debug_barrier()  # what follows overwrites what other threads have just written
    token, num_tokens, node = tl.sum(tl.where(rows == 0, choices, 0), 0), 0, 0
    while token >= 0:
        tl.store(tokens_ptr + num_tokens, token)
        num_tokens += 1
        is_child = there & (parents == node) & (token_ids == token)
        child = tl.min(tl.where(is_child, rows, MAX_ROWS), 0)
        # -1 where there is no child, and where the child's row has nothing to choose: without
        # guesses its token would be emitted all the same, and the error met in the next step.
        token = tl.max(tl.where(rows == child, choices, -1), 0)
        if token >= 0:
            tl.store(path_ptr + num_tokens - 1, child - 1)
        node = child
    tl.store(tokens_ptr - 1, num_tokens)


def verify_replay(guesses: Guesses, choices: Tensor, verdicts: Tensor) -> None:
    """Fill `verdicts` with what each of B sequences emits.

    choices:  [L] int32, the target's token at each row; -1: it has none
    verdicts: [B, 2K+2] int32; K: the most guesses that a sequence may have. Of each sequence
              - how many tokens it emits: 1 + accepted guesses; 0 if the root has no choice
              - K+1 places for the tokens, then K for the accepted guesses (counted from 0, each
                the parent of the next); -1 where unused
    """
    num_sequences, width = verdicts.shape
    walk_kernel[(num_sequences,)](
        *(*guesses, choices, verdicts, width // 2 - 1),
        MAX_ROWS=triton.next_power_of_2(width // 2),
        num_warps=1,
    )


def aot_cases(shape: ModelShape) -> Iterator[Case]:
    ints = torch.empty(64, dtype=torch.int32)
    for most in (7, 63):
        verdicts = torch.empty(4, 2 * most + 2, dtype=torch.int32)
        call = partial(verify_replay, Guesses(ints, ints, ints), ints, verdicts)
        yield Case(f"up to {most} guesses", call)

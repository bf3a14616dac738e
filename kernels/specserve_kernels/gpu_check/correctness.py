"""Every kernel against its readable twin on random ragged batches, on any device.

On a CPU it runs in Triton's interpreter, with `TINY` sizes. Tokens, verdicts and a row's bits in
other company must be equal; floating-point results within the limits of the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from specserve_kernels.gpu_check.report import Correct
from specserve_kernels.triton_kernels import (
    gemm,
    norms,
    reference,
    reference_rejection,
    reference_sampling,
    rejection,
    shares,
)
from specserve_kernels.triton_kernels.choosing import Chooser
from specserve_kernels.triton_kernels.rows import Edit, Row, pack_edits, pack_rows
from specserve_kernels.triton_kernels.verification import Guesses, verify_replay

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Sizes:
    """Upper ends of what is drawn at random, and how often."""

    num_batches: int
    num_rows: int
    vocab_size: int
    hidden_size: int
    tile: int
    context: int
    heads: tuple[int, int, int]  # query heads, KV heads, head size


# The twins are numpy on one core: a row of this vocabulary takes them 25 ms, a chain 0.2 s.
FULL = Sizes(20, 24, 128256, 4096, 4096, 3000, (32, 8, 128))
TINY = Sizes(2, 3, 300, 96, 256, 40, (4, 2, 16))

Check = Callable[[Sizes, torch.device], Iterator[Correct]]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The largest error of an element, relative to it or to a typical one; NaN if there is one."""
    wanted = expected.double()
    size = wanted.abs() + wanted.square().mean().sqrt().clamp_min(1e-30)
    return float(((actual.double() - wanted).abs() / size).max().item())


def random_row(rng: np.random.Generator, vocab_size: int) -> Row:
    """Any sampling parameters; unfiltered and unedited rows are common."""
    row = Row(
        seed=int(rng.integers(-(2**63), 2**63)),
        position=int(rng.integers(0, 100_000)),
        temperature=float(rng.choice([0.0, 0.7, 1.0, 2.0])),
    )
    if rng.random() < 0.4:
        row = row._replace(
            top_k=int(rng.choice([0, 1, 40])),
            top_p=float(rng.choice([1.0, 0.95, 0.3])),
            min_weight=float(rng.choice([-math.inf, math.log(0.05)])),
        )
    if rng.random() < 0.4:
        ids = rng.choice(vocab_size, size=min(vocab_size, 100), replace=False).tolist()
        biases = rng.choice([0.0, 3.0, -math.inf], size=len(ids)).tolist()
        edits = tuple(
            Edit(token_id, seen=True, times=idx % 3, bias=bias)
            for idx, (token_id, bias) in enumerate(zip(ids, biases, strict=True))
        )
        row = row._replace(repetition=1.2, frequency=0.1, presence=0.2, edits=edits)
    return row


def check_sampling(sizes: Sizes, device: torch.device) -> Iterator[Correct]:
    """Tokens of the engine's law: filters, penalties, greedy and noise in one batch."""
    for dtype in (torch.float32, torch.bfloat16):
        num_wrong = 0
        for seed in range(sizes.num_batches):
            rng = np.random.default_rng(seed)
            num_rows = int(rng.integers(1, sizes.num_rows + 1))
            rows = [random_row(rng, sizes.vocab_size) for _ in range(num_rows)]
            spread = rng.choice([0.5, 3.0], size=(num_rows, 1))
            values = rng.standard_normal((num_rows, sizes.vocab_size)) * spread
            logits = torch.from_numpy(values.astype(np.float32)).to(dtype)
            expected = reference_sampling.choose_tokens(logits.float().numpy(), rows)
            edits = pack_edits(rows, device)
            chooser = Chooser(
                *(num_rows, sizes.vocab_size, dtype, device),
                num_edits=len(edits.ids),
                tile=sizes.tile,
                chunk=min(sizes.tile, 2048),
            )
            actual = chooser.choose(logits.to(device), pack_rows(rows, device), edits)
            num_wrong += int(np.sum(np.array(expected) != actual.token_ids.cpu().numpy()))
        yield Correct("sampling", f"tokens, {dtype}", sizes.num_batches, num_wrong, 0)


def check_shares(sizes: Sizes, device: torch.device) -> Iterator[Correct]:
    """How sure a draft is of its choice; the noise's bounds are fast logarithms: 1 %."""
    worst, count = 0.0, max(1, sizes.num_batches // 4)
    for seed in range(count):
        rng = np.random.default_rng(seed)
        rows = [random_row(rng, sizes.vocab_size)._replace(edits=()) for _ in range(2)]
        values = rng.standard_normal((2, sizes.vocab_size)).astype(np.float32) * 3
        logits, packed = torch.from_numpy(values).to(device), pack_rows(rows, device)
        chooser = Chooser(
            *(2, sizes.vocab_size, logits.dtype, device),
            tile=sizes.tile,
            chunk=min(sizes.tile, 2048),
        )
        choices = chooser.choose(logits, packed, pack_edits(rows, device))
        sums = shares.make_sums(2, sizes.vocab_size, device, tile=sizes.tile)
        found, size = torch.empty(2, device=device), sizes.vocab_size
        shares.shares_of(
            *(logits, packed, chooser.cuts, choices, sums, found),
            vocab_size=size,
            tile=sizes.tile,
        )
        triples = zip(values, rows, choices.token_ids.tolist(), strict=True)
        expected = [reference_sampling.share(*triple) for triple in triples]
        worst = max(worst, relative_error(found.cpu(), torch.tensor(expected)))
    yield Correct("shares", "of chosen tokens", count, worst, 1e-2)


def check_verification(sizes: Sizes, device: torch.device) -> Iterator[Correct]:
    """Random trees whose guesses are often right."""
    num_wrong = 0
    for seed in range(sizes.num_batches):
        rng = np.random.default_rng(seed)
        lengths = rng.integers(1, 9, size=int(rng.integers(1, sizes.num_rows + 1)))
        ids = rng.integers(0, 3, size=int(lengths.sum())).tolist()
        choices = rng.integers(-1 if seed % 2 else 0, 3, size=len(ids)).tolist()
        parents = [int(rng.integers(0, node)) if node else -1 for n in lengths for node in range(n)]
        starts = np.cumsum([0, *lengths])
        ints = [
            torch.tensor(column, dtype=torch.int32, device=device)
            for column in (starts, ids, parents, choices)
        ]
        verdicts = torch.empty(len(lengths), 16, dtype=torch.int32, device=device)
        verify_replay(Guesses(*ints[:3]), ints[3], verdicts)
        expected = [
            reference_sampling.replay_verdict(ids[a:b], parents[a:b], choices[a:b], 7)
            for a, b in pairwise(starts.tolist())
        ]
        num_wrong += int((verdicts.cpu() != torch.tensor(expected)).any(1).sum())
    yield Correct("verification", "replay, trees", sizes.num_batches, num_wrong, 0)


def check_rejection(sizes: Sizes, device: torch.device) -> Iterator[Correct]:
    """Chains of guesses that were drawn from a law much like the target's, or given."""
    for block in (True, False):
        num_wrong = 0
        for seed in range(sizes.num_batches):
            num_wrong += wrong_chains(sizes, device, seed, block)
        case = "block" if block else "rejection"
        yield Correct("rejection", f"{case}, chains", sizes.num_batches, num_wrong, 0)


def wrong_chains(sizes: Sizes, device: torch.device, seed: int, block: bool) -> int:
    """How many of a batch of two chains get another verdict than the twin's."""
    rng = np.random.default_rng(seed)
    count, size = 1 + seed % 4, sizes.vocab_size
    values = (rng.standard_normal((2 * count + 2, size)) * 2).astype(np.float32)
    rows = [
        Row(
            seed=seed * 2 + idx // (count + 1),
            position=9 + idx % (count + 1),
            top_k=30 * (seed % 2),
        )
        for idx in range(len(values))
    ]
    laws = np.exp(values + rng.standard_normal(values.shape) * 0.5).astype(np.float32)
    laws /= laws.sum(1, keepdims=True)
    guesses = [int(choice.argmax()) for choice in np.log(laws) + rng.gumbel(size=laws.shape)]
    # The first chain's guesses were drawn, the second one's given.
    drawn = [idx if idx < count else -1 for idx in range(len(values))]
    expected = [
        reference_rejection.chain_verdict(
            values[first : first + count + 1], rows[first : first + count + 1],
            guesses[first : first + count],
            [laws[idx] if first == 0 else None for idx in range(count)],
            max_guesses=7, block=block,
        )
        for first in (0, count + 1)
    ]  # fmt: skip
    logits = torch.from_numpy(values).to(device)
    packed, edits = pack_rows(rows, device), pack_edits(rows, device)
    chooser = Chooser(
        *(len(rows), size, logits.dtype, device), tile=sizes.tile, chunk=min(sizes.tile, 2048)
    )
    chooser.choose(logits, packed, edits)
    starts = [0, count + 1, 2 * count + 2]
    firsts = [0] * (count + 1) + [count + 1] * (count + 1)
    columns = starts, firsts, guesses, drawn
    ints = [torch.tensor(column, dtype=torch.int32, device=device) for column in columns]
    chains = rejection.Chains(ints[0], ints[1], ints[2], ints[3], torch.from_numpy(laws).to(device))
    verdicts = torch.empty(2, 16, dtype=torch.int32, device=device)
    rejection.verify_by_test(
        *(logits, packed, chooser.cuts, chooser.edited(edits), chooser.choices, chains),
        *(rejection.make_judged(len(rows), 2, device), verdicts),
        vocab_size=size,
        block=block,
        chunk=min(sizes.tile, rejection.CHUNK),
    )
    return int((verdicts.cpu() != torch.tensor(expected)).any(1).sum())


def check_gemm(sizes: Sizes, device: torch.device) -> Iterator[Correct]:
    """Close to the sum in fp64, and every row to the same bits alone."""
    size = sizes.hidden_size
    for dtype, limit in TOLERANCE.items():
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(size + 8, size, generator=generator).to(device, dtype)
        x = torch.randn(200, size, generator=generator).to(device, dtype)
        worst, num_different = 0.0, 0
        together = gemm.linear(x, weight)
        for num_rows in (1, 7, 130):
            actual = gemm.linear(x[:num_rows], weight)
            worst = max(worst, relative_error(actual, reference.linear(x[:num_rows], weight)))
            num_different += int((actual != together[:num_rows]).any(1).sum())
        yield Correct("gemm", f"product, {dtype}", 3, worst, limit)
        yield Correct("gemm", f"rows in other company, {dtype}", 3, num_different, 0)


def check_norms(sizes: Sizes, device: torch.device) -> Iterator[Correct]:
    for dtype, limit in TOLERANCE.items():
        worst = 0.0
        for seed in range(sizes.num_batches):
            generator = torch.Generator().manual_seed(seed)
            shape = 2, 1 + seed % sizes.num_rows, sizes.hidden_size
            x, residual = torch.randn(shape, generator=generator).to(device, dtype)
            weight = torch.randn(sizes.hidden_size, generator=generator).to(device, dtype)
            expected_residual = residual.clone()
            expected = reference.add_rms_norm(x, expected_residual, weight, 1e-5)
            actual = norms.add_rms_norm(x, residual, weight, 1e-5)
            worst = max(worst, relative_error(actual, expected))
            worst = max(worst, relative_error(residual, expected_residual))
        yield Correct("norms", f"add and norm, {dtype}", sizes.num_batches, worst, limit)


CHECKS: dict[str, Check] = {
    "sampling": check_sampling,
    "shares": check_shares,
    "verification": check_verification,
    "rejection": check_rejection,
    "gemm": check_gemm,
    "norms": check_norms,
}

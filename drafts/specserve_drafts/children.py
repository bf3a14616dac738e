"""From a draft's logits to guesses: the children of a node, best first.

Under `replay` they are the `width` largest of beta * log q + the target's own noise (Gumbel-top-k,
verification.md 2.4); under the rules with a test they are drawn from softmax(beta * log q) with
the draft's noise, without replacement, and the law is reported; a greedy row's are simply its best.
The request's own sampling parameters shape q first.

Only the draft's `MOST_CANDIDATES` best tokens are looked at: proposals may be anything, and below
rank 256 nothing is worth a row of the target. That makes the cost one top-k and one logsumexp over
the draft's vocabulary, and small numpy after that.

A guess's score is how probable the drafter thinks it, given what the choice will depend on: under
`replay` the softmax of the perturbed weights (the noise is shared, so it is known), at temperature
0 q itself. Where a guess is drawn, its own probability would tell which one was drawn, and leaving
guesses out by that bends the law: there the score comes from the largest probability of q alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specserve.noise import F64, Ids, Noise, Purpose, at_node, gumbel_of
from specserve.sampler import LogitsRow, RowError, as_rows, needs_edits
from specserve.sampler.rows import edited

MOST_CANDIDATES: Final = 256

_CELLS: Final = 2**16  # the noise's leading bits
_STEP: Final = 2.0**-65  # uniforms lie in (0, 1)


class Guess(NamedTuple):
    """probs: [vocab_size] fp32 it was drawn from; None where it was not drawn."""

    token_id: int
    score: float
    probs: Tensor | None


class Place(NamedTuple):
    """Where children are wanted.

    node:  which place of the step's draft they hang on: 0 the root, then by order of creation
    draws: whether rules with a test get drawn guesses; else the likeliest, which they take as given
    """

    row: LogitsRow
    node: int
    width: int
    sharpness: float
    draws: bool


class _Candidates(NamedTuple):
    """ids [m] target ids and logits [m] by falling logit, equals by rising id.

    log_mass: log of the sum of exp(logit / T) over the draft's whole vocabulary
    """

    ids: Ids
    logits: F64
    log_mass: float


def children(
    logits: Tensor, places: Seq[Place], *, vocab_size: int, target_ids: Ids | None = None
) -> list[list[Guess]]:
    """At most `width` guesses for each place, best first; none where its logits are useless.

    logits:     [n, W] of a draft, one row per place
    vocab_size: the target's; ids from there on are never proposed
    target_ids: [W] the target's id of each entry, all below vocab_size; None: entry v is token v
    """
    noise = Noise()
    found = _best(logits, places, vocab_size, target_ids)
    return [
        [] if candidates is None else _pick(candidates, place, vocab_size, noise)
        for candidates, place in zip(found, places, strict=True)
    ]


def _temperature(row: LogitsRow) -> float:
    return 1.0 if row.is_greedy else row.request.params.temperature


def _best(
    logits: Tensor, places: Seq[Place], vocab_size: int, target_ids: Ids | None
) -> list[_Candidates | None]:
    if not places:
        return []
    if target_ids is None:
        logits = logits[:, :vocab_size]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    temperatures = torch.tensor([_temperature(place.row) for place in places])[:, None]
    log_mass = torch.logsumexp(wide / temperatures.to(wide.dtype), dim=1).tolist()
    values, entries = wide.topk(min(MOST_CANDIDATES, wide.shape[1]), dim=1)
    values_np, entries_np = values.cpu().double().numpy(), entries.cpu().numpy()
    result: list[_Candidates | None] = []
    for idx, place in enumerate(places):
        if not np.isfinite(values_np[idx, 0]):  # NaN counts as the largest
            result.append(None)
        elif needs_edits(place.row) or place.row.request.constraint is not None:
            result.append(_edited(wide[idx : idx + 1], place.row, vocab_size, target_ids))
        else:
            ids = entries_np[idx] if target_ids is None else target_ids[entries_np[idx]]
            result.append(_in_order(ids, values_np[idx], log_mass[idx]))
    return result


def _edited(
    logits: Tensor, row: LogitsRow, vocab_size: int, target_ids: Ids | None
) -> _Candidates | None:
    """The slow way: penalties and masks know tokens by the target's ids. logits [1, W]."""
    plain = as_rows(logits, logits.shape[1])[0]
    if target_ids is not None:
        full = np.full(vocab_size, -np.inf, dtype=plain.dtype)
        full[target_ids] = plain
        plain = full
    try:
        weights = edited(plain, row).astype(np.float64)
    except RowError:  # what the target will meet, too: not a fault of the draft's
        return None
    best = float(weights.max())
    if not math.isfinite(best):
        return None
    temperature = _temperature(row)
    log_mass = best / temperature + math.log(np.exp((weights - best) / temperature).sum())
    ids = np.argpartition(-weights, min(MOST_CANDIDATES, len(weights)) - 1)[:MOST_CANDIDATES]
    return _in_order(ids, weights[ids], log_mass)


def _in_order(ids: Ids, logits: F64, log_mass: float) -> _Candidates:
    order = np.lexsort((ids, -logits))
    return _Candidates(ids[order], logits[order], log_mass)


def _pick(candidates: _Candidates, place: Place, vocab_size: int, noise: Noise) -> list[Guess]:
    ids, logits, log_mass = candidates
    row = place.row
    if row.is_greedy:
        width = min(place.width, int(np.isfinite(logits).sum()))
        scores = np.exp(logits[:width] - log_mass)
        return [Guess(int(ids[i]), float(scores[i]), None) for i in range(width)]
    weights = (logits - logits[0]) / row.request.params.temperature  # [m] falling from 0
    total = math.exp(min(log_mass - logits[0] / row.request.params.temperature, 700.0))
    num_kept, total = _survivors(weights, total, row)
    if row.request.verify != "replay" and not place.draws:
        scores = np.exp(weights[: min(place.width, num_kept)]) / total
        return [
            Guess(int(token_id), float(score), None)
            for token_id, score in zip(ids, scores, strict=False)
        ]
    ids, weights = ids[:num_kept], weights[:num_kept]
    sharp = weights * place.sharpness
    width = min(place.width, num_kept)
    if row.request.verify == "replay":
        chosen, scores = _coupled(ids, sharp, row, width, noise)
        return [Guess(int(ids[i]), float(scores[i]), None) for i in chosen]
    position = at_node(len(row.history), place.node)
    chosen, _ = _perturbed(ids, sharp, row.request.seed, position, Purpose.DRAFT, width, noise)
    law = np.exp(sharp)
    probs = torch.zeros(vocab_size, dtype=torch.float32)
    probs[torch.from_numpy(ids)] = torch.from_numpy((law / law.sum()).astype(np.float32))
    largest = 1 / max(total, 1.0)  # exp(weights[0]) is 1
    return [
        Guess(int(ids[i]), largest * (1 - largest) ** rank, probs) for rank, i in enumerate(chosen)
    ]


def _survivors(weights: F64, total: float, row: LogitsRow) -> tuple[int, float]:
    """How many of [m] weights, best first, top-k, top-p and min-p leave, and their mass.

    total: mass of the whole vocabulary on the scale of exp(weights)
    """
    params = row.request.params
    num_kept = int(np.isfinite(weights).sum())
    filters = False
    if params.top_k > 0:
        num_kept = min(num_kept, params.top_k)
        filters, total = True, float(np.exp(weights[:num_kept]).sum())
    if params.top_p < 1:
        held = np.cumsum(np.exp(weights[:num_kept]))
        num_kept = 1 + int(np.count_nonzero(held[:-1] < params.top_p * total))
        filters = True
    if params.min_p > 0:
        num_kept = max(1, int(np.count_nonzero(weights[:num_kept] >= math.log(params.min_p))))
        filters = True
    return num_kept, float(np.exp(weights[:num_kept]).sum()) if filters else total


def _coupled(
    ids: Ids, sharp: F64, row: LogitsRow, width: int, noise: Noise
) -> tuple[list[int], F64]:
    """Indices of the `width` best with the target's noise, and [m] softmax of what they won by."""
    chosen, scores = _perturbed(
        ids, sharp, row.request.seed, row.position, Purpose.TARGET, width, noise
    )
    shares: F64 = np.exp(scores - scores[chosen[0]])
    return chosen, shares / shares.sum()


def _cell_bounds() -> tuple[F64, F64]:
    """[2^16] lowest and highest noise of a uniform with these leading bits."""
    edges = np.arange(_CELLS + 1, dtype=np.float64) / _CELLS
    bounds = -np.log(-np.log1p(-np.clip(edges, _STEP, 1 - 2.0**-53)))
    return bounds[1:] - 1e-6, bounds[:-1] + 1e-6


_LOW, _HIGH = _cell_bounds()


def _perturbed(
    ids: Ids, weights: F64, seed: int, position: int, purpose: Purpose, width: int, noise: Noise
) -> tuple[list[int], F64]:
    """Indices of the `width` largest of weights + Gumbel noise, best first, and [m] those sums.

    Exact for all that can be among them; for the others the noise is taken from its leading bits.
    """
    cells = noise.leading_bits(seed, position, purpose, int(ids.max()) + 1)[ids]
    low, high = weights + _LOW[cells], weights + _HIGH[cells]
    bar = np.partition(low, len(low) - width)[len(low) - width]
    near = np.flatnonzero(high >= bar)
    scores = low.copy()  # a cell is narrow, but for the first: its low end is its likely end
    exact = noise.uniform_of(seed, position, purpose, ids[near], cells[near])
    scores[near] = weights[near] + gumbel_of(exact)
    best = near[np.lexsort((ids[near], -scores[near]))][:width]
    return best.tolist(), scores

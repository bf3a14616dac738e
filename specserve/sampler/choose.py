"""Choosing tokens fast: equal to argmax(process_logits + gumbel), without the full-width work.

Greedy is one argmax. A filter looks only at tokens near the best logit, widening until it has seen
enough; the draw computes noise only for tokens that can still win (noise.race). Rows of fp32 are
given to compiled code where there is some (native_sampler); numpy is its oracle, bit for bit.

Milliseconds for 16 rows of the demo model, V = 49,152, before -> after (one busy x86 core with
AVX-512; `python -m tests.sampler_cost`): greedy 0.16; T = 1 2.9 -> 0.67; T = 0.7 2.6 -> 0.78; top-p
0.95 at T = 1 4.4 -> 1.2, at T = 0.7 2.7 -> 0.78; top-k 40 2.4 -> 0.56; penalties 4.8 -> 1.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from specserve.noise import F32, MAX_SEED, Floats, Ids, Noise, Purpose, at_node, race
from specserve.sampler.pipeline import (
    MASS_UNIT,
    best_first,
    mass,
    masses,
    nucleus_mass,
    num_in_nucleus,
    process_row,
    sharpened,
    tempered,
)
from specserve.sampler.rows import (
    LogitsRow,
    RowError,
    allowed,
    as_rows,
    best_logit,
    check_best,
    edited,
)
from specserve.types import PromptLogprobs, SamplingParams, TokenLogprobs
from specserve_kernels import native_sampler

T = TypeVar("T")
# Distances below the best weight within which a filter first looks for what it keeps.
_MARGINS = (4.0, 8.0, 16.0, 32.0)
_LOWEST_LOGPROB = -9999.0  # stands for -inf, which JSON cannot carry


def choose(
    logits: Tensor,
    rows: Seq[LogitsRow],
    *,
    vocab_size: int,
    purpose: Purpose = Purpose.TARGET,
    at: Seq[int] | None = None,
) -> list[int | RowError]:
    """The token of every row: a pure function of (seed, position, processed logits) of that row.

    logits:     [L, V]
    vocab_size: ids from here on are padding and can never win
    at:         which of the L each of `rows` reads; None: all, in order
    returns:    a token id per row; a RowError where it has nothing to choose, for its request alone
    """
    all_rows = as_rows(logits, vocab_size)
    chosen_rows = all_rows if at is None else [all_rows[idx] for idx in at]
    plain = [
        _outcome(partial(edited, values, row))
        for values, row in zip(chosen_rows, rows, strict=True)
    ]
    usable = [
        (values, row)
        for values, row in zip(plain, rows, strict=True)
        if not isinstance(values, RowError)
    ]
    found = iter(_choose_edited(usable, purpose))
    return [values if isinstance(values, RowError) else next(found) for values in plain]


def _choose_edited(pairs: Seq[tuple[Floats, LogitsRow]], purpose: Purpose) -> list[int | RowError]:
    specs = [
        _row_spec(values, row, purpose, 1.0) for values, row in pairs if native_sampler.fits(values)
    ]
    if native_sampler.available() and len(specs) == len(pairs):
        found = native_sampler.choose(specs)
        ways = [partial(_token, choice, row) for choice, (_, row) in zip(found, pairs, strict=True)]
    else:
        noise = Noise()
        ways = [
            partial(choose_row_in_numpy, values, row, noise=noise, purpose=purpose)
            for values, row in pairs
        ]
    return [_outcome(way) for way in ways]


def _outcome(way: Callable[[], T]) -> T | RowError:
    try:
        return way()
    except RowError as error:
        return error


def choose_row(
    logits: Floats,
    row: LogitsRow,
    *,
    noise: Noise,
    purpose: Purpose = Purpose.TARGET,
    sharpness: float = 1.0,
) -> int:
    """One row of `choose`; [V] logits without padding ids. Raises RowError.

    sharpness: > 0; the processed log weights are multiplied by it (a proposal's beta)
    """
    logits = edited(logits, row)
    # Greedy is numpy's in either case: one argmax is as fast there as any, and nearer.
    if row.is_greedy or not (native_sampler.available() and native_sampler.fits(logits)):
        return choose_row_in_numpy(logits, row, noise=noise, purpose=purpose, sharpness=sharpness)
    return _token(native_sampler.choose_one(_row_spec(logits, row, purpose, sharpness)), row)


def _row_spec(
    logits: F32, row: LogitsRow, purpose: Purpose, sharpness: float
) -> native_sampler.RowSpec:
    """[V] edited logits, which must outlive the result, and what is wanted of them."""
    request, params = row.request, row.request.params
    return native_sampler.RowSpec(
        logits=native_sampler.address(logits),
        num_tokens=len(logits),
        seed_low=request.seed & MAX_SEED,
        seed_is_negative=request.seed < 0,
        position=row.position,
        purpose=purpose,
        top_p=params.top_p,
        temperature=0.0 if row.is_greedy else params.temperature,
        sharpness=sharpness,
        min_weight=math.log(params.min_p) if params.min_p > 0 else -math.inf,
        top_k=min(params.top_k, len(logits)),
    )


def _token(choice: native_sampler.Choice, row: LogitsRow) -> int:
    if choice.token_id < 0:
        check_best(choice.best, row)
    return int(choice.token_id)


def choose_row_in_numpy(
    logits: Floats,
    row: LogitsRow,
    *,
    noise: Noise,
    purpose: Purpose = Purpose.TARGET,
    sharpness: float = 1.0,
) -> int:
    """`choose_row` after `edited`: the oracle of the native sampler, and for where it is not."""
    best_id, best = best_logit(logits, row)
    if row.is_greedy:
        return best_id
    params = row.request.params
    weights = tempered(logits, best, params.temperature)
    ids = _surviving_ids(weights, params)
    if ids is not None:
        weights = weights[ids]
    return race(
        sharpened(weights, sharpness),
        seed=row.request.seed,
        position=row.position,
        purpose=purpose,
        ids=ids,
        noise=noise,
    )


def _surviving_ids(weights: Floats, params: SamplingParams) -> Ids | None:
    """Ascending ids that top-k, top-p and min-p leave of [V] weights (largest 0); None: all."""
    ids: Ids | None = None
    if 0 < params.top_k < len(weights):
        ids = _top_k_ids(weights, params.top_k)
    if params.top_p < 1:
        ids = _top_p_ids(weights, params.top_p, ids)
    if params.min_p > 0:
        lowest = math.log(params.min_p)
        ids = np.flatnonzero(weights >= lowest) if ids is None else ids[weights[ids] >= lowest]
    return ids


def _near_best(weights: Floats) -> Iterator[Ids]:
    """Ever larger sets of ascending ids, each holding all tokens above some weight; last, all."""
    for margin in _MARGINS:
        yield np.flatnonzero(weights >= -margin)
    yield np.arange(len(weights))


def _top_k_ids(weights: Floats, top_k: int) -> Ids:
    """Ascending ids of the top_k largest of [V] weights, the lowest ids among equals."""
    ids = next(ids for ids in _near_best(weights) if len(ids) >= top_k)
    values = weights[ids]
    lowest = np.partition(values, len(values) - top_k)[len(values) - top_k]
    return _best(ids, values, top_k, lowest)


def _best(ids: Ids, values: Floats, num_kept: int, lowest: np.floating[Any]) -> Ids:
    """The num_kept best of ascending [n] ids by values [n]; `lowest` is the last kept value."""
    kept = values > lowest
    equals = np.flatnonzero(values == lowest)
    kept[equals[: num_kept - np.count_nonzero(kept)]] = True
    survivors: Ids = ids[kept]
    return survivors


def _top_p_ids(weights: Floats, top_p: float, ids: Ids | None) -> Ids:
    """Ascending ids of the nucleus of [V] weights, restricted to `ids` if given."""
    if ids is None:
        each = masses(weights)
        enough = nucleus_mass(top_p, int(each.sum()))
        ids = next(ids for ids in _near_best(weights) if int(each[ids].sum()) >= enough)
    else:
        enough = nucleus_mass(top_p, mass(weights[ids]))
    values = weights[ids]
    falling = values.copy()
    falling.sort()  # values alone: far faster than a stable order of ids
    falling = falling[::-1]
    num_kept = num_in_nucleus(falling, enough)
    return _best(ids, values, num_kept, falling[num_kept - 1])


@dataclass(frozen=True, slots=True)
class Proposal:
    """A guess of a draft model. probs: [vocab_size] fp32 it was drawn from; None: coupled."""

    token_id: int
    probs: Tensor | None


def draft_choice(
    logits: Tensor,
    rows: Seq[LogitsRow],
    purposes: Seq[Purpose],
    *,
    vocab_size: int,
    sharpness: float = 1.0,
) -> list[Proposal | None]:
    """What a draft model proposes after each row, with its request's own sampling parameters.

    logits:     [L, V_draft]; ids from vocab_size (the target's) on are never proposed
    purposes:   L of TARGET, to share the noise that the target will choose with (replay), or DRAFT,
                to sample with independent noise and report the distribution (rejection)
    sharpness:  beta: proposals are drawn from softmax(beta * log q)
    returns:    L proposals; None where a row has nothing to propose (its logits are useless)
    """
    plain, noise = as_rows(logits, vocab_size), Noise()
    proposals: list[Proposal | None] = []
    for idx, (row, purpose) in enumerate(zip(rows, purposes, strict=True)):
        try:
            if purpose is Purpose.TARGET:
                token_id = choose_row(plain[idx], row, noise=noise, sharpness=sharpness)
                proposals.append(Proposal(token_id, None))
            else:
                proposals.append(_sampled(plain[idx], row, noise, vocab_size, sharpness))
        except RowError:
            proposals.append(None)
    return proposals


def _sampled(
    logits: Floats, row: LogitsRow, noise: Noise, vocab_size: int, sharpness: float
) -> Proposal:
    """[V_draft] -> a token drawn with DRAFT noise from probs, which is padded to [vocab_size]."""
    weights = sharpened(process_row(logits, row), sharpness)
    token_id = race(
        weights,
        seed=row.request.seed,
        position=at_node(len(row.history), len(row.draft_prefix)),
        purpose=Purpose.DRAFT,
        noise=noise,
    )
    probs = torch.zeros(vocab_size, dtype=torch.float32)
    probs[: len(weights)] = torch.from_numpy(np.exp(weights) / (mass(weights) * MASS_UNIT))
    return Proposal(token_id, probs)


def logprobs(
    logits: Tensor,
    token_ids: Seq[int],
    num_top: int,
    *,
    vocab_size: int,
    places: Seq[LogitsRow] = (),
) -> list[TokenLogprobs]:
    """Log-probabilities of the target's unprocessed distribution, as a plain forward gives them.

    logits:    [L, V] of the rows that chose token_ids
    token_ids: L chosen tokens
    num_top:   alternatives wanted, best first, equals by rising id
    places:    of the L, where a constraint says what can be chosen at all
    """
    plain = list(as_rows(logits, vocab_size))
    # The deepest first, where the constraint stands since verification: going back it has the masks
    # that it made on the way, going there again it would have to make them anew.
    for idx in reversed(range(len(places))):
        plain[idx] = allowed(plain[idx], places[idx])
    return [
        _row_logprobs(values, token_id, min(num_top, len(values)))
        for values, token_id in zip(plain, token_ids, strict=True)
    ]


def prompt_logprobs(
    logits: Tensor, token_ids: Seq[int], num_top: int, *, vocab_size: int, first: int
) -> list[PromptLogprobs]:
    """`logprobs` of tokens that were given, and their ranks. RowError where logits are no numbers.

    logits: [L, V]; row i is of what stands before token_ids[i], which is at position first + i
    """
    found: list[PromptLogprobs] = []
    for i, (values, token_id) in enumerate(
        zip(as_rows(logits, vocab_size), token_ids, strict=True)
    ):
        best = float(values.max())
        if not math.isfinite(best):
            raise RowError(
                f"the logits before the prompt's position {first + i} hold {best}: the model's "
                "weights or activations are damaged"
            )
        one = _row_logprobs(values, token_id, min(num_top, len(values)))
        rank = 1 + int(np.count_nonzero(values > values[token_id]))
        found.append(PromptLogprobs(one.logprob, one.top, rank))
    return found


def _row_logprobs(logits: Floats, token_id: int, num_top: int) -> TokenLogprobs:
    """[V] -> the chosen token's log-probability and the num_top best."""
    known = None
    if native_sampler.available() and native_sampler.fits(logits):
        known = native_sampler.masses(logits, num_top)
    if known is not None and len(known.best_ids) == num_top:
        best, total, best_ids = np.float32(known.best), known.total, known.best_ids.astype(np.intp)
    else:  # no native sampler, or a row so damaged or masked that numpy had better look at it
        best = logits.max()
        shifted = logits - best
        total = mass(shifted)
        best_ids = _top_k_ids(shifted, num_top) if num_top else np.arange(0)
    normaliser = math.log(total * MASS_UNIT)

    def logprob(idx: int) -> float:
        return max(float(logits[idx] - best) - normaliser, _LOWEST_LOGPROB)

    best_ids = best_ids[best_first(logits[best_ids] - best)]
    return TokenLogprobs(
        logprob=logprob(token_id), top=tuple((idx, logprob(idx)) for idx in best_ids.tolist())
    )

"""What one row of logits belongs to, and the edits that come before temperature.

Everything here depends on the row alone, and reductions over V run per row in numpy in an order
that depends on V alone: a row's result is bit for bit the same whatever its batch mates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.errors import ConstraintError, EngineError
from specserve.noise import Floats
from specserve.types import Request
from specserve_kernels import native_sampler

# Below this a temperature is greedy: it could only overflow, and no text would tell them apart.
GREEDY_BELOW = 1e-5


class RowError(EngineError):
    """One row cannot choose a token; its request fails alone, with this message."""


class UnfollowableError(RowError):
    """It cannot because of what its request asks for: no failure of the model or of this server."""


@dataclass(frozen=True, slots=True)
class LogitsRow:
    """The place a row of logits chooses for: right after `history` and then `draft_prefix`.

    history:      all known tokens, prompt first; read only while the step runs
    draft_prefix: guesses between history and this row's token, the node's ancestors first; they
                  count as output for penalties and min_tokens, exactly as if they were accepted
    """

    request: Request
    history: Seq[int]
    draft_prefix: tuple[int, ...] = ()

    @property
    def position(self) -> int:
        """Absolute index of the token being chosen."""
        return len(self.history) + len(self.draft_prefix)

    @property
    def num_output(self) -> int:
        """Output tokens before this one."""
        return self.position - len(self.request.prompt_ids)

    @property
    def banned(self) -> list[int]:
        """Tokens with which a bad word would be complete here."""
        words = self.request.bad_word_ids
        if not words:
            return []
        longest = max(len(word) for word in words) - 1
        first = max(len(self.request.prompt_ids), len(self.history) - longest)
        known = [*self.history[first:], *self.draft_prefix]
        return [word[-1] for word in words if len(known) >= len(word) - 1 and _ends(known, word)]

    @property
    def mask(self) -> bytes | None:
        """A bit per token that the request's constraint allows here; None: all. May raise RowError,
        for this row alone."""
        constraint = self.request.constraint
        if constraint is None:
            return None
        try:
            return constraint.mask(self.history, len(self.request.prompt_ids), self.draft_prefix)
        except ConstraintError as error:
            raise UnfollowableError(str(error)) from error
        except EngineError as error:
            raise RowError(str(error)) from error

    @property
    def is_greedy(self) -> bool:
        return self.request.params.temperature < GREEDY_BELOW


def _ends(known: Seq[int], word: Seq[int]) -> bool:
    """Whether what is known ends with all of a word but its last token."""
    return list(known[len(known) - len(word) + 1 :]) == list(word[:-1])


def needs_edits(row: LogitsRow) -> bool:
    """Whether params change the logits; if not here, then nowhere deeper.

    A constraint is not among them: what it forbids is cut from a draft, whoever made it.
    """
    params = row.request.params
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or params.logit_bias
        or params.allowed_token_ids is not None
        or row.request.bad_word_ids
        or row.num_output < params.min_tokens
    )


def as_rows(logits: Tensor, vocab_size: int) -> Floats:
    """[L, V] of any float type -> numpy fp32 (fp64 stays) [L, vocab_size], without padding ids."""
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    rows: Floats = logits.detach().cpu().numpy()
    return rows[:, :vocab_size]


def edited(logits: Floats, row: LogitsRow) -> Floats:
    """[V] with penalties, logit bias and masks; the input itself if none applies.

    Token ids outside the row's V (a draft's vocabulary may be smaller) are left alone.
    Raises RowError where the constraint cannot be followed.
    """
    return allowed(_penalised(logits, row), row)


def allowed(logits: Floats, row: LogitsRow) -> Floats:
    """[V] with -inf for tokens that the row's constraint forbids; the input itself if it has none.

    Raises RowError where the constraint cannot be followed.
    """
    mask = row.mask
    if mask is None:
        return logits
    bits = np.frombuffer(mask, np.uint8)
    may = np.unpackbits(bits, count=len(logits), bitorder="little").view(np.bool_)
    result = np.full_like(logits, -np.inf)
    np.copyto(result, logits, where=may)
    return result


def _penalised(logits: Floats, row: LogitsRow) -> Floats:
    """[V] with penalties, logit bias and what params forbid; the input itself if none applies."""
    request, params = row.request, row.request.params
    if not needs_edits(row):
        return logits
    logits = logits.copy()
    if (
        params.presence_penalty != 0
        or params.frequency_penalty != 0
        or params.repetition_penalty != 1
    ):
        known = np.array([*row.history, *row.draft_prefix], dtype=np.int64)
        if native_sampler.available() and native_sampler.fits(logits):
            native_sampler.penalise(
                logits,
                known,
                num_prompt=len(request.prompt_ids),
                presence=params.presence_penalty,
                frequency=params.frequency_penalty,
                repetition=params.repetition_penalty,
            )
        else:
            penalise_in_numpy(logits, known, row)
    for token_id, bias in params.logit_bias.items():
        if token_id < len(logits):
            logits[token_id] += bias
    never = row.banned
    if row.num_output < params.min_tokens:
        never += request.eos_ids | request.stop_ids
    logits[[token_id for token_id in never if token_id < len(logits)]] = -np.inf
    if params.allowed_token_ids is not None:
        may = [token_id for token_id in params.allowed_token_ids if token_id < len(logits)]
        if request.constraint is not None:  # it says where the text ends
            may += [token_id for token_id in request.eos_ids if token_id < len(logits)]
        kept = logits[may]
        logits.fill(-np.inf)
        logits[may] = kept
    return logits


def penalise_in_numpy(logits: Floats, known: NDArray[np.int64], row: LogitsRow) -> None:
    """In place, as vLLM defines them: repetition over prompt and output, the others over output.

    logits: [V]
    known:  [n] the tokens before this one; what is no token of this V does not count
    """
    params, vocab_size = row.request.params, len(logits)
    if params.repetition_penalty != 1:
        seen = np.unique(known[(known >= 0) & (known < vocab_size)])
        values = logits[seen]
        factor = params.repetition_penalty
        with np.errstate(over="ignore"):  # a model's own "never" (-3e38) may become -inf
            logits[seen] = np.where(values > 0, values / factor, values * factor)
    output = known[len(row.request.prompt_ids) :]
    output = output[(output >= 0) & (output < vocab_size)]  # a wrong guess may be any number
    ids, counts = np.unique(output, return_counts=True)
    logits[ids] -= params.frequency_penalty * counts
    logits[ids] -= params.presence_penalty


def best_logit(logits: Floats, row: LogitsRow) -> tuple[int, float]:
    """(token id, value) of the largest of [V], the lowest id among equals; RowError if none."""
    token_id = int(logits.argmax())  # numpy: the first of equals, and the first NaN if any
    value = float(logits[token_id])
    check_best(value, row)
    return token_id, value


def check_best(value: float, row: LogitsRow) -> None:
    """Raises RowError if nothing can be chosen from a row whose largest logit is `value`."""
    if value == -math.inf:
        raise UnfollowableError(
            f"every token is masked at position {row.position}: logit_bias, min_tokens, "
            "allowed_token_ids, bad_words and the grammar leave nothing to choose from; lower "
            "min_tokens or ban fewer tokens"
        )
    if not math.isfinite(value):
        raise RowError(
            f"the logits at position {row.position} hold {value}: the model's weights or "
            "activations are damaged, or logit_bias is not finite"
        )

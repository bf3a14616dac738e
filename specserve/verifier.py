"""Which guesses the target confirms, and the one token after them.

`replay` (default): the emitted token at a position is the target's own choice there, a function of
(seed, position, processed logits) only; a guess is accepted iff it is that choice. Chains and trees
are one walk. `rejection` (chains): the classic test p/q with a residual draw; same law, different
text, a little more accepted. Without guesses both are the same draw with the same noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

import msgspec
import numpy as np
import torch
from torch import Tensor

from specserve.drafting import Draft, is_chain, leading
from specserve.noise import F64, Floats, Noise, Purpose, race
from specserve.sampler import LogitsRow, RowError, as_rows, choose_row, process_row
from specserve.types import Request

# p and q differ by rounding only when this little is left; a rejection then was rounding too.
_NEGLIGIBLE_MASS = 1e-8


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """path: indices into the draft's nodes, each the parent of the next; all accepted.

    token_ids: the accepted guesses in order, then one recovered or bonus token
    """

    token_ids: tuple[int, ...]
    path: tuple[int, ...]


def node_rows(request: Request, history: Seq[int], draft: Draft) -> list[LogitsRow]:
    """Where each row of [last known token, guesses...] chooses: K+1 rows, root first."""
    rows = [LogitsRow(request, history)]
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        prefix = rows[parent + 1].draft_prefix  # row 0 is the root, row i+1 is node i
        rows.append(LogitsRow(request, history, (*prefix, token_id)))
    return rows


def verify(
    request: Request,
    history: Seq[int],
    draft: Draft,
    logits: Tensor,
    *,
    vocab_size: int,
    noise: Noise | None = None,
) -> Verdict:
    """Verify one sequence's guesses by its request's rule.

    logits: [K+1, V] of the target at the last known token and at each guess
    noise:  scratch space that the rows of a step may share
    raises: RowError if a row that is needed has nothing to choose, or rejection is asked of a tree
    """
    if request.verify == "rejection":
        return _rejection_with_usable_rows(request, history, draft, logits, vocab_size)
    rows, plain = node_rows(request, history, draft), as_rows(logits, vocab_size)
    scratch = noise or Noise()
    # Only rows that the walk arrives at are chosen for: after a wrong guess the rest costs nothing.
    return _walk(lambda idx: choose_row(plain[idx], rows[idx], noise=scratch), draft)


def verify_replay(choices: Seq[int | RowError], draft: Draft) -> Verdict:
    """Walk from the root while a child equals the target's choice; emit that choice either way.

    choices: K+1 target tokens, the root's first, then each node's. An error is raised only when
             the walk arrives at it: what a wrong guess leads to never matters
    """
    return _walk(lambda idx: _token(choices[idx]), draft)


def _walk(choice_at: Callable[[int], int], draft: Draft) -> Verdict:
    """choice_at: the target's token after the root (0) or after node i (i + 1)."""
    node, path = -1, []
    emitted = [choice_at(0)]
    # Parents come before children, so one pass meets every node after its parent.
    for idx, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        if parent != node or token_id != emitted[-1]:
            continue
        try:
            following = choice_at(idx + 1)
        except RowError:
            # Plain decoding would emit this token, too, and meet the error only in its next step,
            # if the token does not end the text: so end here, with the guess not taken as one.
            break
        node = idx
        path.append(idx)
        emitted.append(following)
    return Verdict(token_ids=tuple(emitted), path=tuple(path))


def _token(choice: int | RowError) -> int:
    if isinstance(choice, RowError):
        raise choice
    return choice


def _rejection_with_usable_rows(
    request: Request, history: Seq[int], draft: Draft, logits: Tensor, vocab_size: int
) -> Verdict:
    """What no guess leads to never matters: drop guesses from the end until the rows will do."""
    while True:
        try:
            return verify_rejection(request, history, draft, logits, vocab_size=vocab_size)
        except RowError:
            if not draft.token_ids:
                raise
            draft, logits = leading(draft, len(draft.token_ids) - 1), logits[:-1]


def verify_rejection(
    request: Request, history: Seq[int], draft: Draft, logits: Tensor, *, vocab_size: int
) -> Verdict:
    """Accept guess x with probability min(1, p(x) / q(x)); after the first failure draw from the
    residual max(p - q, 0), after none a bonus token from p.

    logits: [K+1, V]
    raises: RowError for a tree, or if a row that is needed has nothing to choose
    """
    if not is_chain(draft):
        raise RowError(
            f"verify 'rejection' accepts chains only, but a draft of {len(draft.token_ids)} "
            "guesses branches: use verify 'replay' or a drafter without trees"
        )
    noise, plain = Noise(), as_rows(logits, vocab_size)
    rows = node_rows(request, history, draft)
    num_guesses = len(draft.token_ids)
    laws = (
        (_log_softmax(process_row(plain[idx], rows[idx])), _draft_probs(draft, idx, vocab_size))
        for idx in range(num_guesses)
    )  # lazily: nothing behind the first failure is computed
    num_accepted, last = accept_chain(
        draft.token_ids, laws, seed=request.seed, position=len(history), noise=noise
    )
    if last is None:
        last = choose_row(plain[num_guesses], rows[num_guesses], noise=noise)
    return Verdict(
        token_ids=(*draft.token_ids[:num_accepted], last), path=tuple(range(num_accepted))
    )


def accept_chain(
    token_ids: Seq[int],
    laws: Iterable[tuple[F64, F64]],
    *,
    seed: int,
    position: int,
    noise: Noise,
) -> tuple[int, int | None]:
    """(guesses accepted, the recovered token; None if all were accepted and a bonus is due).

    laws:     per guess (log_p, q), [V] float64 each: the target's normalised log-probabilities and
              the probabilities that the guess was drawn from
    position: of the first guess
    """
    for idx, (token_id, (log_p, q)) in enumerate(zip(token_ids, laws, strict=True)):
        u = noise.accept_uniform(seed, position + idx)
        # A token id outside the vocabulary (a drafter's padding) is no token: never accepted.
        known = 0 <= token_id < len(log_p)
        if not known or math.log(u) + math.log(q[token_id]) >= log_p[token_id]:
            return idx, recover(log_p, q, seed=seed, position=position + idx, noise=noise)
    return len(token_ids), None


def recover(log_p: F64, q: F64, *, seed: int, position: int, noise: Noise) -> int:
    """A token from norm(max(p - q, 0)), with the RESIDUAL noise of `position`.

    log_p, q: [V]. The race needs no normalisation; where nothing is left p itself is drawn from
    """
    log_q = np.log(q, out=np.full_like(q, -np.inf), where=q > 0)  # NaN counts as 0
    more = log_p > log_q
    residual = np.full_like(log_p, -np.inf)
    with np.errstate(divide="ignore"):  # equal up to rounding: nothing is left
        residual[more] = log_p[more] + np.log1p(-np.exp(log_q[more] - log_p[more]))
    if float(np.exp(residual).sum()) <= _NEGLIGIBLE_MASS:
        residual = log_p
    return race(residual, seed=seed, position=position, purpose=Purpose.RESIDUAL, noise=noise)


def _log_softmax(weights: Floats) -> F64:
    """[V] log weights (largest 0) -> [V] float64 log probabilities."""
    wide = weights.astype(np.float64)
    result: F64 = wide - math.log(float(np.exp(wide).sum()))
    return result


def _draft_probs(draft: Draft, idx: int, vocab_size: int) -> F64:
    """[vocab_size] float64: the distribution that guess idx was drawn from.

    One-hot if the drafter gave none, or one that cannot be true: it drafted a token that it calls
    impossible. A draft vocabulary of another size is cut or padded with zeros.
    """
    q = np.zeros(vocab_size)
    token_id = draft.token_ids[idx]
    in_range = 0 <= token_id < vocab_size
    if draft.probs is not None:
        given = draft.probs[idx].to(torch.float64).cpu().numpy()[:vocab_size]
        q[: len(given)] = given
        if not in_range or q[token_id] > 0:
            return q
        q[:] = 0
    if in_range:
        q[token_id] = 1.0
    return q

"""Guesses that can come true: the rest of a draft is cut before anybody pays for it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specserve.drafting import Draft, pruned
from specserve.types import Request


def within_constraint(draft: Draft, request: Request, history: Seq[int]) -> Draft:
    """Without guesses that the request's constraint forbids, and what hangs on them.

    A drawn guess stays where it is forbidden, as the rejected draw that it is: to leave one out for
    what it is would bend the law. What hangs on it can go: nothing ever reaches it.
    """
    constraint = request.constraint
    if constraint is None or not draft.token_ids:
        return draft
    num_prompt = len(request.prompt_ids)
    paths: list[tuple[int, ...] | None] = []  # to each guess; None: no text goes there
    nodes: list[int] = []
    for node, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
        above = () if parent < 0 else paths[parent]
        if above is None:
            paths.append(None)
            continue
        path = (*above, token_id)
        fits = constraint.admits(history, num_prompt, path)
        paths.append(path if fits else None)
        if fits or draft.probs is not None:
            nodes.append(node)
    return pruned(draft, nodes)

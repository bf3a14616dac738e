"""Chains whose guesses are accepted by a test (rules `rejection` and `block`), on the device.

Their rows of logits stay there; drafts that report laws send them along. Such steps are launched in
their own size, and the laws are no part of what is measured of memory at start: a step that finds
no room says so. Trees under these rules, and `typical`, are for the host.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from specserve.drafting import Draft, is_chain
from specserve.types import RowPlan
from specserve_kernels.triton_kernels.choosing import Chooser
from specserve_kernels.triton_kernels.rejection import Chains, make_judged, verify_by_test
from specserve_kernels.triton_kernels.rows import Edits, Rows

RULES: Final = ("rejection", "block")


def is_tested(row: RowPlan, draft: Draft) -> bool:
    """Whether the device judges this row's guesses by a test."""
    return row.request.verify in RULES and bool(draft.token_ids) and is_chain(draft)


@dataclass(frozen=True)
class Tested:
    """Of a step: which chains, on the device, by which rules.

    places: by sequence that is tested: its rule, and its place among the chains
    """

    chains: Chains
    places: dict[int, tuple[str, int]]

    @property
    def rules(self) -> list[str]:
        return sorted({rule for rule, _ in self.places.values()})


def tested_of(
    rows: Seq[RowPlan],
    drafts: Seq[Draft],
    num_logits: Seq[int],
    num_rows: int,
    vocab_size: int,
    device: torch.device,
) -> Tested | None:
    """None where nothing is tested. Sequences that are not count as chains, too: what becomes of
    them is not read.

    num_logits: [B] rows of logits per sequence; num_rows: L, scored tokens included
    """
    tested = [is_tested(row, draft) for row, draft in zip(rows, drafts, strict=True)]
    if not any(tested):
        return None
    starts, places, laws = [0], dict[int, tuple[str, int]](), list[Tensor]()
    firsts, guesses, drawn = list(range(num_rows)), [-1] * num_rows, [-1] * num_rows
    for idx, (row, draft, count) in enumerate(zip(rows, drafts, num_logits, strict=True)):
        if not count:
            continue
        first = starts[-1]
        firsts[first : first + count] = [first] * count
        if tested[idx]:
            places[idx] = row.request.verify, len(starts) - 1
            guesses[first : first + count - 1] = draft.token_ids
            if draft.probs is not None:
                before = sum(len(law) for law in laws)
                drawn[first : first + count - 1] = range(before, before + count - 1)
                laws.append(draft.probs)
        starts.append(first + count)

    def ints(values: Seq[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(device)

    probs = torch.cat(laws).float() if laws else torch.zeros(1, vocab_size)
    chains = Chains(ints(starts), ints(firsts), ints(guesses), ints(drawn), probs.to(device))
    return Tested(chains, places)


def verdicts_by_rule(
    tested: Tested,
    logits: Tensor,
    rows: Rows,
    edits: Edits,
    chooser: Chooser,
    *,
    vocab_size: int,
    max_guesses: int,
    chunk: int,
) -> dict[str, Tensor]:
    """[C, 2K+2] of all chains by each rule, as verification.verify_replay lays them out.

    logits to chooser: of a `choose` just made
    """
    num_rows, num_chains = logits.shape[0], len(tested.chains.starts) - 1
    found = {}
    for rule in tested.rules:
        shape = num_chains, 2 * max_guesses + 2
        found[rule] = torch.empty(shape, dtype=torch.int32, device=logits.device)
        verify_by_test(
            *(logits, rows, chooser.cuts, chooser.edited(edits), chooser.choices),
            *(tested.chains, make_judged(num_rows, num_chains, logits.device), found[rule]),
            vocab_size=vocab_size,
            block=rule == "block",
            chunk=chunk,
        )
    return found

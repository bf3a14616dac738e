"""Rejection and block verification of chains in Triton: the verdicts of the engine's own rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from specserve.drafting import Draft, chain
from specserve.sampler import RowError
from specserve.types import Request, VerifyRule
from specserve.verifier import Verdict, node_rows, verify
from tests.interpreted_triton import ON_DEVICES
from tests.logit_rows import a_sampling_request
from tests.triton_rows import as_row

from specserve_kernels.triton_kernels import reference_rejection, rejection  # isort: skip (needs triton)
from specserve_kernels.triton_kernels.choosing import Chooser  # isort: skip
from specserve_kernels.triton_kernels.rows import pack_edits, pack_rows  # isort: skip

HISTORY, MAX_GUESSES = (1, 2, 3), 5
NUM_BATCHES, NUM_MORE = 8, 100  # ragged batches of each rule: by default, and with -m slow
every_rule = pytest.mark.parametrize("rule", ["rejection", "block"])


def chains_of(drafts: list[Draft], device: str) -> rejection.Chains:
    """The drafts' rows; every drawn guess has its law in a row of probs."""
    starts, firsts, guesses, drawn, laws = [0], [], [], [], [torch.zeros(1, 30)]
    for draft in drafts:
        count = len(draft.token_ids)
        firsts += [starts[-1]] * (count + 1)
        starts.append(starts[-1] + count + 1)
        guesses += [*draft.token_ids, -1]
        first_law = sum(len(part) for part in laws)
        has_laws = draft.probs is not None
        drawn += [*(first_law + idx if has_laws else -1 for idx in range(count)), -1]
        laws += [draft.probs] if draft.probs is not None else []
    ints = [
        torch.tensor(column, dtype=torch.int32, device=device)
        for column in (starts, firsts, guesses, drawn)
    ]
    return rejection.Chains(*ints, torch.cat(laws).to(device))


def verdicts_of(
    rule: VerifyRule, requests: list[Request], drafts: list[Draft], logits: torch.Tensor, size: int
) -> list[Verdict]:
    """The kernels', from [L, V] logits on."""
    rows = [
        as_row(row, size)
        for request, draft in zip(requests, drafts, strict=True)
        for row in node_rows(request, HISTORY, draft)
    ]
    device, logits = str(logits.device), logits.clone()
    packed, wanted = pack_rows(rows, device), pack_edits(rows, device)
    chooser = Chooser(
        *(len(rows), size, logits.dtype, device),
        num_edits=len(wanted.ids), tile=64, capacity=64, chunk=64,
    )  # fmt: skip
    chooser.choose(logits, packed, wanted)
    verdicts = torch.full((len(drafts), 2 * MAX_GUESSES + 2), -7, dtype=torch.int32, device=device)
    rejection.verify_by_test(
        *(logits, packed, chooser.cuts, chooser.edited(wanted), chooser.choices),
        *(chains_of(drafts, device), rejection.make_judged(len(rows), len(drafts), device)),
        verdicts, vocab_size=size, block=rule == "block", chunk=64,
    )  # fmt: skip
    found = []
    for count, *fields in verdicts.tolist():
        tokens, path = fields[: MAX_GUESSES + 1], fields[MAX_GUESSES + 1 :]
        assert set(tokens[count:]) <= {-1}
        assert set(path[max(count - 1, 0) :]) <= {-1}
        accepted = tuple(path[: max(count - 1, 0)])
        found.append(Verdict(token_ids=tuple(tokens[:count]), path=accepted))
    return found


def engines_verdict(request: Request, draft: Draft, logits: torch.Tensor, size: int) -> Verdict:
    try:
        return verify(request, HISTORY, draft, logits, vocab_size=size)
    except RowError:
        return Verdict(token_ids=(), path=())


def a_random_draft(rng: np.random.Generator, logits: torch.Tensor, size: int) -> Draft:
    """Guesses drawn from a law that is much like the target's, or given; some are no tokens."""
    count = len(logits) - 1
    noisy = logits[:count, :size].float().clamp(-20, 20).numpy() + rng.normal(size=(count, size))
    probs = np.exp(noisy - noisy.max(1, keepdims=True))
    probs /= probs.sum(1, keepdims=True)
    guesses = [int(rng.choice(size, p=law)) for law in probs]
    if count and rng.random() < 0.2:
        guesses[int(rng.integers(count))] = int(rng.choice([-1, size, 10**6]))
    laws = np.zeros((count, 30), dtype=np.float32)
    laws[:, :size] = probs
    is_drawn = count > 0 and rng.random() < 0.7
    return chain(guesses, probs=torch.from_numpy(laws) if is_drawn else None)


def check_batch(device: str, rule: VerifyRule, seed: int) -> None:
    """Chains of any length, filters, penalties, greedy rows, and rows with nothing to choose."""
    rng = np.random.default_rng(seed)
    size, requests, drafts, parts = int(rng.choice([3, 30])), [], [], []
    for idx in range(int(rng.integers(1, 4))):
        edited = {"presence_penalty": 1.0, "logit_bias": {0: 2.0}} if rng.random() < 0.3 else {}
        requests.append(
            a_sampling_request(
                HISTORY, seed=100 * seed + idx, verify=rule,
                temperature=float(rng.choice([0.0, 0.7, 1.0, 1.0])),
                top_k=int(rng.choice([0, 0, 2])), top_p=float(rng.choice([1.0, 0.8])), **edited,
            )
        )  # fmt: skip
        count = int(rng.integers(0, MAX_GUESSES + 1))
        values = rng.standard_normal((count + 1, size + 2)) * 2
        logits = torch.from_numpy(values.astype(np.float32))
        drafts.append(a_random_draft(rng, logits, size))
        if rng.random() < 0.2:
            logits[int(rng.integers(count + 1))] = -math.inf
        parts.append(logits)
    actual = verdicts_of(rule, requests, drafts, torch.cat(parts).to(device), size)
    triples = zip(requests, drafts, parts, strict=True)
    assert actual == [engines_verdict(*triple, size) for triple in triples]


@every_rule
def test_the_readable_twin_judges_as_the_engine_does(rule: VerifyRule) -> None:
    for seed in range(150):
        rng = np.random.default_rng(seed)
        size = int(rng.choice([3, 30]))
        request = a_sampling_request(
            HISTORY, seed=seed, verify=rule, temperature=float(rng.choice([0.0, 0.7, 1.0])),
            top_k=int(rng.choice([0, 2])), presence_penalty=float(rng.choice([0.0, 1.0])),
        )  # fmt: skip
        count = int(rng.integers(0, MAX_GUESSES + 1))
        logits = torch.from_numpy(rng.standard_normal((count + 1, size)).astype(np.float32) * 2)
        draft = a_random_draft(rng, logits, size)
        if rng.random() < 0.2:
            logits[int(rng.integers(count + 1))] = -math.inf
        laws = [None] * count if draft.probs is None else list(draft.probs.numpy())
        found = reference_rejection.chain_verdict(
            logits.numpy(), [as_row(row, size) for row in node_rows(request, HISTORY, draft)],
            draft.token_ids, laws, max_guesses=MAX_GUESSES, block=rule == "block",
        )  # fmt: skip
        verdict = engines_verdict(request, draft, logits, size)
        assert found[0] == len(verdict.token_ids)
        assert found[1 : 1 + found[0]] == list(verdict.token_ids)
        assert [idx for idx in found[MAX_GUESSES + 2 :] if idx >= 0] == list(verdict.path)


@ON_DEVICES
@every_rule
@pytest.mark.parametrize("seed", range(NUM_BATCHES))
def test_every_chain_gets_the_engines_verdict(device: str, rule: VerifyRule, seed: int) -> None:
    check_batch(device, rule, seed)


@ON_DEVICES
@pytest.mark.slow
@every_rule
@pytest.mark.parametrize("tens", range(NUM_MORE // 10))
def test_every_chain_of_many_batches_gets_the_engines_verdict(
    device: str, rule: VerifyRule, tens: int
) -> None:
    for seed in range(1000 + 10 * tens, 1010 + 10 * tens):
        check_batch(device, rule, seed)


@ON_DEVICES
@every_rule
def test_a_draft_that_is_the_target_is_accepted_whole(device: str, rule: VerifyRule) -> None:
    """p = q: after rounding there is next to nothing left to reject, and the bonus follows."""
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(2))
    request = a_sampling_request(HISTORY, seed=5, verify=rule)
    draft = chain([7, 8, 9], probs=torch.softmax(logits[:3].double(), -1).float())
    [verdict] = verdicts_of(rule, [request], [draft], logits.to(device), 30)
    assert verdict.path == (0, 1, 2)
    assert verdict == engines_verdict(request, draft, logits, 30)

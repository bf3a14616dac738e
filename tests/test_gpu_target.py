"""The device's step against the host's over the same kernels: same verdicts, log-probabilities, KV.

Both read logits of the same decoder, so nothing but sampling, verification and compaction can make
a difference. And padding: a step in a larger bucket leaves every live block as it was.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from specserve import loading
from specserve.compose import check_options
from specserve.config import EngineConfig
from specserve.drafting import NO_DRAFT, Draft, chain
from specserve.errors import ConfigError, EngineError
from specserve.kv_cache import KVCache
from specserve.loading import LoadedModel, check_kv_cache_dtype
from specserve.models.decoder import Decoder
from specserve.options import EngineOptions
from specserve.packing import pack
from specserve.sampler import LogitsRow, edited
from specserve.target import HostTarget, Judged, Target
from specserve.targets import make_target
from specserve.tokenizer import Tokenizer
from specserve.types import RowPlan
from specserve_kernels import PagedBatch, make_backend
from tests.interpreted_triton import ON_DEVICES, reachable
from tests.logit_rows import a_sampling_request
from tests.tiny_models import random_weights, tiny_config
from tests.triton_rows import a_random_row

from specserve.gpu.check import check_engine  # isort: skip (needs triton)
from specserve_kernels.gpu_check.correctness import TINY  # isort: skip
from specserve_kernels.triton_kernels import compaction  # isort: skip
from specserve.gpu.decoder import TritonDecoder  # isort: skip (needs triton)
from specserve.gpu.inputs import fill_forward, forward_fields  # isort: skip
from specserve.gpu.measured import MeasuredDecoder  # isort: skip
from specserve.gpu.sizes import StepSizes  # isort: skip
from specserve.gpu.staging import Staged  # isort: skip
from specserve.gpu.target import DeviceTarget  # isort: skip
from specserve.gpu.wishes import edits_of, mask_of  # isort: skip

V, S = 64, 4
CONFIG = tiny_config(vocab=V, layers=2, hidden=32, heads=4, kv_heads=2)


def a_decoder(device: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> TritonDecoder:
    config = tiny_config(vocab=V, **sizes)
    weights = random_weights(config, 3)
    return TritonDecoder(config, weights, dtype=dtype, device=torch.device(device))


@ON_DEVICES
@pytest.mark.parametrize("window", [None, 3])
def test_logits_are_those_of_the_reference(device: str, window: int | None) -> None:
    """Chains, a tree and a continued context, with grouped heads."""
    config = tiny_config(vocab=V, heads=4, kv_heads=2, window=window, tied=window is not None)
    weights = random_weights(config, 3)
    decoders = (
        TritonDecoder(config, weights, dtype=torch.float32, device=torch.device(device)),
        Decoder(config, weights, dtype=torch.float32, backend=make_backend("reference")),
    )
    tables = ((0, 1), (5,), (7, 3))
    first = PagedBatch((0, 5, 6, 10), (0, 0, 0), tables, (None, None, (-1, 0, 0, 1)), S)
    then = PagedBatch((0, 1, 3), (5, 1), tables[:2], (None, None), S)
    found = []
    for decoder in decoders:
        cache = decoder.new_kv_cache(8, S)
        ids, positions = torch.arange(10), torch.tensor([0, 1, 2, 3, 4, 0, 0, 1, 1, 2])
        logits = decoder.forward(ids, positions, first, cache, range(10))
        ids, positions = torch.tensor([11, 12, 13]), torch.tensor([5, 1, 2])
        found.append(torch.cat([logits, decoder.forward(ids, positions, then, cache, [0, 2])]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    assert found[0].std() > 0.5


@ON_DEVICES
def test_an_fp8_kv_pool_costs_a_few_percent_of_the_logits(device: str) -> None:
    """One forward over a prompt and one over its continuation, which reads the pool."""
    found = []
    for kv_dtype in (None, torch.float8_e4m3fn):
        config = tiny_config(vocab=V, heads=4, kv_heads=2)
        decoder = TritonDecoder(
            *(config, random_weights(config, 3)),
            dtype=torch.float32,
            device=torch.device(device),
            kv_dtype=kv_dtype,
        )
        cache = decoder.new_kv_cache(2, S)
        first = PagedBatch((0, 5), (0,), ((0, 1),), (None,), S)
        decoder.forward(torch.arange(5), torch.arange(5), first, cache, [])
        then = PagedBatch((0, 1), (5,), ((0, 1),), (None,), S)
        found.append(decoder.forward(torch.tensor([9]), torch.tensor([5]), then, cache, [0]))
    error = (found[1] - found[0]).square().mean().sqrt() / found[0].std()
    assert 1e-4 < float(error) < 0.1


@pytest.mark.parametrize(("capability", "problem"), [((8, 0), "this one has 8.0"), ((9, 0), None)])
def test_fp8_kv_is_refused_where_nothing_can_hold_it(
    capability: tuple[int, int], problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8 needs Triton's kernels"):
        check_options(EngineOptions(kv_cache_dtype="fp8"))
    monkeypatch.setattr(loading, "choose_backend", lambda backend, device: "triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if problem is None:
        check_kv_cache_dtype("fp8", "auto", "cuda")
    else:
        with pytest.raises(ConfigError, match=problem):
            check_kv_cache_dtype("fp8", "auto", "cuda")


def test_slots_of_fp8_kv_can_be_moved() -> None:
    cache = KVCache(
        layers=1, num_blocks=2, block_size=2, kv_heads=1, head_dim=2,
        dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    cache.keys[0, 0, 1] = 1.5
    cache.move([1], [2])
    assert cache.keys.float()[0, 1, 0].tolist() == [[1.5, 1.5]]
    assert cache.values.float().count_nonzero() == 0


# ---- padding -----------------------------------------------------------------------------


@ON_DEVICES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_writes_to_no_live_block_and_changes_no_bit(
    device: str, dtype: torch.dtype
) -> None:
    decoder = a_decoder(device, dtype)
    batch = PagedBatch((0, 3, 4), (5, 2), ((6, 1), (4,)), ((-1, 0, 0), None), S)
    ids, positions = [9, 8, 7, 6], [5, 6, 6, 2]
    own = decoder.geometry(S).of_batch(batch, num_logits=4)
    roomy = StepSizes(
        sequences=4, tokens=12, logits=6, guesses=0, tiles=6, table_width=4, path_width=5, splits=2
    )
    assert roomy.holds(own)
    found = []
    for sizes in (own, roomy):
        cache = decoder.new_kv_cache(8, S)
        marks = torch.randn(cache.keys.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        cache.keys.copy_(marks)
        cache.values.copy_(marks)
        staged = Staged(forward_fields(sizes), decoder.device)
        fill_forward(staged.host, ids, positions, batch, range(4), decoder.tile_sizes.tokens)
        staged.send()
        logits = decoder.run(decoder.inputs(staged.tensors, sizes, cache))
        found.append((logits[:4].cpu(), cache.keys.cpu(), cache.values.cpu()))
        written = (cache.keys.cpu() != marks).flatten(3).any(-1).any(0)  # [P, S]
        assert written.nonzero().tolist() == [[1, 1], [1, 2], [1, 3], [4, 2]]
    for plain, padded in zip(*found, strict=True):
        assert torch.equal(plain, padded)


@ON_DEVICES
def test_costs_are_measured_of_the_forward_that_is_served(device: str) -> None:
    decoder = a_decoder(device, layers=1)
    measured = MeasuredDecoder(decoder)
    batch = PagedBatch((0, 2), (1,), ((1,),), (None,), S)
    args = torch.tensor([5, 6]), torch.tensor([1, 2]), batch
    expected = decoder.forward(*args, decoder.new_kv_cache(2, S), [1])
    cache = measured.new_kv_cache(2, S)
    for _ in range(3):  # on a device: as it is, recorded, replayed
        assert torch.equal(measured.forward(*args, cache, [1]).cpu(), expected)


@ON_DEVICES
def test_the_largest_steps_run_empty_which_is_how_their_memory_is_measured(device: str) -> None:
    decoder = a_decoder(device)
    target = DeviceTarget(
        decoder,
        num_blocks=1,
        block_size=S,
        vocab_size=V,
        max_sequences=2,
        max_guesses=1,
        max_model_len=16,
    )
    with reachable(target.kv_tensors):
        target.run_largest(8)
    assert not any(tensor.any() for tensor in target.kv_tensors)


# ---- verdicts ----------------------------------------------------------------------------


def a_row(idx: int, num_known: int, **request: Any) -> RowPlan:
    """Its prompt of 3 and num_known - 3 tokens more, all computed in one step that samples."""
    rng = random.Random(idx)
    history = [rng.randrange(V) for _ in range(num_known)]
    return RowPlan(
        seq_id=idx,
        request=a_sampling_request(history[:3], seed=100 + idx, **request),
        history=history,
        start=0,
        num_tokens=num_known,
        max_draft_tokens=4,
        samples=True,
        is_prefill=False,
        block_table=(2 * idx, 2 * idx + 1, 40 + idx),
    )


class Odd:
    """A constraint under which only odd tokens may come, and after a guess of 1 nobody can tell."""

    def mask(self, known: Seq[int], num_prompt: int, prefix: Seq[int]) -> bytes | None:
        if 1 in prefix:
            raise EngineError("nobody can tell")
        return bytes([0b10101010] * 8)


ROWS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.8, "top_k": 9},
    {"temperature": 0.7, "presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {3: 2.0}},
    {"temperature": 0.7, "repetition_penalty": 1.4, "logprobs": 3, "bad_word_ids": ((5,), (7, 9))},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(0, 64, 3)), "logprobs": 0},
    {"temperature": 1.0, "min_tokens": 50, "eos_ids": (4, 5, 6)},
    {"temperature": 1.0, "verify": "block"},
    {"temperature": 1.0, "verify": "rejection", "logprobs": 1},
    {"temperature": 0.0, "allowed_token_ids": (1,), "logit_bias": {1: -math.inf}},  # nothing left
    {"temperature": 0.8, "min_p": 0.1},
]


def rows_of_all_kinds() -> list[RowPlan]:
    rows = [a_row(idx, 4 + idx % 3, **wishes) for idx, wishes in enumerate(ROWS)]
    odd = a_row(len(ROWS), 4, temperature=1.0)
    request = msgspec.structs.replace(odd.request, constraint=Odd())
    rows.append(msgspec.structs.replace(odd, request=request))
    read = a_row(len(ROWS) + 1, 5, prompt_logprobs=2)
    unsampled = msgspec.structs.replace(read, samples=False, num_scored=3)
    return [*rows, unsampled]


def a_draft(row: RowPlan, right: int) -> Draft:
    """One guess is right: first in a chain, or in a tree behind a wrong one."""
    if not row.samples:
        return NO_DRAFT
    if row.seq_id % 2:
        return chain([right, 1, 70])
    return Draft(token_ids=((right + 1) % V, right, 1, -1), parents=(-1, -1, 1, 1))


def run_on(target: Target, rows: Seq[RowPlan], drafts: Seq[Draft]) -> list[Judged]:
    packed = pack(rows, drafts, S, vocab_size=V)
    return target.run(rows, drafts, packed, (), lambda: None).judged


@ON_DEVICES
def test_verdicts_are_the_hosts_for_every_kind_of_request(device: str) -> None:
    decoder = a_decoder(device, layers=1)
    host = HostTarget(decoder, num_blocks=64, block_size=S, vocab_size=V)
    target = DeviceTarget(
        decoder,
        num_blocks=64,
        block_size=S,
        vocab_size=V,
        max_sequences=16,
        max_guesses=4,
        max_model_len=12,
    )
    rows = rows_of_all_kinds()
    plain = run_on(host, rows, [NO_DRAFT] * len(rows))
    drafts = [
        a_draft(row, judged.verdict.token_ids[0] if judged.verdict else 0)
        for row, judged in zip(rows, plain, strict=True)
    ]
    with reachable(target.kv_tensors):
        expected, actual = run_on(host, rows, drafts), run_on(target, rows, drafts)
        assert actual == expected
        assert [judged.verdict is None for judged in plain] == [idx in (8, 11) for idx in range(12)]
        assert len(actual[11].prompt_logprobs) == 3
        assert plain[8].error is not None
        assert "every token is masked" in plain[8].error
        replayed = [idx for idx in range(12) if idx not in (6, 7, 8, 11)]
        for idx in replayed:
            verdict = actual[idx].verdict
            assert verdict is not None
            assert verdict.path == (0,) if idx % 2 else (1,)
        # The next step reads what compaction left behind, in a bucket.
        following = [next_row(rows[idx], actual[idx]) for idx in (0, 1, 2, 5, 6, 7, 9)]
        nothing = [NO_DRAFT] * len(following)
        assert run_on(target, following, nothing) == run_on(host, following, nothing)


def next_row(row: RowPlan, judged: Judged) -> RowPlan:
    assert judged.verdict is not None
    params = msgspec.structs.replace(row.request.params, logprobs=None)
    history = [*row.history, *judged.verdict.token_ids]
    return msgspec.structs.replace(
        row,
        request=msgspec.structs.replace(row.request, params=params),
        history=history,
        start=len(history) - 1,
        num_tokens=1,
    )


def test_edits_and_masks_come_to_what_the_sampler_does() -> None:
    """In numpy: rows of any mix of parameters."""
    rng = np.random.default_rng(5)
    num_edited = 0
    for _ in range(300):
        place = a_random_row(rng, V)
        if rng.random() < 0.3:
            allowed = tuple(rng.integers(0, V + 5, 9).tolist())
            params = msgspec.structs.replace(place.request.params, allowed_token_ids=allowed)
            request = msgspec.structs.replace(place.request, params=params)
            place = LogitsRow(request, place.history, place.draft_prefix)
        logits = rng.standard_normal(V).astype(np.float32)
        expected, found = edited(logits, place), logits.copy()
        params = place.request.params
        for edit in edits_of(place, V):
            num_edited += 1
            x = np.float32(found[edit.token_id])
            if edit.seen:
                penalty = np.float32(params.repetition_penalty)
                x = x / penalty if x > 0 else x * penalty
            if edit.times:
                x = np.float32(np.float64(x) - params.frequency_penalty * edit.times)
                x -= np.float32(params.presence_penalty)
            found[edit.token_id] = x + np.float32(edit.bias)
        mask = mask_of(place, V)
        if mask is not None:
            bits = np.unpackbits(mask.view(np.uint8), count=V, bitorder="little")
            found[bits == 0] = -np.inf
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert num_edited > 1000


@ON_DEVICES
def test_the_engines_check_passes_here(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses_of = compaction.cache_addresses
    with ExitStack() as stack:

        def watched(caches: list[Tensor]) -> compaction.CacheAddresses:
            stack.enter_context(reachable(caches))
            return addresses_of(caches)

        monkeypatch.setattr(compaction, "cache_addresses", watched)
        found = list(check_engine(replace(TINY, num_rows=2, context=32), torch.device(device)))
    worst = [(result.num_batches, result.worst) for result in found]
    assert worst == [(2, 0)] * 3 + [(3 * 2, 0)]


@ON_DEVICES
def test_a_gpu_without_room_is_said_with_the_way_out(
    device: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    decoder = a_decoder(device, layers=1)
    config = EngineConfig(num_blocks=77, block_size=S, max_model_len=16, max_num_seqs=2)
    loaded = LoadedModel(decoder, cast(Tokenizer, SimpleNamespace(vocab_size=V)), tmp_path, True)
    target = make_target(config, loaded)
    monkeypatch.setattr(decoder, "run", full)
    with pytest.raises(EngineError, match=r"in a step of 4 tokens with 1 rows.*2\.00 GiB.*lower"):
        run_on(target, [a_row(0, 4)], [NO_DRAFT])
    monkeypatch.setattr(decoder, "new_kv_cache", full)
    with pytest.raises(ConfigError, match=r"KV pool of 77 blocks \(tried.*--gpu-memory-util"):
        make_target(config, loaded)

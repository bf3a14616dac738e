"""The loop: many requests at once, aborts, failures of one row and of a whole step."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import pytest
import torch
from blockbuster import blockbuster_ctx
from torch import Tensor

from specserve.config import EngineConfig
from specserve.drafting import Draft, Drafter, chain
from specserve.errors import RequestError
from specserve.kv_cache import KVCache
from specserve.models.decoder import Decoder
from specserve.types import SamplingParams, Speculation, TokenChunk, VerifyRule
from specserve_drafts import DRAFTERS, DrafterResources, Script
from specserve_drafts.ngram import NgramDrafter
from specserve_kernels.interface import PagedBatch
from specserve_observability.logs import configure_logging
from tests.engines import serving
from tests.log_lines import json_lines
from tests.tiny_models import tiny_decoder


def a_model() -> Decoder:
    torch.set_num_threads(1)
    return tiny_decoder(vocab=64, seed=5, dtype=torch.float64)


def a_config(*, pool: int = 60, max_waiting: int = 1000, seqs: int = 6) -> EngineConfig:
    return EngineConfig(
        block_size=4,
        num_blocks=pool,
        max_model_len=120,
        max_num_seqs=seqs,
        max_num_batched_tokens=48,
        max_prefill_chunk=16,
        max_waiting=max_waiting,
    )


class FailingModel:
    """A real decoder whose forward raises in one step, or gives one row logits of NaN."""

    def __init__(self, inner: Decoder, *, fail_at: int = -1, nan_token: int = -1) -> None:
        self._inner = inner
        self._fail_at = fail_at
        self._nan_token = nan_token
        self._num_steps = 0
        self.vocab_size = inner.vocab_size
        self.dtype = inner.dtype

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        return self._inner.new_kv_cache(num_blocks, block_size)

    def kv_bytes_per_token(self) -> int:
        return self._inner.kv_bytes_per_token()

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batch: PagedBatch,
        kv_cache: KVCache,
        logits_indices: Seq[int],
    ) -> Tensor:
        self._num_steps += 1
        if self._num_steps == self._fail_at:
            raise RuntimeError("injected")
        logits = self._inner.forward(input_ids, positions, batch, kv_cache, logits_indices)
        for row, at in enumerate(logits_indices):
            if int(input_ids[at]) == self._nan_token:
                logits[row] = float("nan")
        return logits


async def test_after_500_mixed_requests_with_aborts_nothing_is_left() -> None:
    rng = random.Random(7)
    async with serving(a_model(), a_config(pool=40), drafters={"ngram": NgramDrafter()}) as served:

        async def one(idx: int) -> TokenChunk | None:
            prompt = [rng.randrange(64) for _ in range(rng.randrange(1, 40))]
            params = SamplingParams(
                temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randrange(1, 24), seed=idx
            )
            speculation = Speculation(
                drafter=rng.choice(["none", "ngram"]), max_draft_tokens=rng.randrange(0, 8)
            )
            [request] = served.requests(
                prompt,
                params,
                name=f"{idx}",
                speculation=speculation,
                priority=rng.randrange(-1, 2),
                cache_salt=rng.choice([None, "a"]),
            )
            abort_after = rng.randrange(0, 6) if rng.random() < 0.3 else None
            await asyncio.sleep(rng.random() * 0.5)
            stream = served.engine.submit(request)
            last = None
            async for chunk in stream:
                last = chunk
                if abort_after is not None and chunk.num_output_tokens >= abort_after:
                    stream.close()
                    stream.close()
                    return None
                now = served.engine.snapshot()
                assert now.blocks_free + now.blocks_cached + now.blocks_live == now.blocks_total
            return last

        ended = await asyncio.gather(*(one(idx) for idx in range(500)))
        finished = [chunk for chunk in ended if chunk is not None]
        assert len(finished) < 500
        assert all(chunk.finish_reason == "length" for chunk in finished)
        await served.until_idle()
        reasons = [record.finish_reason for record in served.recorder.requests]
        assert len(reasons) == 500
        assert set(reasons) == {"length", "abort"}
        assert sum(record.num_preemptions for record in served.recorder.requests) > 0


async def test_records_of_steps_and_requests_add_up_to_the_same_numbers() -> None:
    async with serving(a_model(), a_config(pool=40), drafters={"ngram": NgramDrafter()}) as served:
        requests = []
        for idx in range(12):
            requests += served.requests(
                [1, 2, 3] * (1 + idx),
                SamplingParams(temperature=0.0, max_tokens=5 + idx),
                name=f"{idx}",
                speculation=Speculation(drafter="ngram", max_draft_tokens=idx % 5),
            )
        chunks = await served.run(requests)
    rows = [row for step in served.recorder.steps for row in step.rows]
    ended = served.recorder.requests
    stats = [chunk.stats for chunk in chunks if chunk.stats is not None]
    for in_rows, in_requests, in_chunks in [
        (
            sum(row.num_draft_tokens for row in rows),
            sum(record.num_draft_tokens for record in ended),
            sum(s.num_draft_tokens for s in stats),
        ),
        (
            sum(row.num_accepted_tokens for row in rows),
            sum(record.num_accepted_draft_tokens for record in ended),
            sum(s.num_accepted_draft_tokens for s in stats),
        ),
        (
            sum(row.num_emitted_tokens for row in rows),
            sum(record.num_output_tokens for record in ended),
            sum(len(chunk.token_ids) for chunk in chunks),
        ),
    ]:
        assert in_rows == in_requests == in_chunks > 0
    for record in ended:
        assert record.num_draft_tokens == sum(record.drafted_per_position)
        assert record.num_accepted_draft_tokens == sum(record.accepted_per_position)
        assert record.arrival <= record.queue[0].start <= record.queue[0].end
        assert record.first_token is not None
        assert record.queue[0].end <= record.first_token <= record.finished
        assert sum(chunk.num_tokens for chunk in record.prefill) >= (
            record.num_prompt_tokens - record.num_cached_tokens
        )


@pytest.mark.parametrize("when", ["queued", "prefill", "decode", "finished"])
async def test_an_abort_at_any_time_ends_the_stream_and_frees_everything(when: str) -> None:
    async with serving(a_model(), a_config(seqs=1)) as served:
        [blocker] = served.requests([1, 2], SamplingParams(max_tokens=100), name="blocker")
        [victim] = served.requests([9] * 60, SamplingParams(max_tokens=50), name="victim")
        first = served.engine.submit(blocker) if when == "queued" else None
        stream = served.engine.submit(victim)
        if when == "prefill":
            while served.engine.snapshot().num_running == 0:
                await asyncio.sleep(0)
        elif when == "decode":
            await anext(stream)
        elif when == "finished":
            async for _ in stream:
                pass
        served.engine.abort("victim")
        rest = [chunk async for chunk in stream]
        if when == "finished":
            assert rest == []
        else:
            assert rest[-1].finish_reason == "abort"
        if first is not None:
            first.close()
        await served.until_idle()


async def test_a_full_queue_says_try_again_and_disturbs_nobody() -> None:
    async with serving(a_model(), a_config(seqs=1, max_waiting=2)) as served:
        requests = []
        for idx in range(8):
            requests += served.requests([1, 2], SamplingParams(max_tokens=4), name=f"{idx}")
        streams, refused = [], []
        for request in requests:
            try:
                streams.append(served.engine.submit(request))
            except RequestError as error:
                refused.append(error)
        assert {(error.status, error.code) for error in refused} == {(429, "queue_full")}
        assert "limit is 2" in refused[0].message
        for stream in streams:
            assert [chunk async for chunk in stream][-1].finish_reason == "length"


async def test_a_row_that_cannot_choose_fails_alone() -> None:
    model = FailingModel(a_model(), nan_token=50)
    async with serving(model, a_config()) as served:
        requests = []
        for idx, prompt in enumerate([[1, 2, 3], [4, 50], [5, 6]]):
            requests += served.requests(
                prompt,
                SamplingParams(max_tokens=6, temperature=0.7, seed=1, logit_bias={50: -100.0}),
                name=f"{idx}",
            )
        chunks = await served.run(requests)
        assert [chunk.finish_reason for chunk in chunks] == ["length", "error", "length"]
        assert chunks[1].error


class BadDecoder:
    """Text work that raises for one token."""

    def push(self, token_id: int) -> str:
        if token_id == 50:
            raise UnicodeError("injected")
        return "x"

    def finish(self) -> str:
        return ""


class BadTokenizer:
    def stream_decoder(self, *, skip_special_tokens: bool = True) -> BadDecoder:
        return BadDecoder()


@pytest.mark.usefixtures("logging_as_it_was")
async def test_text_work_that_raises_fails_its_own_request_only_and_names_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure_logging(json=True)
    async with serving(a_model(), a_config(), tokenizer=BadTokenizer()) as served:
        greedy = SamplingParams(max_tokens=6, temperature=0.0, logit_bias={50: -100.0})
        forced = SamplingParams(max_tokens=6, temperature=0.0, logit_bias={50: 100.0})
        requests = []
        for idx, params in enumerate([greedy, forced, greedy]):
            (request,) = served.requests([1, 2, idx], params, name=f"{idx}")
            traceparent = f"00-{idx + 1:032x}-{'b' * 16}-01"
            requests.append(msgspec.structs.replace(request, traceparent=traceparent))
        chunks = await served.run(requests)
        assert [chunk.finish_reason for chunk in chunks] == ["length", "error", "length"]
        assert "UnicodeError" in str(chunks[1].error)
    (line,) = json_lines(capsys)
    assert (line["event"], line["request_id"]) == ("commit_failed", requests[1].request_id)
    assert (line["trace_id"], line["span_id"]) == (f"{2:032x}", "b" * 16)


async def test_an_error_behind_a_stop_token_is_never_met() -> None:
    """A guess is accepted, ends the text, and what would have followed it cannot be chosen."""
    results = []
    for num_guesses in (0, 5):
        model = FailingModel(a_model(), nan_token=50)
        script = scripted(lambda row: chain([50, 3, 3]))
        async with serving(
            model, a_config(), drafters={"scripted": script}, eos_ids=frozenset({50})
        ) as served:
            [request] = served.requests(
                [1, 2, 3],
                SamplingParams(max_tokens=6, temperature=0.0, min_tokens=2, logit_bias={50: 100.0}),
                name="r",
                speculation=Speculation(drafter="scripted", max_draft_tokens=num_guesses),
            )
            chunk = await served.collect(request)
            results.append((chunk.token_ids, chunk.finish_reason))
    assert results[0] == results[1]
    assert results[0][1] == "stop"


async def test_rejection_verifies_a_whole_tree() -> None:
    tree = Draft(token_ids=(1, 2, 3, 4), parents=(-1, -1, 0, 2))
    async with serving(
        a_model(), a_config(), drafters={"scripted": scripted(lambda row: tree)}
    ) as served:
        [request] = served.requests(
            [1, 2, 3],
            SamplingParams(max_tokens=20, temperature=1.0, seed=1),
            name="r",
            speculation=Speculation(drafter="scripted", max_draft_tokens=4, verify="rejection"),
        )
        chunk = await served.collect(request)
        assert chunk.finish_reason == "length"
        assert chunk.stats is not None
        assert chunk.stats.per_step_drafted[0] == 4


def scripted(script: Script) -> Drafter:
    return DRAFTERS["scripted"](
        DrafterResources(vocab_size=64, num_blocks=60, block_size=4, script=script)
    )


async def test_when_a_step_fails_every_stream_hears_it_and_the_engine_says_why() -> None:
    model = FailingModel(a_model(), fail_at=4)
    async with serving(model, a_config(), error="RuntimeError: injected") as served:
        requests = []
        for idx in range(3):
            requests += served.requests([1, 2, idx], SamplingParams(max_tokens=50), name=f"{idx}")
        chunks = await served.run(requests)
        assert [chunk.finish_reason for chunk in chunks] == ["error"] * 3
        with pytest.raises(RequestError, match="injected") as refused:
            served.engine.submit(requests[0])
        assert refused.value.status == 503


class RaisingDrafter:
    """Fails in every way that a guesser can, one after the other."""

    name = "raising"
    keeps_kv = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.num_calls = 0

    def propose(self, rows: Seq[object]) -> list[object]:
        self.num_calls += 1
        wrong: list[object] = [
            Draft(token_ids=(1, 2), parents=(-1,)),
            Draft(token_ids=(1, 2), parents=(1, -1)),
            Draft(token_ids=(1,), parents=(-2,)),
            Draft(token_ids=(1,), parents=(-1,), probs=torch.ones(3, 64)),
            Draft(token_ids=("x",), parents=(-1,)),  # type: ignore[arg-type] # wrong on purpose
            Draft(token_ids=(10**9, -5), parents=(-1, 0)),
            None,
        ]
        if self.num_calls <= len(wrong):
            return [wrong[self.num_calls - 1]] * len(rows)
        if self.num_calls % 2:
            raise ZeroDivisionError("a guesser's own bug")
        return []

    def observe(self, outcomes: Seq[object]) -> None:
        raise ZeroDivisionError("another")

    def forget(self, seq_id: int) -> None:
        raise ZeroDivisionError("a third")


async def test_a_drafter_that_raises_costs_its_guesses_and_not_the_text() -> None:
    params = SamplingParams(temperature=0.9, max_tokens=12, seed=4)
    ids = []
    for drafter in ("none", "raising"):
        async with serving(
            a_model(),
            a_config(),
            drafters={"raising": RaisingDrafter()},  # type: ignore[dict-item] # wrong on purpose
        ) as served:
            [request] = served.requests(
                [3, 1, 4],
                params,
                name="r",
                speculation=Speculation(drafter=drafter, max_draft_tokens=4),
            )
            ids.append((await served.collect(request)).token_ids)
            [after] = served.requests([1], params, name="after")  # hears of the forget
            assert (await served.collect(after)).finish_reason == "length"
    assert ids[0] == ids[1]


VOCAB = a_model().vocab_size


class PaddingDrafter:
    """Always guesses an id behind the vocabulary, as one drawn from its law or as one given."""

    name = "padding"
    keeps_kv = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, *, is_drawn: bool) -> None:
        self._is_drawn = is_drawn

    def propose(self, rows: Seq[object]) -> list[Draft]:
        probs = torch.zeros(1, VOCAB + 5)
        probs[0, VOCAB + 2] = 1.0
        return [chain([VOCAB + 2], probs=probs if self._is_drawn else None) for _ in rows]

    def observe(self, outcomes: Seq[object]) -> None:
        return

    def forget(self, seq_id: int) -> None:
        return


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("is_drawn", [True, False])
async def test_a_padding_id_that_was_drawn_is_a_rejected_draw_and_a_given_one_no_guess(
    rule: VerifyRule, is_drawn: bool
) -> None:
    drafter = PaddingDrafter(is_drawn=is_drawn)
    async with serving(a_model(), a_config(), drafters={"padding": drafter}) as served:
        [request] = served.requests(
            [3, 1, 4],
            SamplingParams(temperature=0.9, max_tokens=6, seed=4),
            name="r",
            speculation=Speculation(drafter="padding", max_draft_tokens=1, verify=rule),
        )
        result = await served.collect(request)
    assert result.finish_reason == "length"
    assert max(result.token_ids) < VOCAB
    assert result.stats is not None
    assert (result.stats.num_draft_tokens > 0) is is_drawn
    assert result.stats.num_accepted_draft_tokens == 0


async def test_a_slow_reader_gets_everything_merged_and_nothing_twice() -> None:
    async with serving(a_model(), a_config()) as served:
        params = SamplingParams(temperature=0.0, max_tokens=40)
        [fast] = served.requests([1, 2, 3], params, name="fast")
        [slow] = served.requests([1, 2, 3], params, name="slow")
        stream = served.engine.submit(slow)
        whole = await served.collect(fast)
        await served.until_idle()
        merged = [chunk async for chunk in stream]
        assert len(merged) == 1
        assert (merged[0].text, merged[0].token_ids) == (whole.text, whole.token_ids)


class WaitingModel(FailingModel):
    """A forward that does not end, from the second on, before `seen` is set."""

    def __init__(self, inner: Decoder) -> None:
        super().__init__(inner)
        self.seen = threading.Event()
        self.in_time: list[bool] = []

    def forward(self, *args: Any, **more: Any) -> Tensor:
        if self._num_steps:
            self.in_time.append(self.seen.wait(timeout=5))
        return super().forward(*args, **more)


async def test_a_token_leaves_while_the_next_forward_runs() -> None:
    model = WaitingModel(a_model())
    async with serving(model, a_config()) as served:
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        async for _ in served.engine.submit(served.requests([1, 2], params, name="A")[0]):
            model.seen.set()
    assert model.in_time == [True]


async def test_n_sequences_differ_and_each_replays() -> None:
    async with serving(a_model(), a_config()) as served:
        params = SamplingParams(temperature=1.0, max_tokens=10, seed=2**63 - 2, n=4)
        runs = []
        for attempt in range(2):
            requests = served.requests([1, 2, 3], params, name=f"{attempt}")
            runs.append([chunk.token_ids for chunk in await served.run(requests)])
        assert runs[0] == runs[1]
        assert len(set(runs[0])) == 4


async def test_stopping_the_engine_ends_every_stream() -> None:
    async with serving(a_model(), a_config()) as served:
        [request] = served.requests([1, 2], SamplingParams(max_tokens=100), name="r")
        stream = served.engine.submit(request)
        await anext(stream)
        await served.engine.stop()
        assert [chunk async for chunk in stream][-1].finish_reason == "abort"
        with pytest.raises(RequestError, match="shutting down"):
            served.engine.submit(request)


async def test_the_loop_never_makes_a_blocking_call() -> None:
    """blockbuster raises on sleeps, files, sockets and locks that wait, in our code on the loop."""
    with blockbuster_ctx("specserve") as watcher:
        assert watcher.functions
        async with serving(
            a_model(), a_config(pool=30), drafters={"ngram": NgramDrafter()}
        ) as served:
            requests = []
            for idx in range(8):
                requests += served.requests(
                    [1, 2, 3] * (1 + idx),
                    SamplingParams(max_tokens=12, temperature=0.5, seed=idx),
                    name=f"{idx}",
                    speculation=Speculation(drafter="ngram", max_draft_tokens=3),
                )
            chunks = await served.run(requests)
        assert {chunk.finish_reason for chunk in chunks} == {"length"}

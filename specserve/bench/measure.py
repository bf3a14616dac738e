"""Runs decode steps through the real engine and says where each one's time went.

Requests go in as from a server (scheduler, worker thread, commit, detokenizer, streams); only HTTP
is missing. Guesses come from a drafter that proposes exactly K arbitrary tokens. After each step
the worker thread runs the floor of the step's own rows, so that both see the same minute of the
machine; that time belongs to no number of the step.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import msgspec

from specserve.admission import Limits
from specserve.bench.floor import Floor
from specserve.config import EngineConfig
from specserve.drafting import Draft, DraftRow, chain
from specserve.engine import Engine
from specserve.loading import LoadedModel
from specserve.models.native import NativeDecoder
from specserve.runner import ModelRunner
from specserve.speculation.speculator import Speculator
from specserve.stream import RequestStream
from specserve.target import HostTarget
from specserve.types import BatchPlan, Request, SamplingParams, StepResult
from specserve_drafts.scripted import ScriptedDrafter
from specserve_kernels.native_step import Phases
from specserve_observability.records import RequestRecord, StepRecord

BLOCK_SIZE = 16
WARMUP_STEPS = 3
BUDGET = 512  # tokens of one step: prompts come in pieces of that


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What one measurement is of."""

    batch: int
    num_guesses: int  # K of every row
    context: int  # tokens of each sequence before the first measured step
    temperature: float = 0.0
    num_waiting: int = 0  # requests in the queue that cannot start


class Breakdown(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over the steps of one case, in milliseconds; parts need not add up exactly.

    None where the decoder does not say: the torch path knows its forward as a whole.
    """

    case: Case
    num_steps: int
    num_rows: int  # T of the layers' products
    num_logits: int  # L of the head's
    step: float  # from one plan to the next
    floor: float  # the products alone
    ratio: float  # median of step / floor
    forward: float  # packing the batch and the model
    gemm: float | None  # products inside the step, the head included, with their barriers
    attention: float | None
    rest: float | None  # of the forward: packing, norms, quantisation, rotation, KV writes
    draft: float
    verify: float  # sampling and verification
    host: float  # plan, commit, text and the way to the worker thread and back
    plan: float
    commit: float


class _Sample(msgspec.Struct, frozen=True):
    """One executed step."""

    step_idx: int
    num_rows: int
    num_logits: int
    returned: float  # time.time() when the worker was done with what is measured
    extra: float  # seconds spent on measuring
    floor: float
    phases: Phases | None


class _TimedRunner:
    """The engine's runner; called on the worker thread."""

    def __init__(self, inner: ModelRunner, model: object, floor: Floor) -> None:
        self._inner = inner
        self._native = model if isinstance(model, NativeDecoder) else None
        self._floor = floor
        self.samples: list[_Sample] = []

    def execute(self, plan: BatchPlan, forward_begins: Callable[[], None]) -> StepResult:
        result = self._inner.execute(plan, forward_begins)
        returned, started = time.time(), time.perf_counter()
        if any(row.is_prefill for row in plan.rows) or not plan.rows:
            return result
        drafted = sum(row.num_draft_tokens for row in result.rows)
        num_rows = sum(row.num_tokens for row in plan.rows) + drafted
        num_logits = sum(row.samples for row in plan.rows) + drafted
        phases = None if self._native is None else self._native.last_step_phases()
        floor = self._floor.seconds(num_rows, num_logits)
        extra = time.perf_counter() - started
        self.samples.append(
            _Sample(plan.step_idx, num_rows, num_logits, returned, extra, floor, phases)
        )
        return result


class _Records:
    """Keeps what the engine says of its steps."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def record_step(self, record: StepRecord) -> None:
        self.steps.append(record)

    def record_request(self, record: RequestRecord) -> None:
        return


def measure(loaded: LoadedModel, floor: Floor, case: Case, num_steps: int) -> Breakdown:
    """Run one case in an event loop of its own."""
    return asyncio.run(_measure(loaded, floor, case, num_steps))


async def _measure(loaded: LoadedModel, floor: Floor, case: Case, num_steps: int) -> Breakdown:
    length = case.context + _num_new(case, num_steps)
    config = EngineConfig(
        block_size=BLOCK_SIZE,
        num_blocks=case.batch * (length // BLOCK_SIZE + 2),
        max_model_len=length,
        max_num_seqs=case.batch,
        max_num_batched_tokens=max(BUDGET, 2 * case.batch * (case.num_guesses + 1)),
        max_prefill_chunk=BUDGET,
        max_waiting=case.batch + case.num_waiting,
        enable_prefix_caching=False,
        max_draft_tokens=max(1, case.num_guesses),
    )
    drafters = {"scripted": ScriptedDrafter(arbitrary_guesses(case.num_guesses))}
    runner = _TimedRunner(
        ModelRunner(
            HostTarget(
                loaded.decoder,
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                vocab_size=loaded.vocab_size,
            ),
            Speculator(drafters, vocab_size=loaded.vocab_size),
        ),
        loaded.decoder,
        floor,
    )
    records = _Records()
    engine = Engine(
        model_name="bench",
        config=config,
        runner=runner,
        tokenizer=loaded.tokenizer,
        limits=Limits.of(
            config,
            vocab_size=loaded.vocab_size,
            eos_ids=loaded.tokenizer.eos_ids,
            drafters=("none", *drafters),
        ),
        recorder=records,
    )
    await engine.start()
    try:
        streams = [
            engine.submit(_request(case, idx, loaded.vocab_size, num_steps))
            for idx in range(case.batch + case.num_waiting)
        ]
        await asyncio.gather(*(_read(stream) for stream in streams[: case.batch]))
    finally:
        await engine.stop()
    return summarise(case, records.steps, runner.samples)


def _num_new(case: Case, num_steps: int) -> int:
    """Tokens that each sequence makes: one a step, and towards the end there is no room for K."""
    return num_steps + WARMUP_STEPS + 2 + case.num_guesses


async def _read(stream: RequestStream) -> None:
    async for _ in stream:
        pass


def arbitrary_guesses(num_guesses: int) -> Callable[[DraftRow], Draft]:
    """Chains of small token ids, other ones for every row and place: hardly ever right."""

    def script(row: DraftRow) -> Draft:
        first = 7 * row.seq_id + 3 * len(row.history)
        return chain([(first + 5 * idx) % 61 for idx in range(num_guesses)])

    return script


def _request(case: Case, idx: int, vocab_size: int, num_steps: int) -> Request:
    rng = random.Random(idx)
    waits = idx >= case.batch
    return Request(
        request_id=f"bench-{idx}",
        prompt_ids=tuple(rng.randrange(vocab_size) for _ in range(8 if waits else case.context)),
        params=SamplingParams(
            max_tokens=_num_new(case, num_steps),
            temperature=case.temperature,
            ignore_eos=True,
        ),
        seed=idx,
        drafter="scripted" if case.num_guesses else "none",
        max_draft_tokens=case.num_guesses,
        verify="replay",
    )


def summarise(case: Case, steps: list[StepRecord], samples: list[_Sample]) -> Breakdown:
    """Medians over the steps in which every sequence of the batch decoded with all its guesses."""
    wanted = case.batch * (1 + case.num_guesses)
    by_idx = {sample.step_idx: sample for sample in samples if sample.num_rows == wanted}
    chosen = [
        (record, following, by_idx[record.step_idx])
        for record, following in pairwise(steps)
        if record.step_idx in by_idx
    ][WARMUP_STEPS:]
    assert chosen, "no step had all rows"
    totals = [b.plan_start - a.plan_start - sample.extra for a, b, sample in chosen]
    forwards = [a.verify_start - a.forward_start for a, _, _ in chosen]
    executes = [sample.returned - a.draft_start for a, _, sample in chosen]
    hosts = [total - spent for total, spent in zip(totals, executes, strict=True)]
    plans = [a.plan_end - a.plan_start for a, _, _ in chosen]
    floors = [sample.floor for _, _, sample in chosen]
    phases = [sample.phases for _, _, sample in chosen if sample.phases is not None]
    return Breakdown(
        case=case,
        num_steps=len(chosen),
        num_rows=wanted,
        num_logits=chosen[0][2].num_logits,
        step=_ms(totals),
        floor=_ms(floors),
        ratio=median(total / floor for total, floor in zip(totals, floors, strict=True)),
        forward=_ms(forwards),
        gemm=_ms([(one.gemm + one.head) / 1e9 for one in phases]) if phases else None,
        attention=_ms([one.attention / 1e9 for one in phases]) if phases else None,
        rest=(
            _ms(
                [
                    forward - (one.gemm + one.head + one.attention) / 1e9
                    for forward, one in zip(forwards, phases, strict=True)
                ]
            )
            if phases
            else None
        ),
        draft=_ms([a.forward_start - a.draft_start for a, _, _ in chosen]),
        verify=_ms([sample.returned - a.verify_start for a, _, sample in chosen]),
        host=_ms(hosts),
        plan=_ms(plans),
        commit=_ms([host - plan for host, plan in zip(hosts, plans, strict=True)]),
    )


def _ms(seconds: list[float]) -> float:
    return median(seconds) * 1e3

"""A real engine over a small model: scheduler, runner, verifier, sampler, streams, no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from typing import cast

import msgspec

from specserve.admission import Limits, make_requests
from specserve.config import EngineConfig
from specserve.drafting import Drafter
from specserve.engine import Engine
from specserve.models.decoder import Decoder
from specserve.models.interface import CausalLM
from specserve.runner import ModelRunner
from specserve.speculation.speculator import Speculator
from specserve.stream import merge
from specserve.target import HostTarget, Target
from specserve.tokenizer import Tokenizer
from specserve.types import Request, SamplingParams, Speculation, TokenChunk
from specserve_observability.recorder import StepFeed
from specserve_observability.records import RequestRecord, StepRecord


class IdDecoder:
    """Shows token 7 as " 7"."""

    def push(self, token_id: int) -> str:
        return f" {token_id}"

    def finish(self) -> str:
        return ""


class IdTokenizer:
    """Stands where text does not matter."""

    eos_ids: frozenset[int] = frozenset()

    def stream_decoder(self, *, skip_special_tokens: bool = True) -> IdDecoder:
        return IdDecoder()


class ListRecorder:
    """Keeps every record."""

    def __init__(self) -> None:
        self.feed = StepFeed()
        self.steps: list[StepRecord] = []
        self.requests: list[RequestRecord] = []

    def record_step(self, record: StepRecord) -> None:
        self.feed.put(record)
        self.steps.append(record)

    def record_request(self, record: RequestRecord) -> None:
        self.requests.append(record)


class Served(msgspec.Struct):
    engine: Engine
    recorder: ListRecorder

    def requests(
        self,
        prompt_ids: Seq[int],
        params: SamplingParams,
        *,
        name: str,
        speculation: Speculation | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[Request]:
        return make_requests(
            self.engine.limits,
            prompt_ids,
            params,
            request_id=name,
            speculation=speculation,
            priority=priority,
            cache_salt=cache_salt,
        )

    async def until_idle(self) -> None:
        while self.engine.snapshot().num_running or self.engine.snapshot().num_waiting:
            await asyncio.sleep(0.001)

    async def run(self, requests: Seq[Request]) -> list[TokenChunk]:
        """Each request's whole output, all submitted at once."""
        return list(await asyncio.gather(*(self.collect(request) for request in requests)))

    async def collect(self, request: Request) -> TokenChunk:
        whole: TokenChunk | None = None
        async for chunk in self.engine.submit(request):
            whole = chunk if whole is None else merge(whole, chunk)
        assert whole is not None
        return whole


@asynccontextmanager
async def serving(
    model: CausalLM,
    config: EngineConfig,
    *,
    drafters: Mapping[str, Drafter] | None = None,
    sharpness: float | None = None,
    vocab_size: int | None = None,
    eos_ids: frozenset[int] = frozenset(),
    tokenizer: object | None = None,
    error: str | None = None,
    make_target: Callable[..., Target] = HostTarget,
) -> AsyncIterator[Served]:
    """An engine that runs while the block does; afterwards nothing of it may be left.

    sharpness: of every draft; None: learned
    error:     what the engine is expected to have died of
    """
    known = dict(drafters or {})
    size = vocab_size or model.vocab_size
    target = make_target(
        model,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        vocab_size=size,
        hidden_size=model.config.hidden_size if isinstance(model, Decoder) else 0,
    )
    runner = ModelRunner(target, Speculator(known, vocab_size=size, sharpness=sharpness))
    recorder = ListRecorder()
    engine = Engine(
        model_name="test",
        config=config,
        runner=runner,
        tokenizer=cast(Tokenizer, tokenizer or IdTokenizer()),
        limits=Limits.of(config, vocab_size=size, eos_ids=eos_ids, drafters=("none", *known)),
        recorder=recorder,
    )
    await engine.start()
    try:
        yield Served(engine, recorder)
        assert engine.error == error
        now = engine.snapshot()
        assert (now.num_running, now.num_waiting, now.blocks_live) == (0, 0, 0)
        assert now.blocks_free + now.blocks_cached == now.blocks_total
    finally:
        await engine.stop()

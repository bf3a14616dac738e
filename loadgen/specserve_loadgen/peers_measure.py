"""What is measured of one started server: prompt speed, and output speed per workload and load.

Every server gets the same prompts in the same order, greedy, with the end of text ignored, and of
every answer the same length, which varies: answers of one length would march in step and bring all
new prompts at once. Where the file has too few prompts some come again before the server is started
anew; `num_repeated_prompts` says how many. Each request has a cache salt of its own, so that ours
(and vLLM) finds nothing of the last time; a server that knows no salts may gain by it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import msgspec

from specserve_loadgen.busy import busy_rate
from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.latency import itl_per_token, ttft
from specserve_loadgen.prompts import Message, Prompt
from specserve_loadgen.records import RequestRecord
from specserve_loadgen.run import run_load
from specserve_loadgen.settings import ClosedLoop, Settings
from specserve_loadgen.stats import percentile
from specserve_loadgen.words import WORDS

CHAT = ("chat", "math", "code", "translation")
EDIT = ("edit", "repetition", "summarise")
REQUESTS_PER_USER = 3
PREFILL_REQUESTS = 3
PREFILL_TOKENS = 512
WARMUP_REQUESTS = 4
WARMUP_TOKENS = 16


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of a turn."""

    workload: Literal["prefill", "chat", "edit"]
    concurrency: int

    @property
    def label(self) -> str:
        if self.workload == "prefill":
            return f"prefill {PREFILL_TOKENS}"
        return f"{self.workload} c{self.concurrency}"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One cell, one server, one round. Rates are tokens/s, times are seconds."""

    cell: Cell
    server: str
    round_idx: int
    tokens_per_second: float  # prompt tokens of prefill, output tokens otherwise
    ttft_p50: float | None  # None: no reply had text
    itl_p50: float | None  # None: replies of one token
    itl_p99: float | None
    num_requests: int
    num_failed: int
    num_output_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int | None  # prompt tokens found in a prefix cache; None: not said
    num_repeated_prompts: int  # sent to this server before, since it was started
    failure: str | None = None  # the first one


def make_cells(concurrencies: Sequence[int]) -> list[Cell]:
    """Prefill, chat at every load, copying at the lowest and the highest."""
    ends = sorted({min(concurrencies), max(concurrencies)})
    return [
        Cell(workload="prefill", concurrency=1),
        *(Cell(workload="chat", concurrency=users) for users in sorted(set(concurrencies))),
        *(Cell(workload="edit", concurrency=users) for users in ends),
    ]


class Supply:
    """Prompts of one turn, in a fixed order, counting those that had to be sent again."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        if not prompts:
            raise LoadgenError("no prompts of a workload: give --prompts a file with both")
        self._prompts = prompts
        self._num_taken = 0

    def take(self, count: int) -> tuple[list[Prompt], int]:
        """The next `count` prompts, and how many of them were taken before."""
        at = self._num_taken
        self._num_taken += count
        chosen = [self._prompts[idx % len(self._prompts)] for idx in range(at, at + count)]
        fresh = max(0, min(count, len(self._prompts) - at))
        return chosen, count - fresh


def prefill_prompts(count: int, seed: int) -> list[Prompt]:
    """Texts of about PREFILL_TOKENS tokens that share no beginning."""
    rng = random.Random(seed)
    return [
        Prompt(
            prompt_id=f"prefill-{idx}",
            category="prefill",
            messages=(Message("user", " ".join(rng.choices(WORDS, k=PREFILL_TOKENS))),),
        )
        for idx in range(count)
    ]


def split_workloads(prompts: Sequence[Prompt]) -> dict[str, list[Prompt]]:
    """Prompts for chat and for copying, by their category.

    A file with other categories than the shipped pack's serves both workloads with all it has.
    """
    split = {
        "chat": [prompt for prompt in prompts if prompt.category in CHAT],
        "edit": [prompt for prompt in prompts if prompt.category in EDIT],
    }
    return {name: chosen or list(prompts) for name, chosen in split.items()}


class Turn:
    """The measurements of one started server, in the order in which they are asked for."""

    def __init__(
        self,
        server: str,
        workloads: dict[str, list[Prompt]],
        *,
        round_idx: int,
        max_tokens: int,
    ) -> None:
        self._server = server
        self._supplies = {name: Supply(prompts) for name, prompts in workloads.items()}
        self.round_idx = round_idx
        self._max_tokens = max_tokens

    async def warm_up(self, url: str) -> None:
        """Requests in no number: buffers, kernels and threads come into being.

        Raises LoadgenError where the server answers none of them.
        """
        prompts = prefill_prompts(WARMUP_REQUESTS, seed=-1)
        settings = self._settings(url, "completions", WARMUP_REQUESTS, len(prompts), WARMUP_TOKENS)
        result = await run_load(settings, prompts, catch_sigint=False)
        failed = [record.failure for record in result.records if record.failure is not None]
        if len(failed) == len(result.records):
            raise LoadgenError(f"{self._server} answers no request: {failed[0].message}")

    async def measure(self, url: str, cell: Cell) -> Measured:
        if cell.workload == "prefill":
            # Other texts in every round: a server may keep what it saw on disk.
            prompts = prefill_prompts(PREFILL_REQUESTS, seed=self.round_idx)
            num_repeated = 0
            settings = self._settings(url, "completions", 1, len(prompts), 1)
        else:
            count = REQUESTS_PER_USER * cell.concurrency
            prompts, num_repeated = self._supplies[cell.workload].take(count)
            settings = self._settings(url, "chat", cell.concurrency, count, self._max_tokens)
            settings = msgspec.structs.replace(
                settings,
                shortest=-(-self._max_tokens // 2),
                cache_salt=f"{self.round_idx}/{cell.label}",
                salt_per_request=True,
            )
        result = await run_load(settings, prompts, catch_sigint=False)
        return measured(
            cell, self._server, self.round_idx, result.records, num_repeated=num_repeated
        )

    def _settings(
        self,
        url: str,
        endpoint: Literal["chat", "completions"],
        users: int,
        count: int,
        max_tokens: int,
    ) -> Settings:
        return Settings(
            url=url,
            endpoint=endpoint,
            load=ClosedLoop(users),
            num_requests=count,
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
        )


def measured(
    cell: Cell,
    server: str,
    round_idx: int,
    records: Sequence[RequestRecord],
    *,
    num_repeated: int = 0,
) -> Measured:
    """The numbers of one cell. A failed request counts in num_failed and nowhere else."""
    good = [record for record in records if record.succeeded]
    failures = [record.failure for record in records if record.failure is not None]
    itls = sorted(value for record in good for value in itl_per_token(record))
    ttfts = sorted(value for record in good if (value := ttft(record)) is not None)
    cached = [n for record in good if (n := record.num_cached_tokens) is not None]
    return Measured(
        cell=cell,
        server=server,
        round_idx=round_idx,
        tokens_per_second=_rate(cell, good),
        ttft_p50=percentile(ttfts, 0.5) if ttfts else None,
        itl_p50=percentile(itls, 0.5) if itls else None,
        itl_p99=percentile(itls, 0.99) if itls else None,
        num_requests=len(records),
        num_failed=len(failures),
        num_output_tokens=sum(record.num_output_tokens for record in good),
        num_prompt_tokens=sum(record.num_prompt_tokens or 0 for record in good),
        num_cached_tokens=sum(cached) if cached else None,
        num_repeated_prompts=num_repeated,
        failure=f"{failures[0].kind}: {failures[0].message}" if failures else None,
    )


def _rate(cell: Cell, records: Sequence[RequestRecord]) -> float:
    """Tokens/s; 0 where nothing succeeded.

    Prefill: the median over requests of prompt tokens per time to the end of a one-token reply.
    One user: output tokens of all requests, from the first one sent to the last one ended.
    Several: those that came while all of them were busy.
    """
    if not records:
        return 0.0
    if cell.workload == "prefill":
        rates = sorted((r.num_prompt_tokens or 0) / (r.ended - r.sent) for r in records)
        return percentile(rates, 0.5)
    if cell.concurrency > 1:
        return busy_rate(records)
    seconds = max(r.ended for r in records) - min(r.sent for r in records)
    return sum(r.num_output_tokens for r in records) / seconds

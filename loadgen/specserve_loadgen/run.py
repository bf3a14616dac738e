"""One run: find the server, warm up, load it, and bring back what happened."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

import msgspec

from specserve_loadgen import pacing
from specserve_loadgen.client import Client
from specserve_loadgen.conversation import Conversations
from specserve_loadgen.crosscheck import counter_deltas, reply_counts
from specserve_loadgen.engines import UNKNOWN
from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.progress import Progress
from specserve_loadgen.prompt import Prompt
from specserve_loadgen.records import RequestRecord, Turn
from specserve_loadgen.settings import ClosedLoop, Settings

WARMUP_USERS = 4  # of an open loop: warm enough, and no burst
LAG_PERIOD = 0.02  # seconds
METRICS_PATIENCE = (0.0, 0.05, 0.1, 0.2, 0.4, 0.8)  # seconds to wait before each scrape


class RunResult(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    server_version: str | None
    engine: str = UNKNOWN  # what kind of server it is
    started_at: float  # time.time()
    records: tuple[RequestRecord, ...]  # in order of request_idx
    server_deltas: dict[str, int]
    loop_lags: tuple[float, ...]  # seconds by which this client's own event loop was late
    num_failed_warmups: int
    interrupted: bool
    clock_zero: float = 0.0  # the clock's reading at 0 s


async def run_load(
    settings: Settings,
    prompts: Sequence[Prompt],
    *,
    api_key: str | None = None,
    show_progress: bool = False,
    catch_sigint: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> RunResult:
    """Measure one server once. Ctrl-C ends the load early; the result then says `interrupted`.

    catch_sigint: False where the caller does
    Raises LoadgenError when there is no server or every warm-up request fails.
    """
    async with Client(settings, api_key, clock) as client:
        model = await client.find_model()
        version = await client.server_version()
        num_failed_warmups = await _warm_up(client, settings, prompts)
        before = await client.metrics_text()
        records: list[RequestRecord] = []
        started_at = time.time()
        with Progress(pacing.num_requests(settings, prompts), show_progress) as progress:

            def take(record: RequestRecord) -> None:
                records.append(record)
                progress.on_record(record)

            async with _lag_probe() as lags:
                load = _load(client, settings, prompts, take)
                interrupted = await (_until_interrupted if catch_sigint else _to_its_end)(load)
        deltas = await _settled_deltas(client, before, records)
    return RunResult(
        model=model,
        server_version=version,
        engine=client.engine,
        started_at=started_at,
        records=tuple(sorted(records, key=lambda record: record.request_idx)),
        server_deltas=deltas,
        loop_lags=tuple(lags),
        num_failed_warmups=num_failed_warmups,
        interrupted=interrupted,
        clock_zero=client.zero,
    )


async def _load(
    client: Client,
    settings: Settings,
    prompts: Sequence[Prompt],
    take: Callable[[RequestRecord], None],
) -> None:
    client.start_clock()
    conversations = Conversations(settings, prompts, client, take)
    await pacing.drive(settings, prompts, conversations.send, client.now)


async def _warm_up(client: Client, settings: Settings, prompts: Sequence[Prompt]) -> int:
    """Requests that are in no number, with the last prompts so that a short run meets fresh ones.

    Returns how many failed; raises LoadgenError when all did, since the run would be nothing else.
    """
    failed: list[RequestRecord] = []

    def take(record: RequestRecord) -> None:
        if not record.succeeded:
            failed.append(record)

    async def send(session_idx: int, scheduled: float | None) -> None:
        prompt = prompts[-1 - session_idx % len(prompts)]
        await client.send(prompt, Turn(request_idx=session_idx, scheduled=scheduled), take)

    load = settings.load
    users = ClosedLoop(load.concurrency if isinstance(load, ClosedLoop) else WARMUP_USERS)
    await pacing.closed_loop(users, range(settings.warmup), send, may_start=lambda: True)
    if failed and len(failed) == settings.warmup:
        failure = failed[0].failure
        reason = "unknown" if failure is None else f"{failure.kind}: {failure.message}"
        raise LoadgenError(f"every one of {len(failed)} warm-up requests failed, first {reason}")
    return len(failed)


async def _to_its_end(load: Coroutine[None, None, None]) -> bool:
    await load
    return False


async def _until_interrupted(load: Coroutine[None, None, None]) -> bool:
    """Run the load to its end or to the first SIGINT; True for the latter.

    A second SIGINT finds Python's own handler in place, and a later one whoever's was before: in
    `asyncio.run` that is asyncio's, which cancels, where Python's would raise in the loop itself.
    """
    before = signal.getsignal(signal.SIGINT)
    task = asyncio.create_task(load)
    loop = asyncio.get_running_loop()
    interrupted = False

    def stop() -> None:
        nonlocal interrupted
        interrupted = True
        task.cancel()
        loop.remove_signal_handler(signal.SIGINT)

    # Not the main thread, or no such handlers on this platform: Ctrl-C is then Python's.
    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
        loop.add_signal_handler(signal.SIGINT, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not interrupted:
            raise
    finally:
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            loop.remove_signal_handler(signal.SIGINT)
            signal.signal(signal.SIGINT, before)
    return interrupted


@contextlib.asynccontextmanager
async def _lag_probe() -> AsyncIterator[list[float]]:
    """Notes how late the event loop is: what it adds to every time stamp at worst."""
    lags: list[float] = []

    async def probe() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_PERIOD
            await asyncio.sleep(LAG_PERIOD)
            lags.append(max(0.0, loop.time() - due))

    task = asyncio.create_task(probe())
    try:
        yield lags
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _settled_deltas(
    client: Client, before: str | None, records: Sequence[RequestRecord]
) -> dict[str, int]:
    """Counters may lag the last reply a little: wait until they have caught up, not longer."""
    deltas: dict[str, int] = {}
    expected = reply_counts(records)
    for seconds in METRICS_PATIENCE:
        await asyncio.sleep(seconds)
        deltas = counter_deltas(before, await client.metrics_text())
        if all(value >= expected.get(name, 0) for name, value in deltas.items()):
            break
    return deltas

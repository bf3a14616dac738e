"""When the load generator's requests leave, and what counts as late and as good."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from itertools import islice, pairwise
from pathlib import Path

import pytest
from aiohttp import web
from scipy import stats as scipy_stats

from specserve_loadgen.arrivals import arrival_times
from specserve_loadgen.cli import main
from specserve_loadgen.pacing import closed_loop, drive, num_requests
from specserve_loadgen.prompt import Message, Prompt
from specserve_loadgen.prompts import load_prompts
from specserve_loadgen.render import render
from specserve_loadgen.report import Report, make_report
from specserve_loadgen.run import run_load
from specserve_loadgen.settings import ClosedLoop, OpenLoop, Settings, Slo, TraceReplay
from tests.loadgen_server import (
    Script,
    ScriptedServer,
    Step,
    StepClock,
    app_with,
    serving,
    write_stream,
)

ANSWER = b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n'
STALL_SECONDS = 1.0


def gaps_of(load: OpenLoop, count: int, seed: int = 3) -> list[float]:
    times = [0.0, *islice(arrival_times(load, seed), count)]
    return [after - before for before, after in pairwise(times)]


# ---- arrivals ----------------------------------------------------------------------------------


def test_constant_arrivals_keep_their_distance() -> None:
    assert gaps_of(OpenLoop(50.0, "constant"), 100) == pytest.approx([0.02] * 100)


@pytest.mark.parametrize("shape", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_their_shape_and_rate_and_repeat_with_their_seed(shape: float) -> None:
    load = OpenLoop(50.0, "gamma", shape)
    gaps = gaps_of(load, 4000)
    assert gaps == gaps_of(load, 4000)
    assert gaps != gaps_of(load, 4000, seed=4)
    assert scipy_stats.kstest(gaps, "gamma", args=(shape, 0, 1 / (50 * shape))).pvalue > 0.001


def test_a_gamma_load_of_shape_1_is_as_bursty_as_poisson() -> None:
    spread = {
        shape: statistics.variance(gaps_of(OpenLoop(10.0, "gamma", shape), 8000)) * 100
        for shape in (0.25, 1.0)
    }
    assert spread[1.0] == pytest.approx(1.0, rel=0.15)
    assert spread[0.25] == pytest.approx(4.0, rel=0.25)


def test_a_ramp_sends_half_of_what_the_full_rate_would_and_then_all_of_it() -> None:
    times = list(islice(arrival_times(OpenLoop(100.0, "constant", ramp=4.0), seed=0), 600))
    sent_until = {t: sum(seconds <= t + 1e-9 for seconds in times) for t in (2.0, 4.0, 6.0)}
    assert sent_until == {2.0: 50, 4.0: 200, 6.0: 400}
    assert times == sorted(times)


async def test_users_of_a_ramped_closed_loop_join_one_after_the_other() -> None:
    barrier = asyncio.Event()
    arrived: list[float] = []

    async def wait(session_idx: int, scheduled: float | None) -> None:
        arrived.append(time.perf_counter() - started)
        if len(arrived) == 4:
            barrier.set()
        await barrier.wait()

    started = time.perf_counter()
    await closed_loop(ClosedLoop(4, ramp=0.2), range(4), wait, may_start=lambda: True)
    assert all(seconds >= idx * 0.05 - 0.005 for idx, seconds in enumerate(arrived))


# ---- traces ------------------------------------------------------------------------------------


async def test_a_trace_is_replayed_at_its_times_and_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [(3000, 7, 2), (1000, 5, 4), (1400, 6, 9)]
    path.write_text(
        "\n".join(
            json.dumps({"timestamp": at, "input_length": asked, "output_length": answered})
            for at, asked, answered in rows
        )
    )
    prompts = load_prompts(str(path))
    sent: list[tuple[int, float | None]] = []

    async def send(session_idx: int, scheduled: float | None) -> None:
        sent.append((session_idx, scheduled))

    settings = Settings(url="http://x", load=TraceReplay(speed=20.0), duration=60.0)
    zero = time.perf_counter()
    await drive(settings, prompts, send, lambda: time.perf_counter() - zero)
    assert sent == [(0, 0.0), (1, pytest.approx(0.02)), (2, pytest.approx(0.1))]
    assert [p.max_tokens for p in prompts] == [4, 9, 2]
    assert [len(p.token_ids) for p in prompts] == [5, 6, 7]


async def test_a_replayed_request_asks_for_its_recorded_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("Timestamp,Model,Request tokens,Response tokens\n5,m,3,2\n5.01,m,4,8\n")
    server = ScriptedServer([Script(steps=(Step(),))])
    async with serving(server.app()) as url:
        options = f"--url {url} --endpoint completions --prompts {path} --replay --no-progress"
        code = await asyncio.to_thread(main, options.split())
        assert code == 0
    by_length = sorted(server.bodies, key=lambda body: body["max_tokens"])  # type: ignore[arg-type,return-value]
    assert [body["max_tokens"] for body in by_length] == [2, 8]
    assert [len(body["prompt"]) for body in by_length] == [3, 4]  # type: ignore[arg-type]


# ---- coordinated omission ----------------------------------------------------------------------


async def test_a_stall_of_one_second_shows_in_the_p99_of_an_open_loop() -> None:
    """A closed loop of one user would show it in one request of 250, which no p99 sees."""
    num_arrived, stall = 0, asyncio.Event()

    async def end_stall() -> None:
        await asyncio.sleep(STALL_SECONDS)
        stall.set()

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal num_arrived
        num_arrived += 1
        if num_arrived == 20:
            stalls.append(asyncio.create_task(end_stall()))
        if num_arrived >= 20:
            await stall.wait()
        return await write_stream(request, ANSWER)

    stalls: list[asyncio.Task[None]] = []
    async with serving(app_with(complete)) as url:
        settings = Settings(url=url, num_requests=250, load=OpenLoop(200.0, "constant"))
        report = make_report(settings, await run_load(settings, load_prompts(None)))
    assert report.num_succeeded == 250
    e2e, ttft = report.latency.e2e_from_schedule, report.latency.ttft_from_schedule
    assert e2e is not None
    assert ttft is not None
    assert e2e.p99 >= STALL_SECONDS * 0.95
    assert ttft.p99 >= STALL_SECONDS * 0.95
    waited = [r.ended - (r.scheduled or 0.0) for r in report.requests]
    assert sum(seconds >= STALL_SECONDS / 2 for seconds in waited) >= 0.4 * STALL_SECONDS * 200


async def test_late_sends_are_counted() -> None:
    """The client's own loop is blocked while five requests fall due."""

    num_arrived = 0

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal num_arrived
        num_arrived += 1
        if num_arrived == 5:
            time.sleep(0.08)  # noqa: ASYNC251 # the point: client and server share this loop
        return await write_stream(request, ANSWER)

    async with serving(app_with(complete)) as url:
        settings = Settings(url=url, num_requests=30, load=OpenLoop(100.0, "constant"))
        report = make_report(settings, await run_load(settings, load_prompts(None)))
    assert report.generator.num_late >= 5
    delay = report.generator.dispatch_delay
    assert delay is not None
    assert delay.max >= 0.05


# ---- conversations -----------------------------------------------------------------------------

TALK = Prompt(
    prompt_id="talk",
    category="chat",
    messages=(Message("user", "one"),),
    later_turns=("two", "three"),
)
SINGLE = Prompt(prompt_id="single", category="chat", messages=(Message("user", "alone"),))


async def talk(clock: StepClock | None = None, **changes: object) -> tuple[ScriptedServer, Report]:
    server = ScriptedServer([Script(steps=(Step(0.5), Step(0.25)))], clock)
    known_clock = {} if clock is None else {"clock": clock}
    async with serving(server.app()) as url:
        settings = Settings(url=url, multi_turn=True, **changes)  # type: ignore[arg-type] # by name
        result = await run_load(settings, [TALK, SINGLE], **known_clock)
    return server, make_report(settings, result)


async def test_each_turn_is_sent_with_the_replies_before_it() -> None:
    server, report = await talk(num_requests=3)
    asked = [[m["content"] for m in body["messages"]] for body in server.bodies]  # type: ignore[attr-defined]
    said = "é é "
    first = [["one"], ["one", said, "two"], ["one", said, "two", said, "three"]]
    assert asked == [*first, ["alone"], *first]
    roles = [m["role"] for m in server.bodies[2]["messages"]]  # type: ignore[attr-defined]
    assert roles == ["user", "assistant", "user", "assistant", "user"]
    places = [(r.request_idx, r.session_idx, r.turn_idx) for r in report.requests]
    assert places == [(0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 1, 0), (4, 2, 0), (5, 2, 1), (6, 2, 2)]
    assert [body["seed"] for body in server.bodies] == list(range(7))


async def test_without_multi_turn_only_the_first_turn_is_sent() -> None:
    server = ScriptedServer([Script(steps=(Step(),))])
    async with serving(server.app()) as url:
        await run_load(Settings(url=url), [TALK, SINGLE])
    assert [len(body["messages"]) for body in server.bodies] == [1, 1]  # type: ignore[arg-type]


async def test_people_think_between_turns_and_are_expected_when_they_have_thought() -> None:
    _, report = await talk(num_requests=1, load=OpenLoop(100.0, "constant"), think_time=0.02)
    first, second, third = report.requests
    for before, after in ((first, second), (second, third)):
        assert after.scheduled is not None
        assert after.sent >= after.scheduled > before.ended
    again = (await talk(num_requests=1, load=OpenLoop(100.0, "constant"), think_time=0.02))[1]
    thought = [after.scheduled - before.ended for before, after in pairwise(report.requests)]  # type: ignore[operator]
    anew = [after.scheduled - before.ended for before, after in pairwise(again.requests)]  # type: ignore[operator]
    assert anew == pytest.approx(thought)


async def test_no_turn_begins_after_the_duration() -> None:
    _, report = await talk(StepClock(), duration=1.0)
    assert [(r.turn_idx, round(r.sent, 2)) for r in report.requests] == [(0, 0.0), (1, 0.75)]


def test_the_number_of_requests_is_known_beforehand() -> None:
    counted = {
        sessions: num_requests(
            Settings(url="http://x", multi_turn=True, num_requests=sessions), [TALK, SINGLE]
        )
        for sessions in (1, 2, 3)
    }
    assert counted == {1: 3, 2: 4, 3: 7}


# ---- goodput -----------------------------------------------------------------------------------


async def test_goodput_counts_the_requests_that_keep_every_limit() -> None:
    slow_start = Script(steps=(Step(0.9), Step(0.1)))
    slow_tokens = Script(steps=(Step(0.1), Step(0.6)))
    good = Script(steps=(Step(0.1), Step(0.1)))
    server = ScriptedServer([slow_start, slow_tokens, good, good], StepClock())
    async with serving(server.app()) as url:
        settings = Settings(url=url, num_requests=4, slo=Slo(ttft=0.5, tpot=0.5, e2e=0.8))
        assert server.clock is not None
        result = await run_load(settings, load_prompts(None), clock=server.clock)
    report = make_report(settings, result)
    assert report.goodput is not None
    assert (report.goodput.num_good, report.goodput.num_judged) == (2, 4)
    assert report.goodput.broken == {"ttft": 1, "tpot": 1, "e2e": 1}
    assert report.goodput.requests_per_second == pytest.approx(2 / 2.1)
    assert "goodput (ttft 500 ms, tpot 500 ms, e2e 800 ms)" in render(report)

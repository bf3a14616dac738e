"""The load generator end to end: real sockets, a scripted server, numbers known in closed form."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from aiohttp import web

from specserve_loadgen.cli import main
from specserve_loadgen.prompts import Prompt, load_prompts
from specserve_loadgen.render import render
from specserve_loadgen.report import Report, make_report
from specserve_loadgen.run import run_load
from specserve_loadgen.settings import ClosedLoop, OpenLoop, Settings
from tests.loadgen_server import (
    Script,
    ScriptedServer,
    Step,
    StepClock,
    app_with,
    geometric_steps,
    serving,
    write_stream,
)

PROMPTS = load_prompts(None)


async def report_of(
    server: ScriptedServer, prompts: list[Prompt] = PROMPTS, **changes: object
) -> Report:
    clock = {} if server.clock is None else {"clock": server.clock}
    async with serving(server.app()) as url:
        settings = Settings(url=url, **changes)  # type: ignore[arg-type]  # by name
        return make_report(settings, await run_load(settings, prompts, **clock))


def printed(report: Report, name: str) -> list[str]:
    """The cells of the first printed line that begins with `name`."""
    lines = [line for line in render(report).split("\n") if line.startswith(name)]
    return lines[0].removeprefix(name).split()


# ---- latency -----------------------------------------------------------------------------------

THREE_CHUNKS = Script(
    steps=(Step(0.5), Step(0.3, drafted=3, accepted=2), Step(0.4, drafted=3, accepted=1)),
    seconds_to_done=0.1,
)


async def test_each_latency_of_one_request_has_its_defined_value() -> None:
    report = await report_of(ScriptedServer([THREE_CHUNKS], StepClock()), num_requests=1)
    latency = report.latency
    assert latency.ttft is not None
    assert latency.ttft.p50 == pytest.approx(0.5)
    assert latency.itl_per_token is not None  # 3 tokens share 0.3 s, 2 tokens share 0.4 s
    assert latency.itl_per_token.count == 5
    assert latency.itl_per_token.mean == pytest.approx(0.7 / 5)
    assert latency.itl_per_token.p50 == pytest.approx(0.1)
    assert latency.itl_per_token.max == pytest.approx(0.2)
    assert latency.inter_chunk is not None
    assert (latency.inter_chunk.min, latency.inter_chunk.max) == pytest.approx((0.3, 0.4))
    assert latency.tpot is not None
    assert latency.tpot.mean == pytest.approx(0.7 / 5)
    assert latency.e2e is not None
    assert latency.e2e.mean == pytest.approx(1.3)
    assert latency.ttft_from_schedule is None
    assert report.throughput.output_tokens_per_second == pytest.approx(6 / 1.3)
    assert printed(report, "TTFT") == ["500.00", "500.00", "500.00*", "500.00*", "1", "-"]
    assert printed(report, "ITL per token")[:2] == ["140.00", "100.00"]


async def test_percentiles_over_requests_are_numpys() -> None:
    seconds = [0.01 * (idx * 37 % 101 + 1) for idx in range(120)]
    scripts = [Script(steps=(Step(s), Step(0.02))) for s in seconds]
    report = await report_of(ScriptedServer(scripts, StepClock()), num_requests=len(scripts))
    ttft = report.latency.ttft
    assert ttft is not None
    assert (ttft.p50, ttft.p90, ttft.p99) == pytest.approx(np.quantile(seconds, [0.5, 0.9, 0.99]))
    assert ttft.mean == pytest.approx(np.mean(seconds))
    assert report.throughput.requests_per_second == pytest.approx(120 / (sum(seconds) + 2.4))
    assert "*" not in "".join(printed(report, "TTFT"))


async def test_warm_up_requests_are_in_no_number_and_no_delta() -> None:
    slow, fast = Script(steps=(Step(9.0),) * 9), Script(steps=(Step(0.5), Step(0.1)))
    server = ScriptedServer([slow, slow, fast], StepClock())
    report = await report_of(server, num_requests=3, warmup=2)
    assert len(server.bodies) == 5
    assert report.num_requests == 3
    assert report.latency.ttft is not None
    assert report.latency.ttft.max == pytest.approx(0.5)
    assert report.cross_check.disagreements == ()
    assert report.cross_check.counts[0].server == 6


async def test_means_come_with_their_intervals() -> None:
    seconds = [0.01 * (idx * 7 % 23 + 1) for idx in range(23)]
    scripts = [Script(steps=(Step(s), Step(s / 10))) for s in seconds]
    report = await report_of(ScriptedServer(scripts, StepClock()), num_requests=len(scripts))
    assert report.intervals is not None
    ttft = report.intervals.ttft.mean
    assert ttft is not None
    assert ttft.low is not None
    assert ttft.high is not None
    assert ttft.estimate == pytest.approx(np.mean(seconds))
    assert ttft.low < ttft.estimate < ttft.high
    assert printed(report, "TTFT")[-1] == f"{ttft.low * 1e3:.2f}-{ttft.high * 1e3:.2f}"
    itl = report.intervals.itl_per_token.mean
    assert itl is not None
    assert itl.estimate == pytest.approx(np.mean(seconds) / 10)
    assert itl.num_clusters == len(seconds)


# ---- acceptance --------------------------------------------------------------------------------


@pytest.mark.parametrize(("halves", "k"), [(2, 3), (3, 4), (5, 3), (2, 7)])
async def test_acceptance_of_a_known_law_comes_out_in_closed_form(halves: int, k: int) -> None:
    alpha = 1 / halves
    expected = (1 - alpha ** (k + 1)) / (1 - alpha)
    server = ScriptedServer([Script(steps=geometric_steps(halves, k), k=k)])
    report = await report_of(server, num_requests=4, load=ClosedLoop(2))
    got = report.acceptance
    assert got.mean_acceptance_length == pytest.approx(expected)
    assert got.mean_acceptance_length_per_request == pytest.approx(expected)
    assert got.acceptance_rate == pytest.approx((expected - 1) / k)
    survival = [alpha ** (position + 1) for position in range(k)]
    assert got.acceptance_rate_per_position == pytest.approx(survival)
    num_steps = 4 * halves**k
    assert got.num_steps == num_steps
    assert got.num_steps_avoided == got.num_output_tokens - num_steps
    assert got.tokens_per_step == pytest.approx(expected)
    assert report.throughput.tokens_per_chunk == pytest.approx(expected)
    assert report.cross_check.disagreements == ()
    assert printed(report, "mean acceptance length") == [f"{expected:.3f}"] * 2


async def test_pooled_and_per_request_means_differ_as_they_should() -> None:
    long = Script(steps=(Step(),) + (Step(drafted=2, accepted=2),) * 9, k=2)
    short = Script(steps=(Step(),) + (Step(drafted=2, accepted=0),) * 1, k=2)
    silent = Script(steps=(Step(),) * 5)
    report = await report_of(ScriptedServer([long, short, silent]), num_requests=3)
    got = report.acceptance
    assert got.mean_acceptance_length == pytest.approx(28 / 10)
    assert got.mean_acceptance_length_per_request == pytest.approx((3 + 1) / 2)
    assert got.acceptance_rate == pytest.approx(18 / 20)
    assert got.acceptance_rate_per_request == pytest.approx((1 + 0) / 2)
    assert (got.num_requests, got.num_drafted_requests) == (3, 2)
    assert got.drafters == {"synthetic": 2}
    assert got.acceptance_histogram == (1, 0, 9, 0)
    assert got.tokens_per_step == pytest.approx((28 + 2 + 5) / (10 + 2 + 5))


async def test_positions_that_no_guess_survived_count_as_zero() -> None:
    script = Script(steps=(Step(), Step(drafted=4, accepted=1), Step(drafted=2)), k=4)
    report = await report_of(ScriptedServer([script]), num_requests=1)
    got = report.acceptance
    assert got.drafted_per_position == (2, 2, 1, 1)
    assert got.accepted_per_position == (1, 0, 0, 0)
    assert got.acceptance_rate_per_position == (0.5, 0.0, 0.0, 0.0)
    assert printed(report, "by position") == ["1", "2", "3", "4"]
    assert report.cross_check.disagreements == ()


async def test_without_our_own_metrics_steps_are_derived_from_vllms() -> None:
    class VllmScript(Script, frozen=True, kw_only=True):
        def metrics(self) -> dict[str, dict[str, object]]:
            return {"speculative_decoding": super().metrics()["speculative_decoding"]}

    script = VllmScript(steps=(Step(), Step(drafted=3, accepted=2), Step()))
    report = await report_of(ScriptedServer([script]), num_requests=2)
    assert report.acceptance.num_steps == 6
    assert report.acceptance.tokens_per_step == pytest.approx(10 / 6)
    assert report.cross_check.disagreements == ()


async def test_numbers_are_kept_apart_by_category() -> None:
    good = Script(steps=(Step(),) + (Step(drafted=2, accepted=2),) * 3, k=2)
    bad = Script(steps=(Step(),) + (Step(drafted=2, accepted=0),) * 3, k=2)
    prompts = [p for p in PROMPTS if p.category in ("edit", "chat")][:2]
    report = await report_of(ScriptedServer([good, bad]), prompts)
    lengths = {c.category: c.acceptance.mean_acceptance_length for c in report.categories}
    assert lengths == {prompts[0].category: 3.0, prompts[1].category: 1.0}
    assert printed(report, prompts[1].category)[:3] == ["1", "1.00", "0.0%"]


# ---- three sources -----------------------------------------------------------------------------

SPEC = Script(steps=(Step(), Step(drafted=3, accepted=2), Step(drafted=3, accepted=3)), cached=4)


async def test_three_sources_that_agree_are_shown_side_by_side() -> None:
    report = await report_of(ScriptedServer([SPEC]), num_requests=5)
    assert printed(report, "output tokens  ") == ["40"]
    table = {c.name: (c.replies, c.server, c.chunks) for c in report.cross_check.counts}
    assert table == {
        "output tokens": (40, 40, 40),
        "steps with drafts": (10, 10, None),
        "draft tokens": (30, 30, None),
        "accepted draft tokens": (25, 25, None),
        "tokens of steps with drafts": (35, 35, None),
        "target steps": (15, None, 15),
    }
    assert "the three sources agree" in render(report)
    assert report.throughput.num_cached_prompt_tokens == 20
    assert printed(report, "prompt tokens") == ["55", "(20", "cached,", "36.4%)"]


async def test_counters_that_lag_the_replies_are_waited_for() -> None:
    server = ScriptedServer([SPEC])
    server.num_stale_scrapes = 2
    report = await report_of(server, num_requests=2)
    assert report.cross_check.disagreements == ()
    assert report.cross_check.counts[0].server == 16


async def test_other_traffic_on_the_server_is_flagged() -> None:
    server = ScriptedServer([SPEC])
    server.num_foreign_tokens = 1
    report = await report_of(server, num_requests=2)
    (disagreement,) = report.cross_check.disagreements
    assert "the replies say 16, /metrics 18 (other traffic?)" in disagreement
    assert "the three sources DISAGREE" in render(report)


async def test_merged_steps_are_flagged_by_the_chunks() -> None:
    script = msgspec.structs.replace(SPEC, merge=3)
    report = await report_of(ScriptedServer([script]), num_requests=2)
    (disagreement,) = report.cross_check.disagreements
    assert "6 target steps arrived as 2 chunks" in disagreement


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"acceptance_histogram": [1, 0, 0, 0]}, "does not sum to num_spec_steps"),
        ({"num_draft_tokens": 1}, "more accepted than drafted"),
        ({"num_spec_tokens": 9}, "num_spec_tokens + 1 places"),
        ({"mean_acceptance_length": 9.5}, "mean_acceptance_length is outside"),
        ({"num_draft_tokens": 7}, "drafted_per_position does not sum"),
        ({"num_spec_steps": "two"}, "another shape"),
        ({"drafted_per_position": [6]}, "more accepted than drafted at a position"),
    ],
)
async def test_a_reply_that_contradicts_itself_is_flagged(
    change: dict[str, object], words: str
) -> None:
    class Lying(Script, frozen=True, kw_only=True):
        def metrics(self) -> dict[str, dict[str, object]]:
            honest = super().metrics()
            return {
                name: {k: change.get(k, v) for k, v in part.items()}
                for name, part in honest.items()
            }

    report = await report_of(ScriptedServer([Lying(steps=SPEC.steps)]), num_requests=1)
    assert any(words in text for text in report.cross_check.disagreements)


@pytest.mark.parametrize(
    ("ids", "usage", "source"),
    [(True, True, "token_ids"), (False, True, "usage"), (False, False, "chunks")],
)
async def test_tokens_of_a_chunk_are_counted_by_the_best_means(
    ids: bool, usage: bool, source: str
) -> None:
    script = msgspec.structs.replace(SPEC, with_token_ids=ids, with_usage_in_chunks=usage)
    report = await report_of(ScriptedServer([script]), num_requests=1)
    (record,) = report.requests
    assert record.counted_by == source
    assert record.num_output_tokens == 8
    sizes = [chunk.num_tokens for chunk in record.chunks]
    assert sizes == ([1, 1, 1] if source == "chunks" else [1, 3, 4])
    assert any("a chunk was counted as one" in n for n in report.cross_check.notes) == (not usage)


# ---- load --------------------------------------------------------------------------------------


async def test_a_closed_loop_keeps_its_number_of_requests_open_and_no_more() -> None:
    num_open, seen = 0, []

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal num_open
        num_open += 1
        seen.append(num_open)
        await asyncio.sleep(0.01)
        num_open -= 1
        return await write_stream(request, b"data: [DONE]\n\n")

    async with serving(app_with(complete)) as url:
        settings = Settings(url=url, num_requests=20, load=ClosedLoop(4))
        result = await run_load(settings, PROMPTS)
    assert (len(seen), max(seen), len(result.records)) == (20, 4, 20)


async def test_an_open_loop_sends_on_while_the_server_stalls_and_charges_it_from_the_schedule() -> (
    None
):
    """The server answers nobody until all 25 have arrived: a closed loop would never get there."""
    num_arrived, all_arrived = 0, asyncio.Event()

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal num_arrived
        num_arrived += 1
        if num_arrived == 25:
            all_arrived.set()
        await all_arrived.wait()
        return await write_stream(request, b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n')

    async with serving(app_with(complete)) as url:
        settings = Settings(url=url, num_requests=25, load=OpenLoop(400.0), seed=5)
        report = make_report(settings, await run_load(settings, PROMPTS))
    dues = [record.scheduled for record in report.requests]
    last_due = dues[-1]
    assert last_due is not None
    assert report.num_succeeded == 25
    for record, due in zip(report.requests, dues, strict=True):
        assert due is not None
        assert record.sent >= due
        assert record.first_text is not None
        assert record.first_text - due >= last_due - due
    from_schedule = report.latency.ttft_from_schedule
    assert from_schedule is not None
    assert from_schedule.max >= last_due - (dues[0] or 0.0)


async def test_a_duration_bounds_the_starts_and_awaits_the_rest() -> None:
    script = Script(steps=(Step(0.4), Step(0.1)))
    server = ScriptedServer([script], StepClock())
    report = await report_of(server, duration=1.2)
    assert [record.sent for record in report.requests] == pytest.approx([0.0, 0.5, 1.0])
    assert report.num_succeeded == 3


async def test_the_request_is_what_was_asked_for() -> None:
    server = ScriptedServer([SPEC])
    async with serving(server.app()) as url:
        options = (
            f"--url {url}/v1/ --num-requests 2 --max-tokens 9 --temperature 0.5 --seed 40 "
            "--drafter ngram --max-draft-tokens 0 --verify replay --ignore-eos --api-key secret"
        )
        code = await asyncio.to_thread(main, options.split())
        assert code == 0
    assert server.headers[0]["Authorization"] == "Bearer secret"
    assert server.bodies[1] == {
        "model": "scripted",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
        "messages": [{"role": "user", "content": PROMPTS[1].messages[0].content}],
        "max_tokens": 9,
        "temperature": 0.5,
        "seed": 41,
        "ignore_eos": True,
        "speculation": {"drafter": "ngram", "max_draft_tokens": 0, "verify": "replay"},
    }


async def test_completions_are_measured_as_chat_is() -> None:
    server = ScriptedServer([THREE_CHUNKS], StepClock())
    report = await report_of(server, num_requests=1, endpoint="completions", model="other")
    assert server.bodies[0]["model"] == "other"
    assert server.bodies[0]["prompt"] == PROMPTS[0].messages[0].content
    assert report.latency.ttft is not None
    assert report.latency.ttft.mean == pytest.approx(0.5)

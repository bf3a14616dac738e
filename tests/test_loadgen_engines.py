"""Other servers' replies and metrics: what the load generator learns, and what it cannot."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from aiohttp import web

from specserve_loadgen.crosscheck import parse_counters
from specserve_loadgen.prompts import load_prompts
from specserve_loadgen.render import render
from specserve_loadgen.report import Report, make_report
from specserve_loadgen.run import run_load
from specserve_loadgen.settings import Settings
from tests.loadgen_server import event, serving, write_stream

DONE = b"data: [DONE]\n\n"
BODIES = web.AppKey("bodies", list[dict[str, object]])


def engine_app(owner: str, chunks: Sequence[object], metrics: str | None = None) -> web.Application:
    """A server of that owner, all of whose replies are these chunks."""

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "owned_by": owner}]})

    async def complete(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return await write_stream(request, *(event(chunk) for chunk in chunks), DONE)

    async def scrape(request: web.Request) -> web.Response:
        # Each request raises every counter by its number in `metrics`.
        rows = [line.split() for line in (metrics or "").splitlines()]
        return web.Response(text="".join(f"{n} {int(v) * len(bodies)}\n" for n, v in rows))

    bodies: list[dict[str, object]] = []
    app = web.Application()
    app[BODIES] = bodies
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", complete)
    if metrics is not None:
        app.router.add_get("/metrics", scrape)
    return app


async def measure(app: web.Application, num_requests: int = 3) -> Report:
    async with serving(app) as url:
        settings = Settings(url=url, num_requests=num_requests)
        return make_report(settings, await run_load(settings, load_prompts(None)))


def text_chunk(text: str | None, **more: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": text}}], **more}


def timed(
    text: str, predicted: int, drafted: int = 0, accepted: int = 0, ms: float = 0.0
) -> dict[str, object]:
    timings = {"prompt_n": 4, "prompt_ms": 30.0, "predicted_n": predicted, "predicted_ms": ms}
    if drafted:
        timings |= {"draft_n": drafted, "draft_n_accepted": accepted}
    return text_chunk(text, timings=timings)


# One token at a time: the prompt's; a step of 3 guesses, 2 right; a plain one; a step of 2 guesses,
# both right, whose extra token the limit cuts off.
LLAMA = [
    text_chunk(None),
    timed("a", 1),
    timed("b", 2, 3, 2),
    timed("c", 3, 3, 2),
    timed("d", 4, 3, 2),
    timed("e", 5, 3, 2),
    timed("f", 6, 5, 4),
    timed("g", 7, 5, 4, ms=90.0),
    {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 7}},
]
LLAMA_METRICS = (
    "llamacpp:tokens_predicted_total 7\n"
    "llamacpp:spec_decode_num_drafts_total 2\n"
    "llamacpp:spec_decode_num_draft_tokens_total 5\n"
    "llamacpp:spec_decode_num_accepted_tokens_total 4\n"
)


async def test_llama_cpps_running_sums_tell_its_steps_apart() -> None:
    app = engine_app("llamacpp", LLAMA, LLAMA_METRICS)
    report = await measure(app)
    assert report.engine == "llama.cpp"
    assert app[BODIES][0]["timings_per_token"] is True
    got = report.acceptance
    assert (got.num_spec_steps, got.num_draft_tokens, got.num_accepted_draft_tokens) == (6, 15, 12)
    assert got.acceptance_histogram == (0, 0, 6, 0)
    assert got.num_spec_emitted_tokens == 3 * (3 + 2)
    assert got.mean_acceptance_length == pytest.approx(2.5)
    assert got.num_steps == 3 * 4
    record = report.requests[0]
    assert record.counted_by == "timings"
    assert [chunk.num_tokens for chunk in record.chunks] == [1] * 7
    assert record.speculative is not None
    assert record.speculative.per_step_drafted == [3, 2]
    assert report.cross_check.disagreements == ()
    assert {c.name: c.server for c in report.cross_check.counts}["draft tokens"] == 15
    prompt, decode = report.cross_check.times
    assert prompt.server_seconds == pytest.approx(0.09)
    assert decode.server_seconds == pytest.approx(0.27)
    assert "not learnt" not in render(report)
    assert report.speculation is not None
    places = [(p.num_drafted, p.num_at_risk, p.num_accepted) for p in report.speculation.positions]
    assert places == [(6, 6, 6), (6, 6, 6), (3, 3, 0)]
    (line,) = [text for text in render(report).split("\n") if text.startswith("if all before held")]
    assert line.split()[-3:] == ["100.0%", "100.0%", "0.0%"]


async def test_guesses_that_a_limit_cut_off_did_not_become_output() -> None:
    cut = [timed("a", 1), timed("b", 2, 4, 4), timed("c", 3, 4, 4)]
    report = await measure(engine_app("llamacpp", cut, LLAMA_METRICS), 1)
    assert report.acceptance.num_accepted_draft_tokens == 2
    assert report.acceptance.num_spec_emitted_tokens == 2


async def test_a_plain_llama_cpp_is_said_to_make_no_guesses_and_to_hide_its_counters() -> None:
    report = await measure(engine_app("llamacpp", [timed("a", 1), timed("b", 2)]))
    notes = "\n".join(report.cross_check.notes)
    assert "acceptance of each request (it made no guesses: start it with --spec-type)" in notes
    assert "(start it with --metrics)" in notes
    assert report.acceptance.num_requests == 0


async def test_sglangs_details_are_read_and_asked_for() -> None:
    details = {
        "spec_verify_ct": 4,
        "spec_num_proposed_drafts": 12,
        "spec_num_correct_drafts": 6,
        "spec_correct_drafts_histogram": [1, 1, 1, 1],
        "spec_accept_rate": 0.5,
    }
    chunks = [
        *(text_chunk("x", usage={"completion_tokens": n}) for n in (1, 4, 6, 11)),
        {"choices": [], "sglext": {"spec_tokens_details": details}},
    ]
    metrics = "sglang:generation_tokens_total 11\nsglang:spec_verify_calls_total 4\n"
    app = engine_app("sglang", chunks, metrics)
    report = await measure(app, 2)
    assert report.engine == "SGLang"
    assert app[BODIES][0]["return_spec_tokens_details"] is True
    got = report.acceptance
    assert (got.num_spec_steps, got.num_draft_tokens, got.num_accepted_draft_tokens) == (8, 24, 12)
    assert got.mean_acceptance_length == pytest.approx(2.5)
    assert got.acceptance_histogram == (2, 2, 2, 2)
    counts = {c.name: (c.replies, c.server) for c in report.cross_check.counts}
    assert counts["steps with drafts"] == (8, 8)
    assert counts["output tokens"] == (22, 22)


async def test_what_no_source_tells_is_said() -> None:
    report = await measure(engine_app("somebody", [text_chunk("x")]))
    assert report.engine == "unknown"
    text = render(report)
    for words in ("acceptance of each request", "the server's own counters", "tokens of a chunk"):
        assert f"not learnt: {words}" in text


async def test_timings_of_another_shape_spoil_nothing_else() -> None:
    odd = [text_chunk("x", timings={"predicted_n": "many"}), text_chunk("y", timings=[1])]
    report = await measure(engine_app("llamacpp", odd), 1)
    assert report.num_succeeded == 1
    assert report.requests[0].num_output_tokens == 2
    assert any("another shape" in text for text in report.cross_check.disagreements)


def test_every_engines_counters_are_known_by_their_names() -> None:
    for prefix, sep in (("vllm", ":"), ("vllm", "_"), ("sglang", ":"), ("llamacpp", ":")):
        tokens = "tokens_predicted" if prefix == "llamacpp" else "generation_tokens"
        text = f"# TYPE x counter\n{prefix}{sep}{tokens}_total 5\n"
        assert parse_counters(text) == {"output tokens": 5.0}, json.dumps(text)

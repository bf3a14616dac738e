"""One definition per number: replies, counters, spans and the load generator count the same.

200 mixed requests to a real server: whole and streamed, several texts at once, every guesser,
guesses beyond an end, stop strings, clients that leave. Nothing else is asked meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import NamedTuple

from specserve_loadgen.cli import main as loadgen
from tests.raw_http import Reply, ask, connect
from tests.server_process import ServerProcess, a_server_process
from tests.trace_contract import Seen, seen_in_files

NUM_ASKED, NUM_LOADGEN, ABORT_EVERY = 150, 30, 7  # and 22 that leave
GUESSERS = ("oracle", "part", "anti", "ngram", "auto", "none")


class Sums(NamedTuple):
    output_tokens: int = 0
    prompt_tokens: int = 0
    spec_steps: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def plus(self, other: Sums) -> Sums:
        return Sums(*(a + b for a, b in zip(self, other, strict=True)))


def total(parts: Iterable[Sums]) -> Sums:
    result = Sums()
    for part in parts:
        result = result.plus(part)
    return result


def a_body(idx: int) -> dict[str, object]:
    """idx of 150: all combinations of guesser, stream, n and end come up."""
    drafter = GUESSERS[idx % len(GUESSERS)]
    body: dict[str, object] = {
        "prompt": f"{'q' * (idx % 7)}say:",
        "temperature": (0, 0.8)[idx % 5 == 0],
        "seed": idx,
        "n": 1 + (idx % 11 == 0),
        "stream": idx % 2 == 1,
        # The reply ends after 49 tokens: guesses reach beyond its end and beyond max_tokens.
        "max_tokens": (60, 13, 3)[idx % 3],
        "speculation": {"drafter": drafter, "max_draft_tokens": 8}
        if drafter != "none"
        else {"drafter": "none"},
    }
    if idx % 2:
        body["stream_options"] = {"include_usage": True}
    if idx % 4 == 0:
        body["stop"] = ["house"]
    return body


async def asked(server: ServerProcess, idx: int) -> dict[str, object]:
    reply: Reply = await ask(server.port, "POST", "/v1/completions", a_body(idx))
    assert reply.status == 200, reply.body
    if idx % 2 == 0:
        whole: dict[str, object] = reply.json()
        return whole
    *_, last, done = reply.events
    assert done == "[DONE]"
    usage: dict[str, object] = last
    return usage


async def aborted(server: ServerProcess, idx: int) -> None:
    body = {"prompt": "say:", "stream": True, "max_tokens": 300, "ignore_eos": True}
    drafter = {"drafter": "oracle", "max_draft_tokens": 1 + idx % 8}
    async with connect(server.port) as connection:
        await connection.request("POST", "/v1/completions", {**body, "speculation": drafter})
        await connection.reader.readuntil(b"data: ")


def of_reply(reply: dict[str, object]) -> Sums:
    said = json.loads(json.dumps(reply))
    spec = said["metrics"]["speculative_decoding"]
    check_rate(spec["draft_acceptance_rate"])
    histogram = spec["acceptance_histogram"]
    assert sum(histogram) == spec["num_spec_steps"]
    assert sum(at * count for at, count in enumerate(histogram)) == of_spec(spec).accepted_tokens
    usage = said["usage"]
    return of_spec(spec)._replace(
        output_tokens=usage["completion_tokens"], prompt_tokens=usage["prompt_tokens"]
    )


def of_spec(spec: dict[str, int]) -> Sums:
    return Sums(
        spec_steps=spec["num_spec_steps"],
        draft_tokens=spec["num_draft_tokens"],
        accepted_tokens=spec["num_accepted_draft_tokens"],
    )


def of_counters(metrics: dict[str, float]) -> Sums:
    def counter(name: str) -> int:
        found = [v for k, v in metrics.items() if k.split("{")[0] == f"specserve_{name}_total"]
        return round(sum(found))

    return Sums(
        output_tokens=counter("generated_tokens"),
        prompt_tokens=counter("prompt_tokens"),
        spec_steps=counter("spec_steps"),
        draft_tokens=counter("spec_draft_tokens"),
        accepted_tokens=counter("spec_accepted_tokens"),
    )


def of_span(span: Seen) -> Sums:
    def number(key: str) -> int:
        return int(str(span.attributes.get(key, 0)))

    rate = span.attributes.get("specserve.spec.acceptance_rate")
    if rate is not None:
        check_rate(float(str(rate)))
    return Sums(
        output_tokens=number("gen_ai.usage.output_tokens"),
        prompt_tokens=number("gen_ai.usage.input_tokens"),
        spec_steps=number("specserve.spec.steps"),
        draft_tokens=number("specserve.spec.draft_tokens"),
        accepted_tokens=number("specserve.spec.accepted_tokens"),
    )


def check_rate(rate: float) -> None:
    assert 0 <= rate <= 1


async def test_replies_counters_spans_and_the_load_generator_agree(tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    with a_server_process(tmp_path, options={"trace_steps_per_second": 1e9}) as server:
        many = asyncio.Semaphore(8)

        async def one(idx: int) -> dict[str, object]:
            async with many:
                if idx % ABORT_EVERY == 0:
                    await aborted(server, idx)
                return await asked(server, idx)

        replies = await asyncio.gather(*(one(idx) for idx in range(NUM_ASKED)))
        await server.is_idle()
        before = of_counters(await server.metrics())
        load = f"--url http://127.0.0.1:{server.port} --num-requests {NUM_LOADGEN} --concurrency 4"
        load += f" --categories chat --max-tokens 20 --warmup 0 --no-progress --json {report_file}"
        assert await asyncio.to_thread(loadgen, load.split()) == 0
        await server.is_idle()
        after = of_counters(await server.metrics())
        await server.has_traced()
        server.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.process.wait, 60) == 0
    spans = seen_in_files([tmp_path / "trace.jsonl"])
    check_spans(spans, replies, after)
    check_loadgen(json.loads(report_file.read_text()), before, after)


def check_spans(spans: Seq[Seen], replies: Seq[dict[str, object]], counters: Sums) -> None:
    decodes = [span for span in spans if span.name == "decode"]
    assert total(map(of_span, decodes)) == counters
    rounds = [of_span(span) for span in spans if span.name == "decode.rounds"]
    assert total(rounds)[3:] == counters[3:]
    steps = [of_span(span) for span in spans if span.name == "engine.step"]
    assert total(steps)[3:] == counters[3:]
    by_id = {
        span.attributes["gen_ai.response.id"]: of_span(span) for span in spans if is_chat(span)
    }
    for reply in replies:
        assert of_reply(reply) == by_id[str(reply["id"])]
    ended = [span.attributes["gen_ai.response.finish_reasons"] for span in decodes]
    assert len(ended) > 200
    assert {str(one) for one in ended} >= {"['stop']", "['length']", "['abort']"}

    # Oracle's guesses are all right: what was not accepted lay behind an end.
    assert any(
        span.attributes["specserve.spec.drafters"] == ["oracle"]
        and span.attributes["gen_ai.response.finish_reasons"] == ["stop"]
        and of_span(span).accepted_tokens < of_span(span).draft_tokens
        for span in decodes
    )


def is_chat(span: Seen) -> bool:
    return "gen_ai.response.id" in span.attributes


def check_loadgen(report: dict[str, object], before: Sums, after: Sums) -> None:
    said = json.loads(json.dumps(report))["requests"]
    assert len(said) == NUM_LOADGEN
    counted = total(
        of_spec(one["speculative"])._replace(
            output_tokens=one["num_output_tokens"], prompt_tokens=one["num_prompt_tokens"]
        )
        for one in said
    )
    assert before.plus(counted) == after

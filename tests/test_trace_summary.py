"""`specserve trace FILE`: what a person at a terminal is told of a trace file."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from specserve.cli import main
from specserve_observability import names
from specserve_observability.otlp_reading import read_spans
from specserve_observability.records import QueuePeriod
from specserve_observability.trace_facts import time_by_phase
from tests.otlp_lines import SECOND, a_line, a_span, odd_lines, overlapping_spans
from tests.trace_reading import FileTracing
from tests.trace_records import START, Row, a_request, a_row, a_step, play


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["trace", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def a_played_file(path: Path) -> Path:
    """Two requests over four steps; req-1 waited beside somebody's prompt."""
    run = FileTracing(path)
    steps, requests = play(
        [
            [Row(0)],
            [Row(0, drafted=3, accepted=2), Row(1, "suffix", 2, 0)],
            [Row(0, drafted=3, accepted=3), Row(1, "suffix", 2, 1)],
        ]
    )
    prompt = a_step(9, [a_row(2, tokens=40, emitted=0)], start=START + 0.05, seconds=0.1)
    for step in (*steps, prompt):
        run.tracing.recorder.record_step(step)
    waited = (QueuePeriod(START, START + 0.2, "kv_capacity"),)
    requests[1] = msgspec.structs.replace(requests[1], queue=waited, finished=START + 2.0)
    for request in requests:
        run.tracing.recorder.record_request(request)
    run.tracing.shutdown()
    return path


def test_the_slowest_requests_their_phases_steps_and_guesses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = told(capsys, a_played_file(tmp_path / "t.jsonl"))
    first, *rest = out.splitlines()
    assert first.endswith(": 35 spans, 2 requests, 4 of 4 engine steps kept")
    assert "Guesses: 6 of 10 accepted (60.0 %), 2.50 tokens per step with guesses; " in out
    assert "by position 3/4, 2/4, 1/2; by ngram, suffix" in out
    table = [line.split() for line in rest[rest.index("Where the time of 2 requests went") + 1 :]]
    assert table[0][:4] == ["decode", "2.20", "s", "73.3"]
    assert ["queue", "400", "ms", "13.3"] in [row[:4] for row in table]
    slowest = out[out.index("  1. ") : out.index("  2. ")]
    assert "  1. 2.00 s  queue  req-1  12 tokens in, 3 out, stop" in slowest
    assert "decode 1.60 s (80 %), queue 200 ms (10 %), prefill 200 ms (10 %)" in slowest
    assert "first token after 400 ms" in slowest
    assert (
        "queued 200 ms (kv_capacity) beside 4 kept steps: 40 prompt tokens of others, up to 2 "
        "requests in a batch and 2 waiting, at least 100 KV blocks free"
    ) in slowest
    assert "2 steps, 2 kept and linked: median 10.0 ms, slowest 10.0 ms (#1 decode" in slowest
    assert "in them: target_forward 50 %, draft 20 %" in slowest
    assert "guesses: 1 of 4 accepted (25.0 %), 1.50 tokens per step with guesses" in slowest


def test_each_moment_belongs_to_one_phase_also_where_spans_overlap() -> None:
    times = time_by_phase([read.span for read in read_spans(a_line(*overlapping_spans()))])
    assert times == {
        "decode": 4 * SECOND,
        "stream": 3 * SECOND,
        "outside these": 1.5 * SECOND,
        "prefill": 1 * SECOND,
        "queue": 0.5 * SECOND,
    }


def test_how_many_are_told_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = a_played_file(tmp_path / "t.jsonl")
    out = told(capsys, "summary", path, "--slowest", 1)
    assert "  1. " in out
    assert "  2. " not in out


def test_rotated_parts_belong_to_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = a_played_file(tmp_path / "whole.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "t.jsonl.1").write_bytes(b"".join(whole[:2]))
    (tmp_path / "t.jsonl").write_bytes(b"".join(whole[2:]))
    assert "35 spans, 2 requests" in told(capsys, tmp_path / "t.jsonl")


def test_a_file_without_requests_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(a_line(a_span(1, "GET /ready")))
    assert "no request came to the engine" in told(capsys, path)


def test_attributes_of_other_types_are_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    odd = dict.fromkeys(
        (names.SPEC_DRAFT_TOKENS, names.SPEC_DRAFTED_AT_POSITION, names.LATENCY_TTFT), "many"
    )
    path.write_bytes(a_line(a_span(1, names.DECODE, error="it broke", **odd)))
    out = told(capsys, path)
    assert "failed: it broke" in out
    assert "guesses: none" in out


def test_a_client_that_reads_slowly_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    stream = a_span(3, names.STREAM, parent=1, seconds=9, **{names.STREAM_BLOCKED: 7.5})
    path.write_bytes(
        a_line(a_span(1, "POST /", seconds=9), a_span(2, names.DECODE, parent=1), stream)
    )
    out = told(capsys, path)
    assert "stream 8.00 s (89 %), decode 1.00 s (11 %)" in out
    assert "the reply waited 7.50 s for the client to read it" in out


def test_damaged_lines_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = a_played_file(tmp_path / "t.jsonl")
    with path.open("ab") as file:
        file.write(b"".join(odd_lines()) + b'{"resourceSp\noops\n{"resourc')
    assert main(["trace", str(path)]) == 0
    captured = capsys.readouterr()
    assert "2 requests" in captured.out
    assert captured.err == "9 lines were left out: they are not OTLP JSON\n"


def test_a_bound_on_memory_leaves_out_the_oldest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    text = "x" * 300_000
    path.write_bytes(b"".join(a_line(a_span(n, trace=n, said=text)) for n in range(1, 6)))
    assert main(["trace", str(path), "--memory-mb", "1"]) == 0
    assert "the 2 oldest traces were left out: raise --memory-mb from 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file"), (b"oops\n", "its first line is not OTLP JSON")],
)
def test_a_file_that_cannot_be_read_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, said: str
) -> None:
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_bytes(content)
    assert main(["trace", str(path)]) == 1
    assert said in capsys.readouterr().err


def test_help_names_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("trace FILE", "trace serve", "trace export"))


def test_a_request_without_a_server_span_is_one_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = FileTracing(tmp_path / "t.jsonl")
    run.tracing.recorder.record_request(a_request(0, traceparent=None))
    run.tracing.shutdown()
    assert ", 1 request, " in told(capsys, tmp_path / "t.jsonl")

"""Trace files as they are read: while they grow, are rotated, are cut off, or are something else;
and the store that keeps what they say within its bound."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path

import pytest

from specserve_observability.context import child_context, root_context
from specserve_observability.jaeger import export_main
from specserve_observability.metrics import Metrics
from specserve_observability.otlp_reading import TraceFileError, read_spans
from specserve_observability.sinks import FileSink
from specserve_observability.spans import SpanFactory
from specserve_observability.trace_files import TraceFile, check_first_lines, rotated_files
from specserve_observability.trace_query import TraceQuery
from specserve_observability.trace_store import TraceStore
from tests.otlp_lines import a_line, a_span
from tests.trace_records import START


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def rotate(path: Path) -> None:
    for number in range(8, 0, -1):
        older = path.with_name(f"{path.name}.{number}")
        if older.exists():
            older.rename(path.with_name(f"{path.name}.{number + 1}"))
    path.rename(path.with_name(f"{path.name}.1"))
    path.touch()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    path.touch()
    return path


# ---- following -------------------------------------------------------------------------------


def test_a_line_is_told_once_its_end_has_come(path: Path) -> None:
    file = TraceFile(path)
    append(path, b"one\ntw")
    assert list(file.new_lines()) == [b"one"]
    append(path, b"o")
    assert list(file.new_lines()) == []
    append(path, b"\nthree\n")
    assert list(file.new_lines()) == [b"two", b"three"]
    assert list(file.new_lines()) == []
    file.close()


def test_what_stands_behind_the_last_line_end_is_told_on_demand(path: Path) -> None:
    file = TraceFile(path)
    append(path, b"one\nlast")
    assert list(file.new_lines()) == [b"one"]
    assert list(file.unfinished()) == [b"last"]
    file.close()


def test_rotation_loses_nothing_and_tells_nothing_twice(path: Path) -> None:
    file = TraceFile(path)
    append(path, b"1\n2\n")
    assert list(file.new_lines()) == [b"1", b"2"]
    append(path, b"3\n")
    rotate(path)
    append(path, b"4\n")
    rotate(path)  # twice between two looks
    append(path, b"5\n")
    assert list(file.new_lines()) == [b"3", b"4", b"5"]
    rotate(path)
    assert list(file.new_lines()) == []
    append(path, b"6\n")
    assert list(file.new_lines()) == [b"6"]
    file.close()


def test_a_file_that_is_rotated_away_for_good_is_read_to_its_end(path: Path) -> None:
    file = TraceFile(path)
    append(path, b"1\n")
    assert list(file.new_lines()) == [b"1"]
    append(path, b"2\nlast")
    path.unlink()
    path.write_bytes(b"3\n")
    assert sorted(file.new_lines()) == [b"2", b"3"]
    assert list(file.new_lines()) == [b"last"]
    assert list(file.new_lines()) == []
    file.close()


def test_a_file_renamed_while_the_folder_is_listed_is_not_told_twice(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = TraceFile(path)
    append(path, b"1\n")
    assert list(file.new_lines()) == [b"1"]
    rotate(path)
    with monkeypatch.context() as patch:  # a listing from before, names from after
        patch.setattr("specserve_observability.trace_files.rotated_files", lambda path: [path])
        assert list(file.new_lines()) == []
    assert list(file.new_lines()) == []
    append(path.with_name(f"{path.name}.1"), b"2\n")
    assert list(file.new_lines()) == [b"2"]
    file.close()


def test_a_file_cut_off_in_place_is_read_from_its_beginning(path: Path) -> None:
    file = TraceFile(path)
    append(path, b"first\nsecond\n")
    assert len(list(file.new_lines())) == 2
    path.write_bytes(b"third\n")
    assert list(file.new_lines()) == [b"third"]
    file.close()


def test_rotated_parts_are_read_oldest_first(path: Path) -> None:
    for number in (1, 2, 10):
        path.with_name(f"{path.name}.{number}").write_bytes(b"%d\n" % number)
    path.with_name(f"{path.name}.old").write_bytes(b"not one\n")
    append(path, b"0\n")
    assert [other.suffix for other in rotated_files(path)] == [".10", ".2", ".1", ".jsonl"]
    file = TraceFile(path)
    assert list(file.new_lines()) == [b"10", b"2", b"1", b"0"]
    file.close()


def test_an_endless_line_takes_no_endless_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specserve_observability.trace_files.MAX_LINE_BYTES", 1000)
    file = TraceFile(path)
    append(path, b"x" * 5000)
    assert list(file.new_lines()) == []
    append(path, b"x" * 5000 + b"\nnext\n")
    assert list(file.new_lines()) == [b"(too long)", b"next"]
    file.close()


def test_a_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        TraceFile(tmp_path / "absent")


@pytest.mark.parametrize("content", [b"oops\n", b'{"data": []}\n', b"\n\n[1]\n"])
def test_a_file_of_something_else_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(TraceFileError, match=r"t\.jsonl: its first line is not OTLP JSON"):
        check_first_lines(path)


def test_a_file_with_a_damaged_beginning_or_none_yet_is_not_refused(path: Path) -> None:
    check_first_lines(path)
    path.write_bytes(b'{"resourceSp')
    check_first_lines(path)
    path.write_bytes(b'{"resourceSp\n' + a_line(a_span(1)))
    check_first_lines(path)


@pytest.mark.parametrize(
    ("spoilt", "said"),
    [
        ({"traceId": "abc"}, "traceId is 'abc', not 32 hex digits"),
        ({"spanId": "g" * 16}, "spanId is 'gggggggggggggggg'"),
        ({"parentSpanId": "12"}, "parentSpanId is '12'"),
        ({"startTimeUnixNano": "-5"}, "negative time"),
        ({"startTimeUnixNano": "soon"}, r"\$.startTimeUnixNano"),
        ({"kind": "SERVER"}, "Expected `int`"),
    ],
)
def test_a_span_that_is_none_says_what_is_wrong(spoilt: dict[str, object], said: str) -> None:
    with pytest.raises(TraceFileError, match=said):
        read_spans(a_line({**a_span(1), **spoilt}))


def test_what_the_servers_own_file_sink_rotates_is_followed_whole(path: Path) -> None:
    metrics = Metrics(drafters=["ngram"])
    sink = FileSink(path, metrics, max_bytes=2500)
    file, store = TraceFile(path), TraceStore(10**7)
    factory = SpanFactory({"service.name": "specserve"}, "1.2.3")
    for number in range(30):  # about three rotations between two looks
        context = child_context(root_context())
        sink.offer([factory.span("work", context, None, START, START + 1, {"number": number})])
        if number % 10 == 9:
            for line in file.new_lines():
                store.add(read_spans(line))
    sink.close(time.monotonic() + 10)
    assert len(rotated_files(path)) == 4
    assert store.num_spans == 30
    file.close()


def test_an_export_holds_rotated_parts_too_and_names_the_one_that_is_damaged(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, out = path.with_name(f"{path.name}.1"), path.with_name("out.json")
    older.write_bytes(a_line(a_span(1, "older")))
    path.write_bytes(a_line(a_span(2, "newer", parent=1)))
    assert export_main([str(path), "-o", str(out)]) == 0
    [trace] = json.loads(out.read_text())["data"]
    assert [span["operationName"] for span in trace["spans"]] == ["older", "newer"]
    append(older, b"oops\n")
    assert export_main([str(path), "-o", str(out)]) == 1
    assert f"{older}: line 2 is not OTLP JSON" in capsys.readouterr().err


# ---- the store -------------------------------------------------------------------------------


def test_the_store_keeps_the_newest_traces_within_its_bound() -> None:
    store = TraceStore(40_000)
    for number in range(1, 101):
        store.add(read_spans(a_line(a_span(number, trace=number, start=number))))
        assert store.num_bytes <= 40_000
    assert store.num_spans == 100
    assert 5 < store.num_traces == 100 - store.num_evicted_traces
    left = store.find(TraceQuery(limit=1000), lambda trace: int(trace.trace_id, 16))
    assert left == list(range(100, 100 - store.num_traces, -1))


def test_a_trace_larger_than_the_bound_is_still_there() -> None:
    store = TraceStore(1000)
    store.add(read_spans(a_line(*(a_span(number) for number in range(1, 50)))))
    assert store.use("0" * 31 + "1", lambda trace: trace.num_spans) == 49


def test_a_span_that_comes_twice_counts_once() -> None:
    store = TraceStore(10**6)
    for _ in range(2):
        store.add(read_spans(a_line(a_span(1), a_span(2, parent=1))))
    assert (store.num_spans, store.num_traces) == (2, 1)


def test_the_root_is_the_first_span_without_a_parent_else_the_first_orphan() -> None:
    store = TraceStore(10**6)
    store.add(read_spans(a_line(a_span(3, "late", parent=9, start=2), a_span(4, "in", parent=9))))
    trace_id = "0" * 31 + "1"
    assert store.use(trace_id, lambda trace: trace.root()) == ("specserve", "in")
    assert store.use(trace_id, lambda trace: trace.num_orphans) == 2
    store.add(read_spans(a_line(a_span(9, "server", seconds=5))))
    assert store.use(trace_id, lambda trace: trace.root()) == ("specserve", "server")
    assert store.use(trace_id, lambda trace: trace.num_orphans) == 0


def test_bytes_are_counted_about_right() -> None:
    """The bound is a promise about memory, so it must not be far below what Python takes."""
    lines = [a_line(*(a_span(t * 100 + s, trace=t) for s in range(1, 6))) for t in range(1, 500)]
    tracemalloc.start()
    store = TraceStore(10**9)
    for line in lines:
        store.add(read_spans(line))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.5 < store.num_bytes / taken < 2

"""rotel, an OTLP collector that is not ours: it listens for HTTP and gRPC and says what it got."""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.trace_contract import Seen, Value

found = importlib.util.find_spec("rotel")
needs_rotel = pytest.mark.skipif(found is None, reason="rotel is not installed: make clients")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Rotel(NamedTuple):
    http: str  # base URL
    grpc: str
    log: Path
    pid: int

    def seen(self, num_spans: int, seconds: float = 60) -> list[Seen]:
        """Waits until it has told of so many spans."""
        deadline = time.monotonic() + seconds
        while (text := self.log.read_text()).count("\nSpan #") < num_spans or text[-1] != "\n":
            assert time.monotonic() < deadline, text[-2000:]
            time.sleep(0.05)
        return list(spans_of_log(text))


@contextmanager
def a_rotel(folder: Path, *, tells: bool = True) -> Iterator[Rotel]:
    """tells: it writes down all that it gets, which costs it much more than getting it."""
    assert found is not None
    assert found.origin is not None
    http, grpc = _free_port(), _free_port()
    log_path = folder / "rotel.log"
    command = [str(Path(found.origin).with_name("rotel-agent")), "start", "--exporter", "blackhole"]
    command += ["--otlp-http-endpoint", f"127.0.0.1:{http}"]
    command += ["--otlp-grpc-endpoint", f"127.0.0.1:{grpc}"]
    if tells:
        command += ["--debug-log", "traces", "--debug-log-verbosity", "detailed"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        for port in (http, grpc):
            _wait_for(port, process, log_path)
        yield Rotel(f"http://127.0.0.1:{http}", f"http://127.0.0.1:{grpc}", log_path, process.pid)
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while True:
        assert process.poll() is None, log.read_text()
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)


# ---- its log -------------------------------------------------------------------------------------


def spans_of_log(text: str) -> Iterator[Seen]:
    """What a detailed debug log says, group by group."""
    for group in text.split("\nResourceSpans #")[1:]:
        resource_text, *parts = re.split(r"\nSpan #\d+\n", group)
        resource = _attributes(resource_text, "     -> ")
        for part in parts:
            yield _span(_COLOURS.sub("", part), resource)


def _span(text: str, resource: dict[str, Value]) -> Seen:
    rest, _, links = text.partition("\nLinks:\n")
    own, _, events = rest.partition("\nEvents:\n")
    told = dict(re.findall(r"^ {4}(\S[^:]*?) *: (.*)$", own, re.M))
    return Seen(
        resource=resource,
        name=told["Name"],
        kind=told["Kind"].removeprefix("SPAN_KIND_").lower(),
        trace_id=told["Trace ID"],
        span_id=told["ID"],
        parent_id=told.get("Parent ID", ""),
        attributes=_attributes(own, "     -> "),
        events=[_event(part) for part in re.split(r"^SpanEvent #\d+\n", events, flags=re.M)[1:]],
        links=re.findall(r"-> Trace ID: ([0-9a-f]+)\n +-> ID: ([0-9a-f]+)", links),
        failed=told["Status code"] == "STATUS_CODE_ERROR",
    )


def _event(text: str) -> tuple[str, dict[str, Value]]:
    (name,) = re.findall(r"-> Name: (.*)", text)
    return name, _attributes(text, "          -> ")


def _attributes(text: str, indent: str) -> dict[str, Value]:
    lines = re.findall(rf"^{indent}([a-z][^\s:]*): ([A-Z][a-z]+\(.*\))$", text, re.M)
    return {key: _value(written) for key, written in lines}


def _value(written: str) -> Value:
    kind, _, inner = written[:-1].partition("(")
    match kind:
        case "Str":
            return inner
        case "Int":
            return int(inner)
        case "Double":
            return float(inner)
        case "Bool":
            return inner == "true"
        case "Slice":
            return [_value(item) for item in re.findall(r"[A-Z][a-z]+\([^)]*\)", inner)]
    raise AssertionError(f"rotel wrote {written!r}")

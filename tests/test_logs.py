"""Log lines: one per event, parseable, tied to their trace, and safe to print."""

from __future__ import annotations

import logging
import re

import pytest
import structlog
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from specserve_observability.logs import (
    bound_request,
    configure_logging,
    get_logger,
    rename_request,
)
from tests.log_lines import json_lines

TRACE_ID, SPAN_ID = "a" * 32, "b" * 16
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
FORGED = "x\r\n2030-01-01T00:00:00Z [error    ] disk_on_fire\x1b[31m\u2028\x85y"


pytestmark = pytest.mark.usefixtures("logging_as_it_was")


def test_an_event_is_one_json_object_with_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(json=True)
    get_logger("specserve.engine").info("sequence_preempted", seq_id=7, num_blocks_freed=3)
    (line,) = json_lines(capsys)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", str(line.pop("timestamp")))
    assert line == {
        "event": "sequence_preempted",
        "level": "info",
        "logger": "specserve.engine",
        "seq_id": 7,
        "num_blocks_freed": 3,
    }


def test_lines_inside_a_request_carry_its_ids(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(json=True)
    log = get_logger("specserve.server")
    with bound_request("r1", TRACEPARENT):
        log.info("inside")
        rename_request("r2")
        log.info("renamed")
    with bound_request("r3", "garbage"):
        log.info("no_trace")
    log.info("outside")
    inside, renamed, no_trace, outside = json_lines(capsys)
    assert (inside["trace_id"], inside["span_id"]) == (TRACE_ID, SPAN_ID)
    assert [line.get("request_id") for line in (inside, renamed)] == ["r1", "r2"]
    assert (no_trace["request_id"], "trace_id" in no_trace) == ("r3", False)
    assert not {"trace_id", "request_id"} & outside.keys()


def test_the_current_span_of_opentelemetry_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(json=True)
    span = TracerProvider().get_tracer("test").start_span("work")
    with trace.use_span(span, end_on_exit=True):
        get_logger("a").info("inside")
    (line,) = json_lines(capsys)
    assert line["trace_id"] == trace.format_trace_id(span.get_span_context().trace_id)
    assert line["span_id"] == trace.format_span_id(span.get_span_context().span_id)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_value_cannot_forge_a_line(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    configure_logging(json=as_json)
    log = get_logger("a")
    log.info(FORGED, user_agent=FORGED, nested=[FORGED], **{FORGED: 1})
    logging.getLogger("library").warning("said %s", FORGED)
    written = capsys.readouterr().err
    assert len(written.splitlines()) == 2
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]", written)


@pytest.mark.parametrize("as_json", [False, True])
def test_an_exceptions_text_cannot_forge_a_line(
    capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    configure_logging(json=as_json)
    try:
        raise ValueError(FORGED)
    except ValueError:
        get_logger("a").exception("request_failed")
    first, *rest = capsys.readouterr().err.splitlines()
    assert "request_failed" in first
    assert all(line.startswith("  | ") for line in rest)
    assert "disk_on_fire" in "".join([first, *rest])


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("key", ["prompt", "messages", "text", "completion", "token_ids"])
def test_prompts_and_completions_are_never_written(
    capsys: pytest.CaptureFixture[str], as_json: bool, key: str
) -> None:
    configure_logging(json=as_json)
    secret = {key: ["my secret"]}
    get_logger("a").info("request_received", **secret)
    get_logger("a").info("request_received", body=secret, bodies=[{"n": 1, "deep": (secret,)}])
    written = capsys.readouterr().err
    assert "secret" not in written
    assert written.count("<1 hidden>") == 3


def test_a_level_hides_what_is_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(json=True, level="warning")
    log = get_logger("a")
    log.debug("no")
    log.info("no")
    log.warning("yes")
    log.error("yes")
    assert [line["event"] for line in json_lines(capsys)] == ["yes", "yes"]


def test_a_level_that_does_not_exist_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="'loud': choose one of debug, info, warning, error"):
        configure_logging(level="loud")


def test_lines_of_other_libraries_take_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(json=True)
    with bound_request("r1", TRACEPARENT):
        logging.getLogger("aiohttp.server").warning("bad request from %s", "1.2.3.4")
    logging.getLogger("aiohttp.server").info("life story")
    (line,) = json_lines(capsys)
    assert line["event"] == "bad request from 1.2.3.4"
    assert line["logger"] == "aiohttp.server"
    assert line["level"] == "warning"
    assert line["trace_id"] == TRACE_ID


def test_configuring_twice_writes_each_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(json=False)
    configure_logging(json=True)
    get_logger("a").info("own")
    logging.getLogger("library").warning("foreign")
    assert [line["event"] for line in json_lines(capsys)] == ["own", "foreign"]


def test_a_logger_made_before_the_set_up_follows_it(capsys: pytest.CaptureFixture[str]) -> None:
    log = get_logger("early")
    configure_logging(json=True)
    log.info("late")
    (line,) = json_lines(capsys)
    assert (line["logger"], line["event"]) == ("early", "late")


def test_a_program_that_sets_up_nothing_sees_only_warnings(
    capsys: pytest.CaptureFixture[str],
) -> None:
    structlog.reset_defaults()
    log = get_logger("library.use")
    log.info("chatter")
    log.warning("trouble", num=3)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "chatter" not in captured.err
    assert "trouble" in captured.err

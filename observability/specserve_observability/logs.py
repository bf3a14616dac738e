"""Structured logs: events and numbers, one line each, on stderr.

JSON for machines, a console form for people. Neither can be forged: control characters in any
value are escaped in the console form, and JSON escapes them by itself. Neither can leak a prompt:
keys that name user text are replaced by its length. Lines of other libraries (logging) take the
same form.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from typing import Protocol, cast

import structlog
from opentelemetry import trace
from structlog.typing import EventDict, Processor, WrappedLogger

from .context import parse_traceparent

LEVELS = ("debug", "info", "warning", "error")
_USER_TEXT = frozenset(
    {"prompt", "prompts", "messages", "content", "text", "completion", "prompt_ids", "token_ids"}
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_NOISY = ("opentelemetry", "urllib3")  # one line per retry while a collector is down


class Logger(Protocol):
    """The events of one part of the program; keyword values are the numbers."""

    def debug(self, event: str, /, **values: object) -> None: ...
    def info(self, event: str, /, **values: object) -> None: ...
    def warning(self, event: str, /, **values: object) -> None: ...
    def error(self, event: str, /, **values: object) -> None: ...
    def exception(self, event: str, /, **values: object) -> None: ...


def get_logger(name: str) -> Logger:
    """A logger whose lines carry `logger=name`. May be made before configure_logging.

    In a program that never configures structlog (a script that uses the Python API) only warnings
    and errors are written.
    """
    if not structlog.is_configured():
        _configure_structlog(logging.WARNING, _console_processors())
    return cast(Logger, structlog.get_logger(name))


def configure_logging(*, json: bool = False, level: str = "info") -> None:
    """Set up structlog and logging for this process; calling it again replaces the set-up.

    level: one of LEVELS. Raises ValueError for any other.
    """
    if level not in LEVELS:
        raise ValueError(f"log level is {level!r}: choose one of {', '.join(LEVELS)}")
    threshold = getattr(logging, level.upper())  # by name: the four are ints in logging
    last: list[Processor] = _json_processors() if json else _console_processors()
    _configure_structlog(threshold, last)
    _route_stdlib_logging(threshold, last)


@contextmanager
def bound_request(request_id: str, traceparent: str | None) -> Iterator[None]:
    """Lines logged inside carry request_id, and trace_id and span_id of a W3C traceparent."""
    context = None if traceparent is None else parse_traceparent(traceparent)
    ids = {"request_id": request_id}
    if context is not None:
        ids |= {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
    with structlog.contextvars.bound_contextvars(**ids):
        yield


def rename_request(request_id: str) -> None:
    """From here on the lines of the bound request carry this id."""
    structlog.contextvars.bind_contextvars(request_id=request_id)


def _configure_structlog(threshold: int, last: list[Processor]) -> None:
    structlog.configure(
        processors=[_add_logger_name, *_SHARED, *last],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=_StderrLogger,
        cache_logger_on_first_use=False,
    )


class _StderrLogger:
    """Writes to whatever sys.stderr is now: tests and daemons replace it."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def msg(self, message: str) -> None:
        sys.stderr.write(message + "\n")

    debug = info = warning = error = critical = exception = msg


class _StderrHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")


def _route_stdlib_logging(threshold: int, last: list[Processor]) -> None:
    handler = _StderrHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.ExtraAdder(), _add_stdlib_name, *_SHARED],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers = [h for h in root.handlers if not isinstance(h, _StderrHandler)]
    root.addHandler(handler)
    root.setLevel(max(threshold, logging.WARNING))  # libraries tell their life story at info
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)


def _json_processors() -> list[Processor]:
    return [structlog.processors.JSONRenderer()]


def _console_processors() -> list[Processor]:
    return [
        _escape_control_characters,
        structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback
        ),
    ]


def _add_logger_name(logger: WrappedLogger, _: str, event: EventDict) -> EventDict:
    if isinstance(logger, _StderrLogger) and logger.name:
        event["logger"] = logger.name
    return event


def _add_stdlib_name(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    record = event.get("_record")
    if isinstance(record, logging.LogRecord):
        event["logger"] = record.name
    return event


def _add_current_span(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    if "trace_id" in event:
        return event
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = f"{context.trace_id:032x}"
        event["span_id"] = f"{context.span_id:016x}"
    return event


def _hide_user_text(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    return {key: _without_user_text(key, value) for key, value in event.items()}


def _without_user_text(key: object, value: object) -> object:
    """The value, or what may be said of it; looks into mappings and lists."""
    if key in _USER_TEXT:
        size = len(value) if isinstance(value, Sized) else "?"
        return f"<{size} hidden>"
    if isinstance(value, Mapping):
        return {name: _without_user_text(name, inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_user_text("", inner) for inner in value]
    return value


def _escape_control_characters(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    escaped: EventDict = {}
    for key, value in event.items():
        if key == "exception" and isinstance(value, str):
            # A traceback keeps its lines, each behind a bar: none can pass for a log line.
            lines = value.split("\n")
            escaped[key] = "\n".join("  | " + _escape(line) for line in lines)
        else:
            text = value if isinstance(value, str | int | float | None) else repr(value)
            escaped[_escape(key)] = _escape(text) if isinstance(text, str) else text
    return escaped


def _escape(text: str) -> str:
    return _CONTROL.sub(lambda match: repr(match.group())[1:-1], text)


_SHARED: list[Processor] = [
    structlog.contextvars.merge_contextvars,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    _add_current_span,
    _hide_user_text,
    structlog.processors.format_exc_info,
]

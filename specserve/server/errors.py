"""Every error a client sees: `{"error": {message, type, param, code}}`, whatever went wrong.

Nothing about this machine leaves in a message: no traceback, no file path, no memory address.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from aiohttp import web

from specserve.errors import EngineError, RequestError

RETRY_AFTER_SECONDS = 1

# Retried later by every client; told apart from a fault of the request.
_RETRYABLE = {429, 503}
_MESSAGES_TYPES = {413: "request_too_large", 503: "overloaded_error"}
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}

_ADDRESS = re.compile(r"0x[0-9a-fA-F]{4,}")
_PATH = re.compile(r"(?<![\w:/])/[\w.+@-]+(?:/[\w.+@-]+)+")
_MAX_PUBLIC_CHARS = 300


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorDetail


class MessagesErrorDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class MessagesError(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """The same as /v1/messages has it."""

    error: MessagesErrorDetail
    request_id: str | None


def public_text(text: str) -> str:
    """The part of an internal error's text that may leave: first line, no paths, no addresses."""
    first_line = text.strip().split("\n", 1)[0][:_MAX_PUBLIC_CHARS]
    return _PATH.sub("<path>", _ADDRESS.sub("<address>", first_line))


def error_type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")


def error_detail(error: RequestError) -> ErrorDetail:
    return ErrorDetail(error.message, error_type(error.status), error.param, error.code)


def messages_error(error: RequestError, request_id: str | None) -> MessagesError:
    kind = _MESSAGES_TYPES.get(error.status, error_type(error.status))
    return MessagesError(
        error=MessagesErrorDetail("api_error" if kind == "server_error" else kind, error.message),
        request_id=request_id,
    )


def encode_error(error: RequestError) -> bytes:
    return msgspec.json.encode(ErrorReply(error_detail(error)))


def error_response(error: RequestError, body: msgspec.Struct | None = None) -> web.Response:
    """body: as the endpoint spells it; None: as OpenAI's do"""
    headers = {"Cache-Control": "no-store"}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in _RETRYABLE:
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    return web.Response(
        status=error.status,
        body=encode_error(error) if body is None else msgspec.json.encode(body),
        content_type="application/json",
        headers=headers,
    )


def internal_error() -> RequestError:
    """A fault of ours that nobody foresaw: the cause is in the log, not in the reply."""
    return RequestError(
        "the server failed on this request; the cause is in its log under this x-request-id",
        code="internal_error",
        status=500,
    )


def reworded(message: str, names: Mapping[str, str]) -> str:
    """A chat's message with fields as another endpoint calls them: {theirs: ours}.

    A name that is also a word of prose is one at the beginning only.
    """
    for theirs in sorted(names, key=len, reverse=True):
        begins = "(?<![\\w.])" if "_" in theirs else "^"
        message = re.sub(rf"{begins}{re.escape(theirs)}(?![\w])", names[theirs], message)
    return message


def engine_failure(reason: str) -> RequestError:
    return RequestError(
        f"the engine failed while this request was running: {public_text(reason)}",
        code="engine_error",
        status=500,
    )


def unfollowable(reason: str) -> RequestError:
    """Told while the reply is made, for that shows it; asked again, it would be the same."""
    return RequestError(f"this request asks for what cannot be: {reason}", code="unfollowable")


def stopping() -> RequestError:
    return RequestError(
        "the server is shutting down and takes no new requests: retry elsewhere or later",
        code="server_stopping",
        status=503,
    )


def cut_short() -> RequestError:
    return RequestError(
        "the server shut down before this reply was complete: ask again",
        code="server_stopping",
        status=503,
    )


def engine_dead(reason: str) -> RequestError:
    return RequestError(
        f"the engine has stopped: {public_text(reason)}", code="engine_dead", status=503
    )


def unknown_expectation() -> RequestError:
    return RequestError(
        "the header Expect can only be 100-continue: leave it out",
        code="expectation_failed",
        status=417,
    )


def public_error(error: RequestError | EngineError) -> RequestError:
    """What a client is told. A fault of ours may quote a cause, which is scrubbed."""
    if isinstance(error, EngineError):
        return engine_failure(str(error))
    if error.status >= 500:
        error.message = public_text(error.message)
    return error


def from_http_exception(error: web.HTTPException, *, method: str, path: str) -> RequestError:
    """aiohttp's own refusals (routing) in the shape of every other error.

    method, path: of the request, named so that a wrong base URL is seen at once
    """
    path = path[:200]
    if error.status == 404:
        return RequestError(f"no such endpoint: {method} {path}", code="not_found", status=404)
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{path} does not take {method}: use {allowed}"
        return RequestError(message, code="method_not_allowed", status=405)
    return RequestError(HTTPStatus(error.status).phrase, code="http_error", status=error.status)

"""Which web pages may read what this server says (CORS).

No cookie means anything here: a page sends its API key itself. So credentials are never allowed,
and `*` gives away nothing that the page did not have.
"""

from __future__ import annotations

import re

import msgspec
from aiohttp import web

from specserve.errors import ConfigError, RequestError

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::\d{1,5})?")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_-]{1,64}(?:[ \t]*,[ \t]*[A-Za-z0-9_-]{1,64}){0,63}")
_EXPOSED = "x-request-id, retry-after"
_PREFLIGHT_SECONDS = "600"


class CorsPolicy(msgspec.Struct, frozen=True):
    origins: frozenset[str] = frozenset()  # in lower case; "*": any; empty: none

    @classmethod
    def parse(cls, text: str) -> CorsPolicy:
        """text: origins by comma, or *. ConfigError for what no browser would send."""
        origins = [part.strip().lower() for part in text.split(",")]
        for origin in origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"--cors-origins has {origin!r}, an origin is * or scheme://host[:port] "
                    "without a path, as in https://chat.example.org"
                )
        return cls(frozenset(origins))

    def allows(self, origin: str) -> bool:
        return "*" in self.origins or origin.lower() in self.origins

    def is_preflight(self, request: web.Request) -> bool:
        return (
            bool(self.origins)
            and request.method == "OPTIONS"
            and "origin" in request.headers
            and "access-control-request-method" in request.headers
        )

    def preflight(self, request: web.Request) -> web.Response:
        """Asked by a browser before the real request, and never with a key."""
        origin = request.headers["origin"]
        if not self.allows(origin):
            raise RequestError(
                f"the origin {origin[:200]!r} may not use this server: start it with "
                "--cors-origins that name it",
                code="origin_not_allowed",
                status=403,
            )
        headers = {
            "Access-Control-Allow-Methods": "GET, HEAD, POST",
            "Access-Control-Max-Age": _PREFLIGHT_SECONDS,
        }
        # A page may send any header it likes: none that we read means more than its value.
        asked = request.headers.get("access-control-request-headers", "")
        if _HEADER_NAMES.fullmatch(asked):
            headers["Access-Control-Allow-Headers"] = asked
        return web.Response(status=204, headers=headers)

    def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """To every reply, errors included: a page cannot even read why it was refused without."""
        if not self.origins:
            return
        if "*" in self.origins:
            response.headers["Access-Control-Allow-Origin"] = "*"
        else:
            response.headers["Vary"] = "Origin"
            origin = request.headers.get("origin", "")
            if not self.allows(origin):
                return
            response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = _EXPOSED

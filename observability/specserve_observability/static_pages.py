"""Pages that are plain files: read once, sent with a policy under which nothing else can run.

Nothing of a page comes from anywhere else, and a page only ever makes text of what it is told.
"""

from __future__ import annotations

from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def pages_of(folder: Path, prefix: str) -> dict[str, Handler]:
    """Route -> handler of each page file in folder: index.html at /, the others behind prefix."""
    return {
        "/" if path.name == "index.html" else f"{prefix}{path.name}": _serving(path)
        for path in sorted(folder.iterdir())
        if path.suffix in _TYPES
    }


def _serving(path: Path) -> Handler:
    body = path.read_bytes()  # once, before there is a loop to hold up
    kind = _TYPES[path.suffix]

    async def serve(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=PAGE_HEADERS)

    return serve

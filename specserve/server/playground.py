"""GET / and /playground/*: a page to talk to the model and watch speculation happen.

Plain files, the page's whole world: nothing is built, and nothing comes from anywhere else. They
hold no secret, so that they need no key; what they ask of the API does. What a model says must not
run in a browser: the page only ever makes text of it, and the policy here forbids the rest.
"""

from __future__ import annotations

from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler

_FOLDER = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


def _serving(path: Path) -> Handler:
    body = path.read_bytes()  # once, before there is a loop to hold up
    kind = _TYPES[path.suffix]

    async def serve(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)

    return serve


PAGES: dict[str, Handler] = {
    "/" if path.name == "index.html" else f"/playground/{path.name}": _serving(path)
    for path in sorted(_FOLDER.iterdir())
    if path.suffix in _TYPES
}

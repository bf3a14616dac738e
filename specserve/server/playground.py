"""GET / and /playground/*: a page to talk to the model and watch speculation happen.

Plain files, the page's whole world: nothing is built, and nothing comes from anywhere else. They
hold no secret, so that they need no key; what they ask of the API does. What a model says must not
run in a browser: the page only ever makes text of it, and the policy here forbids the rest.
"""

from __future__ import annotations

from pathlib import Path

from aiohttp.typedefs import Handler

from specserve_observability.static_pages import pages_of

PAGES: dict[str, Handler] = pages_of(Path(__file__).parent / "static", "/playground/")

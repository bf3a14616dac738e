"""One line per request: what was asked, what came of it, and how long that took.

Numbers and names only: the route as documented and never the path, no prompt, no text. The request
and trace ids are bound around the whole request (logs.py), so they stand on every line of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from specserve.server.keys import OPEN_ROUTES
from specserve.server.tracing import AttributeValue
from specserve_observability import names
from specserve_observability.logs import get_logger

_log = get_logger("specserve.server")
# Asked every few seconds by supervisors and scrapers.
_PROBES: Final = OPEN_ROUTES | {"/metrics"}
# What a span says of the reply, as the line calls it.
_NUMBERS: Final = {
    names.GEN_AI_INPUT_TOKENS: "prompt_tokens",
    names.GEN_AI_CACHED_TOKENS: "cached_tokens",
    names.GEN_AI_OUTPUT_TOKENS: "output_tokens",
    names.SPEC_DRAFT_TOKENS: "draft_tokens",
    names.SPEC_ACCEPTED_TOKENS: "accepted_tokens",
    names.GEN_AI_FINISH_REASONS: "finish_reasons",
}


def log_request(
    method: str,
    route: str,
    status: int,
    seconds: float,
    traffic_class: str,
    attributes: Mapping[str, AttributeValue],
) -> None:
    """status: 499 where the client left; attributes: of its spans"""
    write = _log.warning if status >= 500 else _log.debug if route in _PROBES else _log.info
    numbers = {name: attributes[key] for key, name in _NUMBERS.items() if key in attributes}
    write(
        "request_finished",
        method=method,
        route=route,
        status=status,
        seconds=round(seconds, 6),
        traffic_class=traffic_class,
        **numbers,
    )

"""HTTP requests by documented route and outcome: what was refused never becomes a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

# 429: the queue or a key is full. 499: the client left before its reply was complete.
OUTCOMES: Final = ("2xx", "3xx", "4xx", "429", "499", "5xx")
OTHER_ROUTE: Final = "other"


class HttpCounters:
    """One writer: the event loop."""

    def __init__(self) -> None:
        self.by_route: dict[str, dict[str, int]] = {}
        self.announce([OTHER_ROUTE])

    def announce(self, routes: Iterable[str]) -> None:
        """Routes that are told apart, at 0; all others are `other`."""
        for route in routes:
            self.by_route.setdefault(route, dict.fromkeys(OUTCOMES, 0))

    def add(self, route: str, status: int) -> None:
        counts = self.by_route.get(route, self.by_route[OTHER_ROUTE])
        outcome = str(status)
        counts[outcome if outcome in counts else f"{min(max(status // 100, 2), 5)}xx"] += 1

"""What kept sequences in the queue, and for how long: one clock for all that wait."""

from __future__ import annotations

from collections.abc import Mapping


class WaitClock:
    """Seconds by reason since the start; whoever waits compares two readings."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._reason: str | None = None
        self._since = 0.0

    def planned(self, reason: str, now: float) -> None:
        """From now on, whoever waits does so for this reason."""
        self._count(now)
        self._reason = reason

    def read(self, now: float) -> Mapping[str, float]:
        self._count(now)
        return dict(self._seconds)

    def longest(self, before: Mapping[str, float], now: float, default: str) -> str:
        """The reason of most of the time since `before` was read."""
        grown = {
            reason: seconds - before.get(reason, 0.0) for reason, seconds in self.read(now).items()
        }
        return max(grown, key=grown.__getitem__) if any(grown.values()) else default

    def _count(self, now: float) -> None:
        if self._reason is not None:
            waited = self._seconds.get(self._reason, 0.0) + max(0.0, now - self._since)
            self._seconds[self._reason] = waited
        self._since = now

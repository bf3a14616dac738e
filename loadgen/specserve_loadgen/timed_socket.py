"""Sockets that know when bytes last came.

The event loop reads all sockets that are ready before it wakes the first task that waits for one.
Of 64 streams whose events come together, as the steps of a server end, the last task wakes a
millisecond or two behind its read; so the read notes the time.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from weakref import WeakValueDictionary

import aiohttp


class TimedSocket(socket.socket):
    """read_at: of the last read that the loop made; None: none so far, or by other means"""

    __slots__ = ("clock", "read_at")
    clock: Callable[[], float]
    read_at: float | None

    def recv(self, size: int, flags: int = 0, /) -> bytes:
        data = super().recv(size, flags)
        self.read_at = self.clock()
        return data


class TimedSockets:
    """Makes them for a connector, and finds the one behind a response."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_fd: WeakValueDictionary[int, TimedSocket] = WeakValueDictionary()

    def make(self, address: aiohttp.AddrInfoType) -> TimedSocket:
        family, kind, protocol, _, _ = address
        made = TimedSocket(family, kind, protocol)
        made.clock, made.read_at = self._clock, None
        self._by_fd[made.fileno()] = made  # a closed one's number is given again
        return made

    def behind(self, response: aiohttp.ClientResponse) -> TimedSocket | None:
        """None: its connection is no longer its own, since the whole reply is here."""
        connection = response.connection
        transport = None if connection is None else connection.transport
        if transport is None:
            return None
        return self._by_fd.get(transport.get_extra_info("socket").fileno())

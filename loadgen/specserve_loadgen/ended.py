"""Work that SIGINT or SIGTERM ends, after it has put away what it started.

Python's own handlers raise wherever the main thread is. In an event loop that may be just before a
callback runs: it is lost, and the task that it would have woken is never told of its own end. So
here the loop reads the signals, and they cancel the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_until_ended(work: Coroutine[None, None, None]) -> bool:
    """Whether a signal ended it. Further ones change nothing: putting away is not cut short."""
    return asyncio.run(_until_ended(work))


async def _until_ended(work: Coroutine[None, None, None]) -> bool:
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    ended = False

    def end() -> None:
        nonlocal ended
        if not ended:
            ended = True
            task.cancel()

    # Where this is not the main thread, or the platform has no such handlers, Python's stay.
    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
        for number in SIGNALS:
            loop.add_signal_handler(number, end)
    try:
        await task
    except asyncio.CancelledError:
        if not ended:
            raise
    finally:
        with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):
            for number in SIGNALS:
                loop.remove_signal_handler(number)
    return ended

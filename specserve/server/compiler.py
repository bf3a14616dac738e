"""Grammars compiled off the loop, within a time that a request may wait."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from specserve.constraint import Constraint, GrammarSpec
from specserve.errors import RequestError
from specserve.grammar import Grammars
from specserve.server.spare_grammars import SpareGrammars
from specserve.tokenizer import Tokenizer

_QUICK_SECONDS: Final = 0.05  # each


class GrammarCompiler:
    """One thread of its own, so that a slow grammar holds up grammars only.

    Who gives up waiting leaves nothing behind: what has not begun never will, and of n sequences
    no further one is made. A grammar that is asked for again gets a spare for whoever asks next,
    made behind all who wait now; one that takes long gets none, since who comes then would wait.
    """

    def __init__(self, tokenizer: Tokenizer, *, seconds: float) -> None:
        """seconds: how long a request may wait for its grammar"""
        self._grammars = Grammars(tokenizer)
        self._seconds = seconds
        self._spares = SpareGrammars()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="specserve-grammar")

    async def constraints(self, spec: GrammarSpec, count: int) -> list[Constraint]:
        given_up = threading.Event()

        def make() -> list[Constraint]:
            spare = self._spares.take(spec)
            made = [] if spare is None else [spare]
            begun = time.thread_time()
            while len(made) < count and not given_up.is_set():
                made.append(self._grammars.constraint(spec))
            if time.thread_time() - begun < count * _QUICK_SECONDS and not given_up.is_set():
                with contextlib.suppress(RuntimeError):  # the server has closed it meanwhile
                    self._pool.submit(self._make_spare, spec)
            return made

        try:
            async with asyncio.timeout(self._seconds):
                return await asyncio.get_running_loop().run_in_executor(self._pool, make)
        except TimeoutError:
            raise RequestError(
                f"{spec.param} was not ready within {self._seconds:g} seconds: make it smaller, "
                "ask for fewer replies, or try again later",
                param=spec.param,
                code="grammar_timeout",
            ) from None
        finally:
            given_up.set()

    def _make_spare(self, spec: GrammarSpec) -> None:
        if self._spares.wants(spec):
            self._spares.put(spec, self._grammars.constraint(spec))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

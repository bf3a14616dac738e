"""Grammars compiled off the loop, within a time that a request may wait."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

from specserve.constraint import Constraint, GrammarSpec
from specserve.errors import RequestError
from specserve.grammar import Grammars
from specserve.tokenizer import Tokenizer


class GrammarCompiler:
    """One thread of its own, so that a slow grammar holds up grammars only.

    Who gives up waiting leaves nothing behind: what has not begun never will, and of n sequences
    no further one is made.
    """

    def __init__(self, tokenizer: Tokenizer, *, seconds: float) -> None:
        """seconds: how long a request may wait for its grammar"""
        self._grammars = Grammars(tokenizer)
        self._seconds = seconds
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="specserve-grammar")

    async def constraints(self, spec: GrammarSpec, count: int) -> list[Constraint]:
        given_up = threading.Event()

        def make() -> list[Constraint]:
            made: list[Constraint] = []
            while len(made) < count and not given_up.is_set():
                made.append(self._grammars.constraint(spec))
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

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

"""One prompt with all its turns: each goes out with what was said before it, replies included.

In an open loop a turn's intended time is the end of the reply before it and a time to think. A
turn that fails ends the conversation: nobody answers an error.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from itertools import accumulate

import msgspec

from specserve_loadgen.client import Client
from specserve_loadgen.prompt import Message, Prompt
from specserve_loadgen.records import RequestRecord, Turn
from specserve_loadgen.settings import Settings


class Conversations:
    """Sends prompts by the index of their conversation; the list of prompts repeats."""

    def __init__(
        self,
        settings: Settings,
        prompts: Sequence[Prompt],
        client: Client,
        take: Callable[[RequestRecord], None],
    ) -> None:
        self._settings = settings
        self._prompts = prompts
        self._client = client
        self._take = take
        self._first_idxs = [0, *accumulate(len(self._later_turns(p)) + 1 for p in prompts)]

    def _later_turns(self, prompt: Prompt) -> tuple[str, ...]:
        return prompt.later_turns if self._settings.multi_turn else ()

    async def send(self, session_idx: int, scheduled: float | None) -> None:
        """One conversation to its end. A request's index, and so its seed, repeats in every run."""
        num_rounds, prompt_idx = divmod(session_idx, len(self._prompts))
        prompt = self._prompts[prompt_idx]
        request_idx = num_rounds * self._first_idxs[-1] + self._first_idxs[prompt_idx]
        rng = random.Random(f"{self._settings.seed}/think/{session_idx}")
        for turn_idx, following in enumerate((*self._later_turns(prompt), None)):
            turn = Turn(
                request_idx=request_idx + turn_idx,
                session_idx=session_idx,
                turn_idx=turn_idx,
                scheduled=scheduled,
            )
            record, text = await self._client.send(prompt, turn, self._take)
            if following is None or not record.succeeded:
                return
            due = record.ended + self._seconds_to_think(rng)
            await asyncio.sleep(max(0.0, due - self._client.now()))
            if self._is_over():
                return
            scheduled = None if scheduled is None else due
            said = (Message("assistant", text), Message("user", following))
            prompt = msgspec.structs.replace(prompt, messages=(*prompt.messages, *said))

    def _seconds_to_think(self, rng: random.Random) -> float:
        mean = self._settings.think_time
        return rng.expovariate(1 / mean) if mean else 0.0

    def _is_over(self) -> bool:
        duration = self._settings.duration
        return duration is not None and self._client.now() >= duration

"""A server for studies whose acceptance follows a law that the test writes down.

Text is a function of prompt and seed alone, as exact replay demands; how it is cut into steps is a
function of what the request asks for. Real sockets; no model, no waiting.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import msgspec
from aiohttp import web

from tests.loadgen_server import Script, Step, event, usage_of

NUM_TOKENS = 60


class Asked(msgspec.Struct, frozen=True):
    """The parts of a request that decide its answer."""

    drafter: str | None
    k: int
    rule: str
    temperature: float
    seed: int
    prompt: str
    max_tokens: int


def asked(body: dict[str, object]) -> Asked:
    chosen = body.get("speculation")
    chosen = chosen if isinstance(chosen, dict) else {}
    messages = body["messages"]
    assert isinstance(messages, list)
    return Asked(
        drafter=chosen.get("drafter"),
        k=chosen.get("max_draft_tokens") or 0,
        rule=chosen.get("verify") or "replay",
        temperature=float(str(body.get("temperature", 1.0))),
        seed=int(str(body["seed"])),
        prompt=str(messages[-1]["content"]),
        max_tokens=int(str(body["max_tokens"])),
    )


class StudyServer:
    """chance: of a guess at a place (0 is the first) to be right; says: the ids of a reply.

    with_steps: whether single steps are told to who asks for them
    """

    def __init__(
        self,
        chance: Callable[[Asked, int], float] = lambda asked, at: 0.0,
        says: Callable[[Asked], list[int]] | None = None,
        *,
        with_steps: bool = True,
        on_request: Callable[[Asked], None] = lambda asked: None,
    ) -> None:
        self._chance = chance
        self._says = says or said
        self._with_steps = with_steps
        self._on_request = on_request
        self.bodies: list[dict[str, object]] = []
        self.phases = {"draft": 0.0, "target_forward": 0.0}  # 1 ms a guess, 10 ms a step

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/chat/completions", self._complete)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        name = "specserve_step_phase_seconds_sum"
        return web.Response(
            text="".join(f'{name}{{phase="{p}"}} {v!r}\n' for p, v in self.phases.items())
        )

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        one = asked(body)
        self._on_request(one)
        ids = self._says(one)[: one.max_tokens]
        script = Script(steps=self._steps(one, len(ids)), k=one.k)
        self.phases["draft"] += 0.001 * sum(step.drafted for step in script.steps)
        self.phases["target_forward"] += 0.010 * len(script.steps)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        at = 0
        for step in script.steps:
            new = ids[at : at + step.num_tokens]
            at += step.num_tokens
            text = "".join(f"{token} " for token in new)
            choice = {"index": 0, "delta": {"content": text}, "token_ids": new}
            await response.write(event({"choices": [choice]}))
        metrics = script.metrics()
        if self._with_steps and (body.get("speculation") or {}).get("detailed"):
            spec = [step for step in script.steps if step.drafted]
            metrics["speculative_decoding"] |= {
                "per_step_accepted": [step.accepted for step in spec],
                "per_step_drafted": [step.drafted for step in spec],
            }
        last = {"choices": [], "usage": usage_of(len(ids), 0), "metrics": metrics}
        await response.write(event(last) + b"data: [DONE]\n\n")
        return response

    def _steps(self, one: Asked, num_tokens: int) -> tuple[Step, ...]:
        """Guesses beyond the end are never made, so every step emits accepted + 1."""
        rng = random.Random(json.dumps([one.prompt, one.seed, one.drafter, one.k]))
        steps: list[Step] = []
        left = num_tokens
        while left > 0:
            drafted = min(one.k, left - 1)
            accepted = 0
            while accepted < drafted and rng.random() < self._chance(one, accepted):
                accepted += 1
            steps.append(Step(drafted=drafted, accepted=accepted))
            left -= accepted + 1
        return tuple(steps)


def said(one: Asked) -> list[int]:
    rng = random.Random(f"{one.prompt}/{one.seed}")
    return [rng.randrange(1000) for _ in range(NUM_TOKENS)]

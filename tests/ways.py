"""One request, asked in eight ways that must not differ: who guesses, and whether it streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any  # decoded JSON

import msgspec

from specserve.config import EngineConfig
from specserve.drafting import Drafter
from specserve.models.decoder import Decoder
from specserve.server.state import ServerSettings
from specserve_drafts import DRAFTERS, DrafterResources
from tests.guessers import make_guesser
from tests.http_server import CONFIG, Server, a_server
from tests.raw_http import Connection, Reply
from tests.scripted import VOCAB_SIZE, Script, guessers, says
from tests.tiny_models import tiny_decoder

GUESSERS = ("oracle", "anti", "ngram")


class Way(msgspec.Struct, frozen=True):
    drafter: str
    stream: bool

    def __str__(self) -> str:
        return f"{self.drafter}-{'stream' if self.stream else 'whole'}"

    def body(self, k: int = 5, **body: object) -> dict[str, object]:
        """Of /v1/completions."""
        return {
            "prompt": "say:",
            "temperature": 0,
            "return_token_ids": True,
            "stream": self.stream,
            "stream_options": {"include_usage": True} if self.stream else None,
            "speculation": {"drafter": self.drafter, "max_draft_tokens": k},
            **body,
        }

    async def start(self, connection: Connection, **body: Any) -> None:
        await connection.request("POST", "/v1/completions", self.body(**body))

    async def ask(self, server: Server, **body: Any) -> Reply:
        return await server.post("/v1/completions", self.body(**body))

    async def hear(self, server: Server, **body: Any) -> Told:
        return told(await self.ask(server, **body))


WAYS = [Way(drafter, stream) for drafter in ("none", *GUESSERS) for stream in (True, False)]
PLAIN = Way("none", False)


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What a reply of one choice said, in whatever shape it came."""

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    usage: dict[str, int]
    metrics: dict[str, Any]

    def same_as(self, other: Told) -> bool:
        """In all but how much speculation there was."""
        return msgspec.structs.replace(self, metrics=other.metrics) == other


def told(reply: Reply) -> Told:
    """AssertionError unless it is a whole reply in the documented shape."""
    assert reply.status == 200, reply.body
    if not reply.headers["content-type"].startswith("text/event-stream"):
        parts = [reply.json()]
        usage = parts[0]["usage"]
    else:
        assert reply.body.endswith(b"\n\ndata: [DONE]\n\n")
        assert reply.body.count(b"[DONE]") == 1
        *parts, last, done = reply.events
        assert done == "[DONE]"
        assert last["choices"] == []
        usage = last["usage"]
        parts.append(last)
    choices = [choice for part in parts for choice in part["choices"]]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    [metrics] = [part["metrics"] for part in parts if "metrics" in part]
    return Told(
        text="".join(choice["text"] for choice in choices),
        token_ids=[token_id for choice in choices for token_id in choice["token_ids"]],
        finish_reason=choices[-1]["finish_reason"],
        stop_reason=choices[-1]["stop_reason"],
        logprobs=[value for one in logprobs for value in one["token_logprobs"]],
        top_logprobs=[top for one in logprobs for top in one["top_logprobs"]],
        usage={name: usage[name] for name in ("prompt_tokens", "completion_tokens")},
        metrics=metrics,
    )


# ---- servers that can be asked in every way ----------------------------------------------------


@asynccontextmanager
async def a_scripted_server(
    script: Script,
    *,
    config: EngineConfig = CONFIG,
    settings: ServerSettings | None = None,
    on_forward: Callable[[], None] = lambda: None,
    send_buffer: int | None = None,
) -> AsyncIterator[Server]:
    known = guessers(script)
    drafters: dict[str, Drafter] = {"oracle": known["oracle"], "anti": known["anti"]}
    drafters["ngram"] = DRAFTERS["ngram"](
        DrafterResources(
            vocab_size=VOCAB_SIZE, num_blocks=config.num_blocks, block_size=config.block_size
        )
    )
    async with a_server(
        script,
        config=config,
        settings=settings,
        on_forward=on_forward,
        send_buffer=send_buffer,
        drafters=drafters,
    ) as server:
        yield server


class World(msgspec.Struct, frozen=True):
    """A server of a small real model; those who guess know what it said to `hear` before."""

    server: Server
    model: Decoder
    truth: dict[tuple[int, ...], list[int]]

    async def plain(self, prompt: list[int], **body: Any) -> Told:
        """The reply of plain decoding, which is from now on what is true of this prompt."""
        said = await PLAIN.hear(self.server, prompt=prompt, **body)
        self.truth[tuple(prompt)] = said.token_ids
        return said


@asynccontextmanager
async def a_real_server(
    config: EngineConfig = CONFIG, *, truth: Mapping[tuple[int, ...], list[int]] | None = None
) -> AsyncIterator[World]:
    """truth: what another server of this model said"""
    model = tiny_decoder(vocab=VOCAB_SIZE, seed=3)
    table = dict(truth or {})
    drafters = {name: make_guesser(name, model, table, config) for name in GUESSERS}
    async with a_server(says(""), config=config, model=model, drafters=drafters) as server:
        yield World(server, model, table)

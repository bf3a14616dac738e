"""What a run is asked to do: frozen, checked by `cli`, written into the JSON report whole."""

from __future__ import annotations

from typing import Literal

import msgspec

Endpoint = Literal["chat", "completions"]


class ClosedLoop(msgspec.Struct, frozen=True, tag="closed", tag_field="kind"):
    """Each of `concurrency` users sends the next request when the last one is answered."""

    concurrency: int


class OpenLoop(msgspec.Struct, frozen=True, tag="open", tag_field="kind"):
    """Requests leave at the times of a Poisson process, however slow the server is."""

    rate: float  # requests/s


Load = ClosedLoop | OpenLoop


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The API key is no part of it, so that no report can hold one."""

    url: str  # scheme://host:port, without /v1
    endpoint: Endpoint = "chat"
    prompts_file: str | None = None  # None: the shipped pack
    categories: tuple[str, ...] = ()  # (): all
    load: Load = ClosedLoop(1)
    num_requests: int | None = None  # None, and no duration: each prompt once
    duration: float | None = None  # seconds in which requests are started; all are awaited
    warmup: int = 0  # requests before the measured ones, in no number
    max_tokens: int = 128
    shortest: int | None = None  # limits spread evenly from here to max_tokens; None: all alike
    temperature: float | None = None  # None: the server's default
    seed: int = 0  # of the arrivals; request i samples with seed + i
    ignore_eos: bool = False
    drafter: str | None = None
    max_draft_tokens: int | None = None
    verify: str | None = None
    cache_salt: str | None = None  # requests of another salt share no cached prefix
    salt_per_request: bool = False  # the request's index is added to the salt
    model: str | None = None  # None: the first of /v1/models
    request_timeout: float = 600.0  # seconds

"""What a run is asked to do: frozen, checked by `cli`, written into the JSON report whole."""

from __future__ import annotations

from typing import Literal

import msgspec

Endpoint = Literal["chat", "completions"]


Arrivals = Literal["poisson", "constant", "gamma"]


class ClosedLoop(msgspec.Struct, frozen=True, tag="closed", tag_field="kind"):
    """Each of `concurrency` users sends the next request when the last one is answered."""

    concurrency: int
    ramp: float = 0.0  # seconds over which the users join, evenly


class OpenLoop(msgspec.Struct, frozen=True, tag="open", tag_field="kind"):
    """Requests leave at times of their own, however slow the server is."""

    rate: float  # requests/s
    arrivals: Arrivals = "poisson"
    burstiness: float = 1.0  # shape of gamma gaps: 1 is Poisson, less comes in bursts
    ramp: float = 0.0  # seconds in which the rate rises evenly from 0 to `rate`


class TraceReplay(msgspec.Struct, frozen=True, tag="trace", tag_field="kind"):
    """Requests leave at the times recorded in the prompts' file, counted from its first."""

    speed: float = 1.0  # 2: in half the time


Load = ClosedLoop | OpenLoop | TraceReplay


class Synthetic(msgspec.Struct, frozen=True, kw_only=True):
    """Random prompts instead of a file's; lengths as `synthetic` reads them."""

    input_tokens: str  # behind the prefix
    prefix_groups: int = 0  # 0: no prefix
    prefix_tokens: int = 0  # the same for all prompts of a group
    vocab_size: int = 32_000  # token ids of completions lie below


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Upper limits, in seconds, that a good request keeps all of; None: no limit."""

    ttft: float | None = None  # in an open loop from the schedule
    tpot: float | None = None
    e2e: float | None = None  # in an open loop from the schedule


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The API key is no part of it, so that no report can hold one."""

    url: str  # scheme://host:port, without /v1
    endpoint: Endpoint = "chat"
    prompts_file: str | None = None  # None: the shipped pack
    categories: tuple[str, ...] = ()  # (): all
    synthetic: Synthetic | None = None  # instead of a file
    output_tokens: str | None = None  # limits drawn per prompt, as `synthetic` reads lengths
    load: Load = ClosedLoop(1)
    num_requests: int | None = None  # conversations if multi_turn; None, no duration: each once
    duration: float | None = None  # seconds in which requests are started; all are awaited
    warmup: int = 0  # requests before the measured ones, in no number
    multi_turn: bool = False  # send every turn of a prompt, each with the replies before it
    think_time: float = 0.0  # mean seconds between a reply and the next turn, exponential
    slo: Slo | None = None  # goodput is counted where there is one
    max_tokens: int = 128  # where the prompt itself has no limit
    shortest: int | None = None  # limits spread evenly from here to max_tokens; None: all alike
    temperature: float | None = None  # None: the server's default
    seed: int = 0  # of the arrivals; request i samples with seed + i
    ignore_eos: bool = False
    drafter: str | None = None
    max_draft_tokens: int | None = None
    verify: str | None = None
    detailed: bool = False  # ask for each step's counts: guesses, and how many of them were right
    keep_output: bool = False  # records keep text and token ids, for whoever compares them
    cache_salt: str | None = None  # requests of another salt share no cached prefix
    salt_per_request: bool = False  # the request's index is added to the salt
    model: str | None = None  # None: the first of /v1/models
    request_timeout: float = 600.0  # seconds

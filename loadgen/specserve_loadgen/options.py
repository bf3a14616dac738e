"""The options of `specserve loadgen`, and the settings that they make."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from urllib.parse import urlsplit

from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.settings import (
    ClosedLoop,
    Load,
    OpenLoop,
    Settings,
    Slo,
    Synthetic,
    TraceReplay,
)


def number(
    kind: Callable[[str], float], what: str, holds: Callable[[float], bool]
) -> Callable[[str], float]:
    """An argparse type; its errors say the text and what was expected."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
        if not math.isfinite(value) or not holds(value):
            raise argparse.ArgumentTypeError(f"{text} is not {what}")
        return value

    return parse


POSITIVE_INT = number(int, "a whole number of at least 1", lambda value: value >= 1)
NATURAL = number(int, "a whole number of at least 0", lambda value: value >= 0)
POSITIVE = number(float, "a number above 0", lambda value: value > 0)
NOT_NEGATIVE = number(float, "a number of at least 0", lambda value: value >= 0)


def settings_from(options: argparse.Namespace) -> Settings:
    """The checked settings of parsed options. Raises LoadgenError for what contradicts itself."""
    return Settings(
        url=base_url(options.url),
        endpoint=options.endpoint,
        prompts_file=options.prompts,
        categories=tuple(name for name in options.categories.split(",") if name),
        synthetic=_synthetic(options),
        output_tokens=options.output_tokens,
        load=_load(options),
        num_requests=options.num_requests,
        duration=options.duration,
        warmup=options.warmup,
        multi_turn=options.multi_turn,
        think_time=options.think_time,
        slo=parse_slo(options.slo),
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        ignore_eos=options.ignore_eos,
        drafter=options.drafter,
        max_draft_tokens=options.max_draft_tokens,
        verify=options.verify,
        model=options.model,
        request_timeout=options.request_timeout,
    )


def _load(options: argparse.Namespace) -> Load:
    if options.replay is not None:
        if options.prompts is None:
            raise LoadgenError("--replay: give the trace as --prompts FILE")
        return TraceReplay(options.replay)
    if options.rate is None:
        return ClosedLoop(options.concurrency or 1, options.ramp)
    return OpenLoop(options.rate, options.arrivals, options.burstiness, options.ramp)


def _synthetic(options: argparse.Namespace) -> Synthetic | None:
    if options.input_tokens is None:
        if options.prefix_groups or options.prefix_tokens:
            raise LoadgenError("--prefix-groups and --prefix-tokens need --input-tokens")
        return None
    if options.prompts is not None or options.categories:
        raise LoadgenError("--input-tokens makes prompts: leave --prompts and --categories out")
    if bool(options.prefix_groups) != bool(options.prefix_tokens):
        raise LoadgenError("--prefix-groups and --prefix-tokens: give both or neither")
    return Synthetic(
        input_tokens=options.input_tokens,
        prefix_groups=options.prefix_groups,
        prefix_tokens=options.prefix_tokens,
        vocab_size=options.vocab_size,
    )


def parse_slo(text: str) -> Slo | None:
    """`ttft:500,tpot:50` in milliseconds."""
    if not text:
        return None
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition(":")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = math.nan
        if name not in Slo.__struct_fields__ or name in limits or not 0 < milliseconds < math.inf:
            known = ", ".join(Slo.__struct_fields__)
            raise LoadgenError(f"--slo {text}: write NAME:MS,... with each once of {known}")
        limits[name] = milliseconds / 1000
    return Slo(**limits)


def base_url(url: str, flag: str = "--url") -> str:
    """scheme://host:port of an address given with or without a path such as /v1."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise LoadgenError(f"{flag} {url}: not an address such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--endpoint", choices=("chat", "completions"), default="chat")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key", metavar="KEY", help="sent as a bearer token, in no report")


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--prompts",
        metavar="FILE",
        help=".jsonl or .json with prompt, turns (Spec-Bench, EAGLE, MT-bench), conversations "
        "(ShareGPT), messages, or a trace (Mooncake; .csv: BurstGPT, Azure); else one a line",
    )
    group.add_argument("--categories", default="", metavar="A,B", help="only these of the prompts")
    group.add_argument(
        "--multi-turn", action="store_true", help="send all turns, each with the replies before it"
    )
    group.add_argument(
        "--think-time",
        type=NOT_NEGATIVE,
        default=0.0,
        metavar="S",
        help="mean seconds (exponential) between a reply and the next turn",
    )
    group.add_argument(
        "--input-tokens",
        metavar="LENGTH",
        help="random prompts instead: N, uniform:LOW:HIGH, normal:MEAN:SD, "
        "lognormal:MEDIAN:SIGMA or exponential:MEAN tokens (exact with --endpoint completions)",
    )
    group.add_argument(
        "--output-tokens", metavar="LENGTH", help="a limit per prompt, drawn likewise"
    )
    group.add_argument(
        "--prefix-groups", type=NATURAL, default=0, metavar="G", help="random prompts in G groups"
    )
    group.add_argument(
        "--prefix-tokens", type=NATURAL, default=0, metavar="N", help="that share a beginning of N"
    )
    group.add_argument(
        "--vocab-size", type=POSITIVE_INT, default=32_000, help="of random ids; default 32000"
    )


def add_load_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    pace = group.add_mutually_exclusive_group()
    pace.add_argument(
        "--concurrency", type=POSITIVE_INT, metavar="N", help="closed loop of N users; default 1"
    )
    pace.add_argument("--rate", type=POSITIVE, metavar="R", help="open loop of R requests/s")
    pace.add_argument(
        "--replay",
        type=POSITIVE,
        nargs="?",
        const=1.0,
        metavar="SPEED",
        help="at the times of the trace in --prompts, SPEED times as fast; default 1",
    )
    pace.add_argument(
        "--sweep",
        type=POSITIVE_INT,
        nargs="?",
        const=256,
        metavar="MOST",
        help="closed loops of 1, 2, 4, ... users, MOST at most (256), until more users bring less "
        "than 5 %% more tokens/s; the length below is each level's",
    )
    group.add_argument(
        "--arrivals",
        choices=("poisson", "constant", "gamma"),
        default="poisson",
        help="gaps of an open loop; default: %(default)s",
    )
    group.add_argument(
        "--burstiness",
        type=POSITIVE,
        default=1.0,
        metavar="B",
        help="shape of gamma gaps: 1 is Poisson, 0.2 comes in bursts",
    )
    group.add_argument(
        "--ramp", type=NOT_NEGATIVE, default=0.0, metavar="S", help="seconds to reach the full load"
    )
    _add_length_options(group)


def _add_length_options(group: argparse._ArgumentGroup) -> None:
    length = group.add_mutually_exclusive_group()
    length.add_argument(
        "--num-requests",
        type=POSITIVE_INT,
        metavar="N",
        help="(conversations with --multi-turn) default: each prompt once",
    )
    length.add_argument(
        "--duration", type=POSITIVE, metavar="S", help="start requests for S seconds, await all"
    )
    group.add_argument(
        "--warmup", type=NATURAL, default=0, metavar="N", help="requests before, in no number"
    )
    group.add_argument(
        "--request-timeout", type=POSITIVE, default=600.0, metavar="S", help="default: 600"
    )
    group.add_argument(
        "--slo",
        default="",
        metavar="NAME:MS,...",
        help="limits of a good request, as ttft:500,tpot:50,e2e:4000: goodput is counted",
    )


def add_request_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--max-tokens", type=POSITIVE_INT, default=128, metavar="N")
    group.add_argument("--temperature", type=NOT_NEGATIVE, metavar="T")
    group.add_argument(
        "--seed", type=NATURAL, default=0, metavar="S", help="of the arrivals; request i has S+i"
    )
    group.add_argument("--ignore-eos", action="store_true")
    group.add_argument("--drafter", metavar="D", help="sent as speculation.drafter")
    group.add_argument("--max-draft-tokens", type=NATURAL, metavar="K")
    group.add_argument("--verify", metavar="V", help="replay, block, rejection or typical")

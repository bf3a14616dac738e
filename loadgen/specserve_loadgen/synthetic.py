"""Prompts of a wanted length and no meaning: what is measured is the engine, not the text.

Random text has no pattern to guess from, so acceptance on it says nothing of real use. A prompt
is made twice: as words for chat, of about one token each, and as token ids for completions, where
its length is exact. What the server counted is in the report, whichever was sent.

Lengths, as --input-tokens and --output-tokens take them, are whole numbers of at least 1:

    512  uniform:100:900  normal:512:128  lognormal:512:0.8 (median, sigma)  exponential:512
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import isfinite, log

import msgspec

from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.prompt import Message, Prompt
from specserve_loadgen.settings import Synthetic
from specserve_loadgen.words import WORDS

FIRST_ID = 1000  # below it lie special tokens and single bytes, in every vocabulary we know
MOST_TOKENS = 1_000_000
LENGTHS = ("N", "uniform:LOW:HIGH", "normal:MEAN:SD", "lognormal:MEDIAN:SIGMA", "exponential:MEAN")
_DRAWS: dict[str, tuple[int, Callable[..., float]]] = {
    "constant": (1, lambda rng, value: value),
    "uniform": (2, lambda rng, low, high: rng.uniform(low - 0.5, high + 0.5)),
    "normal": (2, lambda rng, mean, deviation: rng.gauss(mean, deviation)),
    "lognormal": (2, lambda rng, median, sigma: rng.lognormvariate(log(median), sigma)),
    "exponential": (1, lambda rng, mean: rng.expovariate(1 / mean)),
}


def parse_lengths(flag: str, text: str) -> Callable[[random.Random], int]:
    """A draw of lengths from its description. Raises LoadgenError naming flag and form."""
    kind, *parts = text.split(":") if ":" in text else ("constant", text)
    num_parameters, draw = _DRAWS.get(kind, (0, None))
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    first_is_good = bool(numbers) and 1 <= numbers[0] <= MOST_TOKENS
    sound = first_is_good and all(isfinite(n) and 0 <= n <= MOST_TOKENS for n in numbers)
    if draw is None or len(numbers) != num_parameters or not sound:
        raise LoadgenError(f"{flag} {text}: write one of {', '.join(LENGTHS)}, from 1 token on")
    if kind == "uniform" and numbers[1] < numbers[0]:
        raise LoadgenError(f"{flag} {text}: its highest length is below its lowest")
    known_draw = draw
    return lambda rng: min(MOST_TOKENS, max(1, round(known_draw(rng, *numbers))))


def synthetic_prompts(wanted: Synthetic, count: int, seed: int) -> list[Prompt]:
    """`count` prompts, different from each other behind the prefix of their group."""
    rng = random.Random(f"{seed}/synthetic")
    length = parse_lengths("--input-tokens", wanted.input_tokens)
    prefixes = [
        random_text(
            random.Random(f"{seed}/prefix/{group}"), wanted.prefix_tokens, wanted.vocab_size
        )
        for group in range(wanted.prefix_groups)
    ]
    prompts = []
    for idx in range(count):
        parts = [random_text(rng, length(rng), wanted.vocab_size)]
        group = idx % len(prefixes) if prefixes else None
        if group is not None:
            parts.insert(0, prefixes[group])
        prompts.append(joined(parts, f"{idx}", "synthetic" if group is None else f"prefix {group}"))
    return prompts


class RandomText(msgspec.Struct, frozen=True):
    words: Sequence[str]
    token_ids: Sequence[int]


def random_text(rng: random.Random, num_tokens: int, vocab_size: int) -> RandomText:
    ids = range(min(FIRST_ID, vocab_size - 1), vocab_size)
    return RandomText(rng.choices(WORDS, k=num_tokens), rng.choices(ids, k=num_tokens))


def joined(parts: Sequence[RandomText], prompt_id: str, category: str) -> Prompt:
    """One prompt of texts in a row."""
    words = " ".join(word for part in parts for word in part.words)
    return Prompt(
        prompt_id=prompt_id,
        category=category,
        messages=(Message("user", words),),
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
    )


def with_output_lengths(prompts: Sequence[Prompt], lengths: str, seed: int) -> list[Prompt]:
    """The prompts with limits of their own, drawn from a description of lengths."""
    rng = random.Random(f"{seed}/output")
    length = parse_lengths("--output-tokens", lengths)
    return [msgspec.structs.replace(prompt, max_tokens=length(rng)) for prompt in prompts]

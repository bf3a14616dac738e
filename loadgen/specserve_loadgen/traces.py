"""Recorded traffic: when a request came, how long it was, how much was answered; not its text.

Mooncake   JSON lines of timestamp (ms), input_length, output_length and, maybe, hash_ids: one per
           512 tokens of the prompt, equal where two prompts begin alike
BurstGPT   CSV with Timestamp (s), Request tokens, Response tokens
Azure      CSV with TIMESTAMP (a date), ContextTokens, GeneratedTokens

Texts are made of random words of that length; equal hash ids give equal words. Times count from
the file's first.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Sequence
from datetime import datetime

import msgspec

from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.prompt import Prompt
from specserve_loadgen.synthetic import MOST_TOKENS, RandomText, joined, random_text

BLOCK_TOKENS = 512  # of one hash id
VOCAB_SIZE = 32_000
COLUMNS = {  # of a CSV file: time, prompt tokens, output tokens
    "BurstGPT": ("Timestamp", "Request tokens", "Response tokens"),
    "Azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
}


class TraceLine(msgspec.Struct, frozen=True):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def is_csv_trace(text: str) -> bool:
    return _columns(text) is not None


def trace_prompts(lines: Sequence[TraceLine]) -> list[Prompt]:
    """Prompts of the recorded lengths, with their arrival, in order of time."""
    return in_order_of_time(
        msgspec.structs.replace(
            joined(_blocks(line, idx), f"{idx}", "trace"),
            max_tokens=max(1, line.output_length),
            arrival=line.timestamp / 1000,
        )
        for idx, line in enumerate(lines, start=1)
    )


def in_order_of_time(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Where every prompt has a time: by time, counted from the first. Otherwise as they are."""
    known = list(prompts)
    times = [prompt.arrival for prompt in known if prompt.arrival is not None]
    if not times or len(times) < len(known):
        return known
    first = min(times)
    moved = [
        msgspec.structs.replace(prompt, arrival=seconds - first)
        for prompt, seconds in zip(known, times, strict=True)
    ]
    return sorted(moved, key=lambda prompt: prompt.arrival or 0.0)


def check(line: TraceLine, where: str) -> TraceLine:
    """The line itself. Raises LoadgenError for a length that no prompt can have."""
    if not 1 <= line.input_length <= MOST_TOKENS:
        raise LoadgenError(
            f"{where}: input_length is {line.input_length}, not from 1 to {MOST_TOKENS}"
        )
    return line


def _blocks(line: TraceLine, idx: int) -> list[RandomText]:
    """A prompt's text: what has a hash id comes from it alone, the rest from the line's place."""
    blocks = []
    left = line.input_length
    for hash_id in line.hash_ids:
        blocks.append(_text(f"hash/{hash_id}", min(left, BLOCK_TOKENS)))
        left -= min(left, BLOCK_TOKENS)
    return [*blocks, _text(f"line/{idx}", left)]


def _text(seed: str, num_tokens: int) -> RandomText:
    return random_text(random.Random(seed), num_tokens, VOCAB_SIZE)


def parse_csv_trace(text: str, name: str) -> list[TraceLine]:
    columns = _columns(text)
    if columns is None:
        raise LoadgenError(f"--prompts {name}: its first line names no known columns")
    lines = []
    for idx, row in enumerate(csv.DictReader(text.splitlines()), start=2):
        where = f"--prompts {name}, line {idx}"
        try:
            when, asked, answered = (row[column] for column in columns)
            line = TraceLine(_milliseconds(when), int(float(asked)), int(float(answered)))
        except (ValueError, TypeError) as error:
            raise LoadgenError(f"{where}: {error}") from None
        lines.append(check(line, where))
    return lines


def _columns(text: str) -> tuple[str, str, str] | None:
    names = [name.strip() for name in text.partition("\n")[0].split(",")]
    return next((known for known in COLUMNS.values() if set(known) <= set(names)), None)


def _milliseconds(text: str) -> float:
    try:
        return float(text) * 1000
    except ValueError:
        # Seven digits of a second in Azure's files; datetime reads six.
        head, _, fraction = text.partition(".")
        return (
            datetime.fromisoformat(f"{head}.{fraction[:6]}" if fraction else head).timestamp()
            * 1000
        )

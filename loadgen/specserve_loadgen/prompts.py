"""Prompts: from the shipped pack, or from a file whose format is told by its content.

Lines of JSON (.jsonl), or one JSON list (.json), of objects that hold their prompt as

    prompt                           one text
    turns                            Spec-Bench, EAGLE, MT-bench: several texts of one person
    conversations                    ShareGPT: from and value; what people said is sent
    messages                         as in a chat request, sent whole
    timestamp, input_length, ...     a trace (`traces`), also as .csv; its times can be replayed

`category`, `id` (or `question_id`) and `max_tokens` are kept where there are such. Any other file
is text, a prompt a line. Later turns are sent with --multi-turn only.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import msgspec

from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.prompt import Message, Prompt
from specserve_loadgen.traces import (
    TraceLine,
    check,
    in_order_of_time,
    is_csv_trace,
    parse_csv_trace,
    trace_prompts,
)

__all__ = ["Message", "Prompt", "load_prompts"]

PROMPT_KEYS = ("prompt", "turns", "conversations", "messages", "timestamp")
PEOPLE = ("human", "user")  # of ShareGPT's `from`


class _Said(msgspec.Struct, frozen=True):
    value: str
    speaker: str = msgspec.field(name="from")


class _Line(msgspec.Struct, frozen=True):
    prompt: str | None = None
    turns: list[str] | None = None
    messages: list[Message] | None = None
    conversations: list[_Said] | None = None
    timestamp: float | None = None
    max_tokens: int | None = None
    category: str | None = None
    id: str | int | None = None
    question_id: str | int | None = None


def load_prompts(path: str | None, categories: Sequence[str] = ()) -> list[Prompt]:
    """The prompts of a file (None: the shipped pack), restricted to `categories` if any are named.

    Categories are interleaved, so that a short run covers all of them and a long one meets them
    evenly in time. Raises LoadgenError naming file, line and what was expected.
    """
    if path is None:
        name = "the shipped prompt pack"
        text = (files("specserve_loadgen") / "data" / "prompts.jsonl").read_text(encoding="utf-8")
        prompts = _parse_jsonl(text, name)
    else:
        name = path
        prompts = _parse_file(Path(path), _read(path))
    if not prompts:
        raise LoadgenError(f"--prompts {name} holds no prompts")
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    if unknown := [category for category in categories if category not in known]:
        raise LoadgenError(
            f"--categories {','.join(unknown)}: not in {name}, which has {', '.join(known)}"
        )
    chosen = [p for p in prompts if not categories or p.category in categories]
    return _interleave(chosen)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise LoadgenError(f"--prompts {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise LoadgenError(f"--prompts {path}: not UTF-8 at byte {error.start}") from None


def _parse_file(path: Path, text: str) -> list[Prompt]:
    if path.suffix == ".csv" and is_csv_trace(text):
        return trace_prompts(parse_csv_trace(text, str(path)))
    if path.suffix == ".json" and text.lstrip().startswith("["):
        return _parse_list(text, str(path))
    if path.suffix in (".jsonl", ".json", ".ndjson"):
        return _parse_jsonl(text, str(path))
    return _parse_text(text)


def _parse_text(text: str) -> list[Prompt]:
    lines = [(idx, line) for idx, line in enumerate(text.split("\n"), start=1) if line.strip()]
    return [
        Prompt(prompt_id=str(idx), category="text", messages=(Message("user", line.strip()),))
        for idx, line in lines
    ]


def _parse_jsonl(text: str, name: str) -> list[Prompt]:
    # Not splitlines(): U+2028 and its like may stand unescaped inside a JSON string.
    lines = [(idx, line) for idx, line in enumerate(text.split("\n"), start=1) if line.strip()]
    return _parse_objects([(f"line {idx}", idx, line.encode()) for idx, line in lines], name)


def _parse_list(text: str, name: str) -> list[Prompt]:
    try:
        entries = msgspec.json.decode(text, type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        raise LoadgenError(f"--prompts {name}: {error}") from None
    objects = [(f"entry {idx}", idx, bytes(raw)) for idx, raw in enumerate(entries, start=1)]
    return _parse_objects(objects, name)


def _parse_objects(objects: Sequence[tuple[str, int, bytes]], name: str) -> list[Prompt]:
    """objects: of each its place for a person, its index, its JSON."""
    prompts = []
    trace: list[TraceLine] = []
    for place, idx, text in objects:
        where = f"--prompts {name}, {place}"
        found = _parse_object(text, idx, where)
        if isinstance(found, TraceLine):
            trace.append(found)
        else:
            prompts.append(found)
    if trace and prompts:
        raise LoadgenError(f"--prompts {name}: holds prompts and lines of a trace: part them")
    return trace_prompts(trace) if trace else in_order_of_time(prompts)


def _parse_object(text: bytes, idx: int, where: str) -> Prompt | TraceLine:
    try:
        line = msgspec.json.decode(text, type=_Line)
        said = _turns(line)
        if said is None and line.timestamp is not None:
            return check(msgspec.json.decode(text, type=TraceLine), where)
    except (msgspec.DecodeError, RecursionError) as error:
        raise LoadgenError(f"{where}: {error}") from None
    if said is None:
        keys = ", ".join(msgspec.json.decode(text, type=dict[str, msgspec.Raw])) or "none"
        raise LoadgenError(f"{where}: needs one of {', '.join(PROMPT_KEYS)}; its keys are {keys}")
    messages, later_turns = said
    prompt_id = next((i for i in (line.id, line.question_id) if i is not None), idx)
    return Prompt(
        prompt_id=str(prompt_id),
        category=line.category or "uncategorised",
        messages=messages,
        later_turns=later_turns,
        max_tokens=line.max_tokens,
        arrival=None if line.timestamp is None else line.timestamp / 1000,
    )


def _turns(line: _Line) -> tuple[tuple[Message, ...], tuple[str, ...]] | None:
    """What is sent first, and what after each reply; None where the line has no prompt."""
    said = [line.prompt] if line.prompt is not None else line.turns
    if said is None and line.conversations is not None:
        said = [part.value for part in line.conversations if part.speaker in PEOPLE]
    if said:
        return (Message("user", said[0]),), tuple(said[1:])
    return (tuple(line.messages), ()) if line.messages else None


def _interleave(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Round robin over the categories, in their order of appearance; a trace as it came."""
    if all(prompt.arrival is not None for prompt in prompts):
        return list(prompts)
    seen: dict[str, int] = {}
    ranked = []
    for prompt in prompts:
        rank = seen.get(prompt.category, 0)
        seen[prompt.category] = rank + 1
        ranked.append((rank, list(seen).index(prompt.category), prompt))
    return [prompt for _, _, prompt in sorted(ranked, key=lambda entry: entry[:2])]

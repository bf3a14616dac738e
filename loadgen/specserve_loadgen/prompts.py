"""Prompts: from the shipped pack, from a JSONL file, or one a line from a text file.

A JSONL object holds its prompt as `prompt`, as `turns` (the first one is sent: Spec-Bench, EAGLE)
or as `messages`; `category` and `id` (or `question_id`) are kept for the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import msgspec

from specserve_loadgen.errors import LoadgenError

PROMPT_KEYS = ("prompt", "turns", "messages")


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    prompt_id: str
    category: str
    messages: tuple[Message, ...]  # at least one


class _Line(msgspec.Struct, frozen=True):
    prompt: str | None = None
    turns: list[str] | None = None
    messages: list[Message] | None = None
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
        text = _read(path)
        jsonl = Path(path).suffix in (".jsonl", ".json", ".ndjson")
        prompts = _parse_jsonl(text, name) if jsonl else _parse_text(text)
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


def _parse_text(text: str) -> list[Prompt]:
    lines = [(idx, line) for idx, line in enumerate(text.split("\n"), start=1) if line.strip()]
    return [
        Prompt(prompt_id=str(idx), category="text", messages=(Message("user", line.strip()),))
        for idx, line in lines
    ]


def _parse_jsonl(text: str, name: str) -> list[Prompt]:
    # Not splitlines(): U+2028 and its like may stand unescaped inside a JSON string.
    lines = [(idx, line) for idx, line in enumerate(text.split("\n"), start=1) if line.strip()]
    return [_parse_line(line, idx, name) for idx, line in lines]


def _parse_line(text: str, line_idx: int, name: str) -> Prompt:
    where = f"--prompts {name}, line {line_idx}"
    try:
        line = msgspec.json.decode(text, type=_Line)
    except (msgspec.DecodeError, RecursionError) as error:
        raise LoadgenError(f"{where}: {error}") from None
    if line.prompt is not None:
        messages: tuple[Message, ...] = (Message("user", line.prompt),)
    elif line.turns:
        messages = (Message("user", line.turns[0]),)
    elif line.messages:
        messages = tuple(line.messages)
    else:
        keys = ", ".join(msgspec.json.decode(text, type=dict[str, msgspec.Raw])) or "none"
        raise LoadgenError(f"{where}: needs one of {', '.join(PROMPT_KEYS)}; its keys are {keys}")
    prompt_id = next((i for i in (line.id, line.question_id) if i is not None), line_idx)
    return Prompt(
        prompt_id=str(prompt_id), category=line.category or "uncategorised", messages=messages
    )


def _interleave(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Round robin over the categories, in their order of appearance."""
    seen: dict[str, int] = {}
    ranked = []
    for prompt in prompts:
        rank = seen.get(prompt.category, 0)
        seen[prompt.category] = rank + 1
        ranked.append((rank, list(seen).index(prompt.category), prompt))
    return [prompt for _, _, prompt in sorted(ranked, key=lambda entry: entry[:2])]

"""What the parity matrix asks for, and its table in specserve/README.md, written from here.

`python -m tests.parity_cases` writes the table anew; test_speculation_parity.py makes every cell
true. A case is a few fields beside those of another case, whose reply they may be made from: a
stop string must be one that comes, a banned token one that would.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final  # Any: JSON

import msgspec

from tests.grammar_world import bpe_tokenizer
from tests.test_server_forced_calls import BOOK, NAMED
from tests.test_server_tools import CLOCK

README: Final = Path(__file__).parent.parent / "specserve" / "README.md"
BEGINS, ENDS = "<!-- parity: python -m tests.parity_cases -->", "<!-- /parity -->"

# What speculation is asked for, by column of the table.
COLUMNS: Final[dict[str, dict[str, object]]] = {
    "ngram": {"drafter": "ngram", "max_draft_tokens": 4},
    "suffix": {"drafter": "suffix", "max_draft_tokens": 4},
    "suffix tree": {"drafter": "suffix", "max_draft_tokens": 6, "draft_width": 2},
    "grammar": {"drafter": "grammar", "max_draft_tokens": 4},
    "draft_model": {"drafter": "draft_model", "max_draft_tokens": 3},
    "draft_model tree": {"drafter": "draft_model", "max_draft_tokens": 6, "draft_width": 2},
    "pard": {"drafter": "pard", "max_draft_tokens": 4},
    "eagle3": {"drafter": "eagle3", "max_draft_tokens": 3},
    "eagle3 tree": {"drafter": "eagle3", "max_draft_tokens": 6, "draft_width": 2},
    "medusa tree": {"drafter": "medusa", "max_draft_tokens": 6, "draft_width": 2},
    "mlp": {"drafter": "mlp_speculator", "max_draft_tokens": 3},
    "oracle": {"drafter": "oracle", "max_draft_tokens": 4},
    "oracle tree": {"drafter": "tree", "max_draft_tokens": 6},
    "anti": {"drafter": "anti", "max_draft_tokens": 3},
    "auto": {"drafter": "auto"},
}
FREE: Final = frozenset({"grammar"})  # it guesses only where a grammar leaves no choice


class Said(msgspec.Struct, frozen=True):
    """A case's first text without speculation."""

    text: str
    token_ids: list[int]


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """base:    the case whose fields it has, too; None: it is one of the first
    fields:  beside those, made from the base's reply
    refused: the field that a 400 names; None: it is served
    quiet:   columns without guesses
    """

    base: str | None
    fields: Callable[[Said], dict[str, Any]]
    path: str = ""  # of one of the first
    refused: str | None = None
    quiet: frozenset[str] = FREE


def plus(base: str, refused: str | None = None, **fields: Any) -> Case:
    return Case(base=base, fields=lambda said: fields, refused=refused)


def made(base: str, fields: Callable[[Said], dict[str, Any]], **how: Any) -> Case:
    return Case(base=base, fields=fields, **how)


def quiet(case: Case, *columns: str) -> Case:
    return msgspec.structs.replace(case, quiet=case.quiet | set(columns))


def first(path: str, **fields: Any) -> Case:
    return Case(base=None, fields=lambda said: fields, path=path)


PROMPT = "yes, no, abc bcd. yes, no, the treehouse is not yet a shrub. yes, no,"
MESSAGES = [{"role": "user", "content": PROMPT}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "sure": {"type": "boolean"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["tree", "treehouse", "shrub"]},
    },
    "required": ["sure", "age", "kind"],
    "additionalProperties": False,
}
# Of which random weights would put out as much as a grammar allows.
NO_WHITE_SPACE = {str(bpe_tokenizer().encode(text)[0]): -9.0 for text in " \t\n\r"}
TEXT = {"temperature": 0.8, "seed": 7, "max_tokens": 14}
OTHER = {**TEXT, "seed": 12}
BOUND = {**TEXT, "max_tokens": 32}
REGEX = r"(yes|no|not yet)( [a-e]{1,4}){3,6}\."
WORDS = ["the treehouse is a tree", "the treehouse is a shrub", "a shrub is no treehouse"]


def json_schema(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def middle(said: Said) -> str:
    """Text that comes, and not at once; whole characters."""
    return said.text[len(said.text) // 2 :][:2]


def biased(said: Said) -> dict[str, float]:
    return {str(token_id): -6.0 for token_id in said.token_ids[::3]} | {"97": 4.0}


def all_but(said: Said, every: int) -> list[int]:
    """Ids of a vocabulary without some that come."""
    return [idx for idx in range(384) if idx not in said.token_ids[1::every]]


def guessed_by_grammar(cases: dict[str, Case]) -> dict[str, Case]:
    return {
        name: msgspec.structs.replace(case, quiet=case.quiet - FREE) for name, case in cases.items()
    }


def short(said: Said) -> list[int]:
    """Ids without EOS and the longer tokens that come: their text can be spelt otherwise."""
    spelt = bpe_tokenizer().token_text
    return [idx for idx in range(1, 384) if idx not in said.token_ids or len(spelt(idx)) == 1]


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ROOTS: Final[dict[str, Case]] = {
    "completions": first(COMPLETIONS, prompt=PROMPT, return_token_ids=True, **TEXT),
    "chat": first(CHAT, messages=MESSAGES, return_token_ids=True, **OTHER),
    "/v1/responses": first(
        "/v1/responses", input=PROMPT, max_output_tokens=14, temperature=0.8, seed=12
    ),
    "/v1/responses: logprobs": first(
        "/v1/responses", input=PROMPT, max_output_tokens=14, temperature=0.8, seed=12,
        include=["message.output_text.logprobs"], top_logprobs=2,
    ),
    "/v1/messages": first("/v1/messages", messages=MESSAGES, **OTHER),
    **guessed_by_grammar({
    "regex": first(
        COMPLETIONS, prompt=PROMPT, return_token_ids=True, structured_outputs={"regex": REGEX},
        **BOUND,
    ),
    "json_schema": first(
        CHAT, messages=MESSAGES, return_token_ids=True, response_format=json_schema(SCHEMA),
        logit_bias=NO_WHITE_SPACE,
        **BOUND,
    ),
    }),
}  # fmt: skip

# Sampling, endings and prompts, by name, of a text that may be anything.
PARAMETERS: Final[dict[str, Case]] = {
    "temperature 0": plus("completions", temperature=0),
    "temperature 2": quiet(plus("completions", temperature=2), "ngram"),
    "top_k": plus("completions", top_k=3),
    "top_p": quiet(plus("completions", top_p=0.4), "ngram"),
    "min_p": plus("completions", min_p=0.3),
    "top_k, top_p and min_p": quiet(
        plus("completions", temperature=1.5, top_k=40, top_p=0.9, min_p=0.02), "ngram"
    ),
    "seed": plus("completions", seed=-8),
    "presence_penalty": plus("completions", presence_penalty=1.9),
    "frequency_penalty": plus("completions", frequency_penalty=1.9),
    "repetition_penalty": quiet(plus("completions", repetition_penalty=1.8), "ngram"),
    "all penalties": plus(
        "completions", presence_penalty=-1, frequency_penalty=0.8, repetition_penalty=1.2
    ),
    "logit_bias": quiet(
        made("completions", lambda said: {"logit_bias": biased(said)}), "ngram"
    ),
    "bad_words": made("completions", lambda said: {"bad_words": [middle(said), said.text[1:4]]}),
    "allowed_token_ids": made("completions", lambda said: {"allowed_token_ids": all_but(said, 4)}),
    "stop": made("completions", lambda said: {"stop": [middle(said), "\x00"]}),
    "stop_token_ids": made("completions", lambda said: {"stop_token_ids": said.token_ids[9:10]}),
    "include_stop_str_in_output": made(
        "stop", lambda said: {"include_stop_str_in_output": True}
    ),
    "EOS": quiet(plus("completions", logit_bias={"0": 8.0}), "ngram"),
    "ignore_eos": plus("EOS", ignore_eos=True),
    "min_tokens": plus("EOS", min_tokens=9),
    "min_tokens with stop": made("stop", lambda said: {"min_tokens": 12}),
    "max_tokens 1": quiet(plus("completions", max_tokens=1), *COLUMNS),
    "truncate_prompt_tokens": plus("completions", truncate_prompt_tokens=9),
    "logprobs": plus("completions", logprobs=3),
    "logprobs with penalties": plus("all penalties", logprobs=0),
    "prompt_logprobs": plus("completions", prompt_logprobs=2),
    "echo": plus("completions", echo=True),
    "echo with logprobs": plus("completions", echo=True, logprobs=2),
    "echo of the prompt alone": quiet(
        plus("completions", echo=True, logprobs=2, max_tokens=0), *COLUMNS
    ),
    "n": plus("completions", n=3),
    "best_of": plus("completions", n=2, best_of=3),
    "several prompts": plus("completions", prompt=["yes, no,", "abc bcd. abc"], n=2),
    "chat: n with logprobs": plus("chat", n=2, logprobs=True, top_logprobs=2),
    "chat: prompt_logprobs": plus("chat", prompt_logprobs=1),
    "chat: continue_final_message": plus(
        "chat", messages=[*MESSAGES, {"role": "assistant", "content": "the tree"}],
        continue_final_message=True, add_generation_prompt=False,
    ),
    "chat: echo": plus("chat: continue_final_message", echo=True),
    "chat: prediction": plus("chat", n=2, prediction={"type": "content", "content": PROMPT}),
    # Its strings may hold anything, so that hardly any text must come.
    "json_object": plus(
        "chat", response_format={"type": "json_object"}, logit_bias=NO_WHITE_SPACE, seed=7,
        max_tokens=32,
    ),
    "tools, auto": plus("chat", tools=[CLOCK, BOOK], logit_bias=NO_WHITE_SPACE),
}  # fmt: skip

# What a text must look like, and beside it every parameter once more.
GRAMMARS: Final[dict[str, Case]] = guessed_by_grammar({
    "json, compact": plus(
        "chat", structured_outputs={"json": SCHEMA, "disable_any_whitespace": True}, max_tokens=40
    ),
    "choice": quiet(
        plus("completions", structured_outputs={"choice": WORDS}, max_tokens=40), "anti"
    ),
    "lark": plus(
        "completions", structured_outputs={"grammar": 'start: ("a" | "bc" start) "d"'},
        max_tokens=40,
    ),
    "GBNF": plus(
        "completions", structured_outputs={"grammar": 'root ::= ("a" | "bc" root) "d"\n'},
        max_tokens=40,
    ),
    "tools, required": plus("tools, auto", tool_choice="required", max_tokens=60),
    "tools, named": plus("tools, auto", tool_choice=NAMED, max_tokens=60),
    "tools, named, n": plus("tools, named", n=2, logprobs=True),
    "regex: temperature 0": plus("regex", temperature=0),
    "regex: temperature 2": plus("regex", temperature=2),
    "regex: top_k, top_p and min_p": plus("regex", top_k=200, top_p=0.5, min_p=0.1),
    "regex: penalties": plus("regex", presence_penalty=1.5, frequency_penalty=1.5),
    "regex: repetition_penalty": plus("regex", repetition_penalty=1.8),
    "regex: logit_bias": made("regex", lambda said: {"logit_bias": biased(said)}),
    "regex: bad_words": made("regex", lambda said: {"bad_words": [said.text[3:6]]}),
    "regex: allowed_token_ids": made(
        "regex", lambda said: {"allowed_token_ids": short(said)}
    ),
    "regex: stop": made("regex", lambda said: {"stop": [middle(said)]}),
    "regex: include_stop_str_in_output": plus("regex: stop", include_stop_str_in_output=True),
    "regex: stop_token_ids": made("regex", lambda said: {"stop_token_ids": said.token_ids[5:6]}),
    "regex: seed": plus("regex", seed=2**62),
    "regex: truncate_prompt_tokens": plus("regex", truncate_prompt_tokens=9),
    "regex: logprobs": plus("regex", logprobs=3),
    "regex: prompt_logprobs": plus("regex", prompt_logprobs=2),
    "regex: echo with logprobs": plus("regex", echo=True, logprobs=0),
    "regex: n": plus("regex", n=3),
    "regex: best_of": plus("regex", n=1, best_of=3, seed=8),
    "regex: max_tokens": quiet(plus("regex", max_tokens=6), "ngram"),
    "json_schema: penalties": plus("json_schema", repetition_penalty=1.5, presence_penalty=1),
    "json_schema: n with logprobs": plus("json_schema", n=2, logprobs=True, top_logprobs=3),
    "json_schema: temperature 2": plus("json_schema", temperature=2, top_p=0.9),
})  # fmt: skip

REFUSED: Final[dict[str, Case]] = {
    "regex: ignore_eos": plus("regex", refused="ignore_eos", ignore_eos=True),
    "regex: min_tokens": plus("regex", refused="min_tokens", min_tokens=3),
    "json_schema: tools, auto": plus(
        "json_schema", refused="response_format.json_schema", tools=[CLOCK]
    ),
    "prompt_logprobs in a stream": plus(
        "completions", refused="prompt_logprobs", prompt_logprobs=1, stream=True
    ),
    "best_of in a stream": plus("completions", refused="best_of", best_of=2, stream=True),
}  # fmt: skip

CASES: Final = {**ROOTS, **PARAMETERS, **GRAMMARS, **REFUSED}


def outcome(case: Case, column: str) -> str:
    """A cell of the table."""
    if case.refused is not None:
        return "400"
    return "–" if column in case.quiet else "="


def table() -> str:
    """Cases with the same outcomes share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, case in CASES.items():
        cells = tuple(outcome(case, column) for column in COLUMNS)
        rows.setdefault(cells, []).append(name)
    lines = [f"| asked for | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    lines += [f"| {'; '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items()]
    return "\n".join(lines)


def printed(text: str) -> tuple[int, int]:
    """Where the table stands in the README."""
    return text.index(BEGINS) + len(BEGINS) + 1, text.index(ENDS) - 1


def main() -> None:
    text = README.read_text()
    start, end = printed(text)
    README.write_text(text[:start] + table() + text[end:])


def root_of(name: str) -> str:
    case = CASES[name]
    return name if case.base is None else root_of(case.base)


if __name__ == "__main__":
    main()

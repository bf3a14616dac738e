"""Prompts that the target asks itself: what it says where its chat template has a person speak.

Magpie (Xu et al. 2024, arXiv 2406.08464). An instruction-tuned model has learned what it is asked,
too; its own questions are as varied as what it was tuned on, which words and templates of ours are
not. Behind a system message that names a task it says what people hand in for that task, such as
the article to be summarised: so a draft meets long prompts and answers that follow them, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final, NamedTuple

from specserve.chat_template import render_chat
from specserve.errors import ModelError
from specserve.tokenizer import Tokenizer
from specserve.types import SamplingParams

_ROUND = 128
_MOST_TRIES = 20  # of those asked for, before the model is given up


class Said(NamedTuple):
    text: str
    has_ended: bool  # by itself


# (prompts as ids, one SamplingParams each) -> what the target said
Ask = Callable[[Seq[Seq[int]], Seq[SamplingParams]], Seq[Said]]


class Role(NamedTuple):
    """Who speaks, and what becomes of it.

    system:    the system message behind which the target speaks as a person; "": none
    weight:    prompts of this role per turn of all roles
    longest:   tokens
    tasks:     a prompt is one of these, `{}` being what was said
    is_text:   what was said is a text to be worked on: one that did not end counts, too, up to its
               last whole sentence; a question that did not end is left out
    """

    category: str
    system: str
    weight: int
    longest: int
    tasks: tuple[str, ...] = ("{}",)
    is_text: bool = False


_SUMMARISER = (
    "Provide a concise, objective summary of the input text in up to three sentences, focusing on "
    "key actions and intentions without using second or third person pronouns."
)
_EDITOR = (
    "You're an AI assistant for text re-writing. Rewrite the input text to make it more concise "
    "while preserving its core meaning."
)
ROLES: Final = (
    Role("chat", "", 8, 160),
    Role("code", "You are a programming assistant.", 1, 160),
    Role("write", "You are an assistant for creative writing and roleplay.", 1, 160),
    Role(
        "summarise",
        _SUMMARISER,
        3,
        320,
        ("Summarize: {}", "Summarize the following text:\n\n{}", "{}\n\nSummarize this."),
        is_text=True,
    ),
    Role(
        "answer",
        _SUMMARISER,
        2,
        320,
        (
            "{}\n\nWhat is this about?",
            "Answer by the passage. What happened, and why?\n\nPassage: {}",
            "Read this and tell me who is named in it and what each of them does.\n\n{}",
            "Context: {}\n\nQuestion: What is the most important point?\nAnswer:",
        ),
        is_text=True,
    ),
    Role(
        "edit",
        _EDITOR,
        1,
        240,
        ("Rewrite this more concisely:\n\n{}", "Make this text friendlier: {}"),
        is_text=True,
    ),
    Role(
        "translate",
        "You are a translator. You translate German into English.",
        2,
        60,
        ("Translate German to English: {}", "Translate into English: {}"),
        is_text=True,
    ),
)


def self_prompts(
    tokenizer: Tokenizer,
    ask: Ask,
    count: int,
    *,
    seed: int,
    progress: Callable[[int], None] = lambda _: None,
) -> list[tuple[str, str]]:
    """`count` different prompts (category, text), a function of the arguments, roles by weight.

    progress: called with how many are new. ModelError where the target hardly ever ends a turn that
    it began as a person; RequestError where it has no chat template.
    """
    turns = [role for role in ROLES for _ in range(role.weight)]
    begins = {role.system: _begin(tokenizer, role.system) for role in ROLES}
    found: dict[str, str] = {}  # text -> category
    tries = 0
    while len(found) < count:
        if tries > _MOST_TRIES * count + _ROUND:
            raise ModelError(
                f"of {tries} prompts that the target began only {len(found)} were ended by it and "
                f"new: make fewer than {count}, or take prompts from a file"
            )
        numbers = range(tries, tries + _ROUND)
        roles = [turns[number % len(turns)] for number in numbers]
        params = [_params(seed, number, role) for number, role in zip(numbers, roles, strict=True)]
        said = ask([begins[role.system] for role in roles], params)
        tries += _ROUND
        before = len(found)
        for number, role, one in zip(numbers, roles, said, strict=True):
            text = _usable(role, one)
            if text and len(found) < count:
                task = random.Random(f"{seed}/task/{number}").choice(role.tasks)
                found.setdefault(task.format(text), role.category)
        progress(len(found) - before)
    return [(category, text) for text, category in found.items()]


def _begin(tokenizer: Tokenizer, system: str) -> list[int]:
    """A conversation in which a person is about to speak."""
    messages = [{"role": "system", "content": system}] if system else []
    return render_chat(
        tokenizer,
        [*messages, {"role": "user", "content": ""}],
        add_generation_prompt=False,
        continue_final_message=True,
    )


def _usable(role: Role, said: Said) -> str:
    text = said.text.strip()
    if said.has_ended or not role.is_text:
        return text if said.has_ended else ""
    end = max(text.rfind(mark) for mark in (". ", ".\n", "! ", "? "))
    return text[: end + 1]


def _params(seed: int, number: int, role: Role) -> SamplingParams:
    own_seed = random.Random(f"{seed}/self/{number}").getrandbits(62)
    return SamplingParams(temperature=1.0, top_p=0.98, max_tokens=role.longest, seed=own_seed)

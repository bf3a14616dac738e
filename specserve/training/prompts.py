"""Prompts to learn from: a file, or made here by combining words and templates of our own.

What people ask is mostly combinations of a task, a topic and a manner, and a draft learns the
target's manner of answering rather than facts; so a few hundred templates and topics, combined,
teach it as many kinds of answers as thousands of hand-written prompts.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq

from specserve.errors import ConfigError
from specserve.training import prompt_words as words
from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.prompts import load_prompts

GENERATED = "generated:"
MOST_GENERATED = 100_000
Messages = list[tuple[str, str]]  # (role, text)


def read_prompts(data: str, seed: int) -> list[Messages]:
    """data: as --data. ConfigError names file and line."""
    if data.startswith(GENERATED):
        count = data.removeprefix(GENERATED)
        if not count.isascii() or not count.isdigit() or not 2 <= int(count) <= MOST_GENERATED:
            raise ConfigError(
                f"--data is {data!r}, after {GENERATED} comes a number of prompts from 2 to "
                f"{MOST_GENERATED}"
            )
        return [[("user", text)] for _, text in generated_prompts(int(count), seed)]
    try:
        found = load_prompts(data)
    except LoadgenError as error:
        raise ConfigError(str(error).replace("--prompts", "--data", 1)) from error
    return [[(one.role, one.content) for one in prompt.messages] for prompt in found]


def generated_prompts(count: int, seed: int) -> list[tuple[str, str]]:
    """(category, text), all different, categories in turn. A function of its arguments."""
    chance = random.Random(f"{seed}/prompts")
    found: dict[str, str] = {}
    names = list(MAKERS)
    tries = 0
    while len(found) < count:
        category = names[tries % len(names)]
        text = MAKERS[category](chance)
        found.setdefault(text, category)
        tries += 1
        if tries > 20 * count + 1000:
            raise ConfigError(
                f"--data {GENERATED}{count}: only {len(found)} different prompts can be made"
            )
    return [(category, text) for text, category in found.items()]


def _filled(chance: random.Random, templates: Seq[str], **slots: Seq[str]) -> str:
    """A template with every slot that it names filled; {manner} ends most with a wish."""
    template = chance.choice(templates)
    chosen = {name: chance.choice(options) for name, options in slots.items()}
    text = template.format(**chosen)
    if chance.random() < 0.4:
        text += " " + chance.choice(words.MANNERS)
    return text


def _passage(chance: random.Random, num_sentences: int) -> str:
    """Sentences about one thing that happened, with names, places and numbers."""
    cast = {
        "person": chance.choice(words.NAMES),
        "other": chance.choice(words.NAMES),
        "place": chance.choice(words.PLACES),
        "thing": chance.choice(words.THINGS),
        "topic": chance.choice(words.TOPICS),
        "group": chance.choice(words.GROUPS),
        "day": chance.choice(words.DAYS),
    }
    sentences = []
    for template in chance.sample(words.SENTENCES, num_sentences):
        small, large = chance.randint(2, 19), chance.randint(20, 950)
        sentence = template.format(**cast, small=small, large=large)
        sentences.append(sentence[0].upper() + sentence[1:])
    return " ".join(sentences)


def _chat(chance: random.Random) -> str:
    return _filled(chance, words.CHAT, situation=words.SITUATIONS, topic=words.TOPICS)


def _explain(chance: random.Random) -> str:
    return _filled(
        chance, words.EXPLAIN, topic=words.TOPICS, other=words.TOPICS, who=words.AUDIENCES
    )


def _code(chance: random.Random) -> str:
    return _filled(
        chance, words.CODE, task=words.CODE_TASKS, language=words.LANGUAGES, data=words.DATA_KINDS
    )


def _maths(chance: random.Random) -> str:
    template = chance.choice(words.MATHS)
    numbers = {name: chance.randint(2, 60) for name in "abcd"}
    text = template.format(
        person=chance.choice(words.NAMES), thing=chance.choice(words.COUNTABLES), **numbers
    )
    return text + " " + chance.choice(words.MATHS_ENDINGS)


def _with_passage(templates: Seq[str]) -> Callable[[random.Random], str]:
    def make(chance: random.Random) -> str:
        task = chance.choice(templates).format(language=chance.choice(words.TONGUES))
        return f"{task}\n\n{_passage(chance, chance.randint(3, 7))}"

    return make


def _translate(chance: random.Random) -> str:
    tongue = chance.choice(words.TONGUES)
    if chance.random() < 0.5:
        return f"{chance.choice(words.TRANSLATE).format(tongue=tongue)} {_passage(chance, 1)}"
    source = chance.choice(words.FOREIGN)
    return f"{chance.choice(words.TRANSLATE).format(tongue='English')} {source}"


def _write(chance: random.Random) -> str:
    return _filled(
        chance,
        words.WRITE,
        topic=words.TOPICS,
        person=words.NAMES,
        place=words.PLACES,
        situation=words.SITUATIONS,
        thing=words.THINGS,
    )


def _lists(chance: random.Random) -> str:
    return _filled(
        chance, words.LISTS, topic=words.TOPICS, place=words.PLACES, count=words.COUNTS,
        who=words.AUDIENCES,
    )  # fmt: skip


MAKERS: dict[str, Callable[[random.Random], str]] = {
    "chat": _chat,
    "explain": _explain,
    "code": _code,
    "maths": _maths,
    "summarise": _with_passage(words.SUMMARISE),
    "extract": _with_passage(words.EXTRACT),
    "edit": _with_passage(words.EDIT),
    "answer": _with_passage(words.ANSWER),
    "translate": _translate,
    "write": _write,
    "lists": _lists,
}

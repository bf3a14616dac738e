"""A grammar's promise: a pure function of the output so far, whatever it was asked before."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any  # whatever the library takes

import llguidance
import msgspec
import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from specserve import grammar
from specserve.constraint import Constraint, GrammarSpec
from specserve.errors import EngineError, RequestError
from specserve.grammar import MAX_GRAMMAR_CHARS, Grammars
from specserve.sampler import LogitsRow, choose, logprobs
from specserve.tokenizer import Tokenizer
from tests.grammar_world import END, SCHEMA, SPECS, VOCAB_SIZE, bpe_tokenizer, constraint, grammars
from tests.logit_rows import a_sampling_request
from tests.small_tokenizers import saved, words

CONTROL = 1


def ids_of(mask: bytes | None) -> list[int]:
    assert mask is not None
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def encode(text: str) -> list[int]:
    return bpe_tokenizer().encode_plain(text)


def a_text(name: str, seed: int) -> list[int]:
    """Any text of the grammar, EOS included, token by token from what is allowed."""
    rng, walk, known = random.Random(seed), constraint(name), [7, 7]
    while END not in known:
        known.append(rng.choice(ids_of(walk.mask(known, 2, ()))))
    return known[2:]


def matches(name: str, text: str) -> bool:
    if name in ("schema", "compact"):
        value = json.loads(text)
        assert list(value) == ["name", "age", "kind"]
        assert len(value["name"]) <= 6
        assert 0 <= value["age"] <= 130
        assert name == "schema" or " " not in text.replace(value["name"], "")
        return value["kind"] in SCHEMA["properties"]["kind"]["enum"]  # type: ignore[index]  # JSON
    if name == "choice":
        return text in json.loads(SPECS[name].text)
    pattern = {"regex": SPECS["regex"].text, "grammar": "(bc)*a(d)+"}[name]
    return re.fullmatch(pattern, text) is not None


@pytest.mark.parametrize("name", SPECS)
def test_what_the_masks_leave_is_what_was_asked_for(name: str) -> None:
    texts = {bpe_tokenizer().decode(a_text(name, seed)) for seed in range(30)}
    assert len(texts) > 1
    assert all(matches(name, text) for text in texts)


@pytest.mark.parametrize("name", SPECS)
def test_masks_are_the_same_on_any_way_through_drafts_and_rejections(name: str) -> None:
    rng = random.Random(1)
    output = a_text(name, seed=5)
    walk = constraint(name)
    for num_known in range(len(output)):
        known = [9, 9, 9, *output[:num_known]]
        for _ in range(4):  # guesses of this step: right ones for a while, then whatever
            right = output[num_known : num_known + rng.randrange(5)]
            guesses = [*right, *rng.choices(range(VOCAB_SIZE), k=rng.randrange(3))]
            fresh = constraint(name)
            assert walk.admits(known, 3, guesses) == fresh.admits(known, 3, guesses)
            at = tuple(output[num_known : num_known + rng.randrange(len(output) - num_known)])
            assert walk.mask(known, 3, at) == constraint(name).mask(known, 3, at)
        assert walk.forced(known, 3, 8) == constraint(name).forced(known, 3, 8)
    assert walk.mask([9, 9, 9], 3, ()) == constraint(name).mask([9, 9, 9], 3, ())


def test_the_text_ends_where_the_grammar_may_and_only_there() -> None:
    walk = constraint("choice")
    known = encode("the tree")
    assert END in ids_of(walk.mask(known, 0, ()))
    assert len(ids_of(walk.mask(known, 0, ()))) > 1  # "the treehouse"
    assert END not in ids_of(walk.mask(known[:-1], 0, ()))
    assert not walk.admits(known[:-1], 0, [END])
    assert walk.admits(known, 0, [END])
    assert walk.mask(known, 0, [END]) is None  # nothing follows that anybody will see
    assert not walk.admits(known, 0, [END, END])
    assert ids_of(constraint("choice").mask(encode("a shrub"), 0, ())) == [END]


def test_control_tokens_and_ids_beyond_the_vocabulary_never_match() -> None:
    walk = grammars().constraint(GrammarSpec(kind="regex", text="(?s:.*)", param="regex"))
    assert CONTROL not in ids_of(walk.mask([], 0, ()))
    for wrong in (CONTROL, -1, VOCAB_SIZE, 2**31):
        assert not walk.admits([], 0, [wrong])
    assert walk.admits([], 0, encode("<|user|>"))


def test_what_must_come_next_is_spelt_out_and_nothing_else() -> None:
    walk = constraint("compact")
    known = [5, *encode('{"name":"ab"')]
    forced = walk.forced(known, 1, 20)
    assert bpe_tokenizer().decode(forced) == ',"age":'
    assert walk.forced(known, 1, 2) == forced[:2]
    assert walk.forced([5, *encode('{"name":"')], 1, 20) == ()
    assert walk.forced([5], 1, 3) == tuple(encode('{"name":"'))[:3]


def test_the_end_of_a_text_is_forced_where_nothing_else_can_come() -> None:
    walk = constraint("choice")
    text = encode("a shrub")
    assert walk.forced(text[:1], 0, 20)[-1] == END
    assert walk.forced(text, 0, 4) == (END,)
    assert walk.forced([*text, END], 0, 4) == ()


def test_output_that_does_not_match_is_an_error_and_admits_nothing() -> None:
    walk = constraint("regex")
    wrong = encode("maybe")
    with pytest.raises(EngineError, match="cannot go on within its grammar"):
        walk.mask(wrong, 0, ())
    assert not walk.admits(wrong, 0, encode(" a"))
    assert walk.forced(wrong, 0, 4) == ()


def test_behind_a_mark_it_begins_and_before_it_anything_but_an_end_may_come() -> None:
    spec = msgspec.structs.replace(SPECS["choice"], after=CONTROL)
    rng = random.Random(2)
    walk, prompt, free = grammars().constraint(spec), [CONTROL, 7], [30, END + 2, 40]
    text = a_text("choice", seed=5)
    output = [*free, CONTROL, *text]
    for num_known in range(len(output) + 1):
        known = [*prompt, *output[:num_known]]
        for _ in range(3):
            ahead = tuple(output[num_known : num_known + rng.randrange(9)])
            assert walk.admits(known, 2, ahead)
            num_read = num_known + len(ahead) - len(free) - 1
            if num_read < 0:
                assert END not in ids_of(walk.mask(known, 2, ahead))
                assert len(ids_of(walk.mask(known, 2, ahead))) == VOCAB_SIZE - 1
                assert not walk.admits(known, 2, (*ahead, END))
            else:
                inner = constraint("choice").mask([7, *text[:num_read]], 1, ())
                assert walk.mask(known, 2, ahead) == inner
        if num_known <= len(free):
            assert walk.forced(known, 2, 9) == ()


REFUSED = {
    "a type nobody knows": ("json_schema", '{"type": "whatever"}', "whatever"),
    "no JSON": ("json_schema", '{"type": ', "EOF"),
    "no object": ("json_schema", "[1]", "object"),
    "a keyword that cannot be kept": ("json_schema", '{"type":"object","not":{}}', "not"),
    "a reference to elsewhere": ("json_schema", '{"$ref":"http://x.example/y"}', "x.example"),
    "nothing matches": (
        "json_schema",
        '{"type":"object","properties":{"a":false},"required":["a"]}',
        "[Uu]nsatisfiable",
    ),
    "endless": ("json_schema", '{"$ref":"#"}', "but the empty one"),
    "deep": ("json_schema", '{"items":' * 3000 + "true" + "}" * 3000, "recursion"),
    "a regex that is none": ("regex", "a(", "unclosed group"),
    "a deep regex": ("regex", "(" * 9000 + "a" + ")" * 9000, "nest|deep|exceed"),
    "an empty regex": ("regex", "", "but the empty one"),
    "an unknown rule": ("grammar", "start: foo", "foo"),
    "an unfinished rule": ("grammar", 'root ::= ("a" | ', "Expected"),
    "a deep grammar": ("grammar", "root ::= " + "(" * 9000 + '"a"' + ")" * 9000, "recursion|deep"),
    "what cannot be taken back": (
        "grammar",
        'start: "aa" b\nb[max_tokens=3]: /[a-z]*/',
        "max_tokens",
    ),
    "too long": ("regex", "a" * (MAX_GRAMMAR_CHARS + 1), "262145 characters"),
    "no choice": ("choice", "[]", "but the empty one"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_by_field_and_reason(name: str) -> None:
    kind, text, reason = REFUSED[name]
    spec = GrammarSpec(kind=kind, text=text, param="the_field")  # type: ignore[arg-type]  # a table
    with pytest.raises(RequestError, match=reason) as caught:
        grammars().constraint(spec)
    assert caught.value.param == "the_field"
    assert caught.value.status == 400
    assert len(caught.value.message) < 700


def test_guesses_that_were_looked_at_do_not_end_a_text_sooner() -> None:
    """This grammar reaches a limit of the library. A matcher that has looked ahead may find it
    later, as less is new to it, but never sooner."""
    spec = GrammarSpec(kind="regex", text="([a-z]{1,400}){1,400}x", param="regex")
    alone = read_letters(grammars().constraint(spec), 400)
    assert alone < 400, "no limit was reached: choose a harder pattern"
    busy, guesses = grammars().constraint(spec), random.Random(8)

    def look(known: list[int]) -> None:
        for _ in range(3):
            prefix: tuple[int, ...] = ()
            for _ in range(5):
                with contextlib.suppress(EngineError):
                    allowed = ids_of(busy.mask(known, 0, prefix))
                    prefix = (*prefix, guesses.choice([idx for idx in allowed if idx != END]))

    assert read_letters(busy, 400, look) >= alone
    another = grammars().constraint(spec)
    assert read_letters(another, 400) == alone  # copies of a matcher would share the limit


def read_letters(
    walk: Constraint, most: int, look: Callable[[list[int]], None] = lambda known: None
) -> int:
    """Tokens until the constraint gives up."""
    rng, known = random.Random(3), list[int]()
    while len(known) < most:
        look(known)
        try:
            allowed = ids_of(walk.mask(known, 0, ()))
        except EngineError:
            break
        if allowed == [END]:
            break
        known.append(rng.choice([idx for idx in allowed if idx != END]))
    return len(known)


def test_a_vocabulary_whose_tokens_are_no_fixed_bytes_is_refused(tmp_path: Path) -> None:
    tokenizer = saved(words("<unk>", "a", "b"), tmp_path / "words", eos_token="a")
    with pytest.raises(RequestError, match="do not stand for fixed bytes"):
        Grammars(tokenizer).constraint(SPECS["regex"])


def marking_tokenizer() -> Tokenizer:
    """As Llama 2's: a space before a word is its mark, and the first of a text is not shown."""
    backend = tokenizers.Tokenizer(BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = BpeTrainer(
        vocab_size=120, special_tokens=["<|end|>", "<|user|>", "<unk>"], show_progress=False
    )
    backend.train_from_iterator(['the treehouse is {"name": "a tree", "age": 12} '] * 9, trainer)
    special = {"eos_token": "<|end|>", "unk_token": "<unk>"}
    return Tokenizer(
        backend, special_tokens=special, eos_ids=[END], chat_template=None, source="the tests"
    )


@pytest.mark.parametrize("name", ["choice", "regex", "schema", "lark"])
def test_where_the_first_space_is_not_shown_the_shown_text_is_what_was_asked_for(
    name: str,
) -> None:
    texts = ["the tree", " the tree", "treehouse"]
    patterns = {
        "choice": (json.dumps(texts), "|".join(texts)),
        "regex": ("( the)* tree", "( the)* tree"),
        "schema": ('{"const": {"age": 12}}', '\\{\\s*"age"\\s*:\\s*12\\s*\\}'),
        "lark": ('start: " "? "the" " tree"+', " ?the( tree)+"),
    }
    source, pattern = patterns[name]
    kind = {"schema": "json_schema", "lark": "grammar"}.get(name, name)
    tokenizer = marking_tokenizer()
    made = Grammars(tokenizer)
    spec = GrammarSpec(kind=kind, text=source, param="x")  # type: ignore[arg-type]  # a table
    seen = set()
    for seed in range(40):
        walk, rng, known = made.constraint(spec), random.Random(seed), list[int]()
        while END not in known:
            known.append(rng.choice(ids_of(walk.mask(known, 0, ()))))
        seen.add(tokenizer.decode(known))
    assert all(re.fullmatch(pattern, text) for text in seen), seen
    assert name != "choice" or seen == set(texts)
    forced = made.constraint(spec).forced([], 0, 5)
    assert name != "schema" or tokenizer.decode(forced).startswith("{")


def test_thousands_of_grammars_leave_no_memory_behind() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def make(idx: int) -> None:
        schema = json.dumps({**SCHEMA, "title": f"number {idx}"})
        read_letters(
            grammars().constraint(GrammarSpec(kind="json_schema", text=schema, param="json")), 12
        )

    for idx in range(100):
        make(idx)
    before = resident()
    for idx in range(100, 2100):
        make(idx)
    assert resident() - before < 16 * 2**20


class CountedMatcher:
    """The library's, and how many masks were made by all of them."""

    num_masks = 0
    grammar_from_regex = staticmethod(llguidance.LLMatcher.grammar_from_regex)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._inner = llguidance.LLMatcher(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def compute_bitmask(self) -> bytes:
        CountedMatcher.num_masks += 1
        return self._inner.compute_bitmask()


def test_with_logprobs_no_mask_is_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = types.SimpleNamespace(**{**vars(llguidance), "LLMatcher": CountedMatcher})
    monkeypatch.setattr(grammar, "llguidance", changed)
    request = msgspec.structs.replace(
        a_sampling_request((7, 7), temperature=1.0),
        constraint=Grammars(bpe_tokenizer()).constraint(SPECS["regex"]),
    )
    logits = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    ids: list[int] = []
    for values in logits:  # as verification walks a draft whose every guess is right
        [chosen] = choose(values[None], [LogitsRow(request, [7, 7], tuple(ids))], vocab_size=384)
        assert isinstance(chosen, int)
        ids.append(chosen)
    places = [LogitsRow(request, [7, 7], tuple(ids[:at])) for at in range(6)]
    before = CountedMatcher.num_masks
    found = logprobs(logits, ids, 2, vocab_size=VOCAB_SIZE, places=places)
    assert CountedMatcher.num_masks == before > 6
    for idx, place in enumerate(places):  # the same as one by one
        [alone] = logprobs(
            logits[idx : idx + 1], ids[idx : idx + 1], 2, vocab_size=384, places=[place]
        )
        assert alone == found[idx]

"""The compiled suffix drafter and prompt lookup against their readable forms, draft by draft."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve_drafts.ngram import NgramGuesser
from specserve_drafts.suffix_guesses import SuffixGuesser
from specserve_kernels import native_library, native_suffix
from specserve_kernels.native_suffix import Ask

pytestmark = pytest.mark.skipif(not native_suffix.available(), reason=str(native_library.why_not()))


class Life:
    """Sequences that begin, grow, are asked, end and begin anew, in an order chance chooses."""

    def __init__(self, seed: int, vocab: int, corpus_tokens: int) -> None:
        self.rng = random.Random(seed)
        self.vocab = vocab
        self.readable = SuffixGuesser(corpus_tokens)
        self.compiled = native_suffix.SuffixIndex(corpus_tokens)
        self.salts: dict[int, str] = {}
        self.texts: dict[int, list[int]] = {}
        self.unseen: dict[int, int] = {}

    def words(self, most: int) -> list[int]:
        """Loops now and then, as texts have them."""
        rng = self.rng
        words = [rng.randrange(self.vocab) for _ in range(rng.randrange(1, most))]
        return words * rng.choice([1, 1, 1, 3])

    def begin(self) -> None:
        seq_id = self.rng.randrange(6)
        salt = self.rng.choice(["", "a", "\ud800"])
        prediction = self.words(20) if self.rng.random() < 0.3 else []
        text = self.words(40)
        for form in (self.readable, self.compiled):
            form.forget(seq_id)
            form.add(seq_id, salt, len(text), prediction)
        self.salts[seq_id], self.texts[seq_id], self.unseen[seq_id] = salt, text, 0

    def grow(self) -> None:
        for text in self.texts.values():
            if self.rng.random() < 0.7:
                text += self.words(6)

    def end(self) -> None:
        seq_id = self.rng.choice(list(self.texts))
        output = self.texts.pop(seq_id)[-30:]
        for form in (self.readable, self.compiled):
            form.forget(seq_id)
            form.read_output(self.salts[seq_id], output)
        assert self.readable.num_corpus_tokens == self.compiled.num_corpus_tokens

    def ask(self) -> None:
        asks = []
        for seq_id, text in self.texts.items():
            if self.rng.random() < 0.7:
                width = self.rng.choice([1, 1, 2, 4])
                new = text[self.unseen[seq_id] :]
                asks.append(Ask(seq_id, new, self.rng.randrange(1, 20), width))
                self.unseen[seq_id] = len(text)
        assert self.readable.guess(asks) == self.compiled.guess(asks)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([2, 5, 40, 3000]),
    st.sampled_from([0, 30, 200, 5000]),
)
def test_both_forms_guess_the_same_with_the_same_scores(
    seed: int, vocab: int, corpus_tokens: int
) -> None:
    life = Life(seed, vocab, corpus_tokens)
    for _ in range(40):
        life.begin()
        for _ in range(life.rng.randrange(4)):
            life.grow()
            life.ask()
        if life.rng.random() < 0.4:
            life.end()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([2, 5, 40]))
def test_both_forms_of_prompt_lookup_guess_the_same(seed: int, vocab: int) -> None:
    rng = random.Random(seed)
    readable, compiled = NgramGuesser(), native_suffix.Lookup()
    for _ in range(30):
        asks = [
            Ask(
                seq_id,
                [rng.randrange(vocab) for _ in range(rng.randrange(60))],
                rng.randrange(1, 9),
            )
            for seq_id in range(rng.randrange(5))
        ]
        assert readable.guess(asks) == compiled.guess(asks)
        if rng.random() < 0.2:
            for form in (readable, compiled):
                form.forget(1)


def test_more_guesses_than_ever_before_find_room() -> None:
    index = native_suffix.SuffixIndex(0)
    asks = []
    for seq_id in range(200):
        index.add(seq_id, "", 0, ())
        asks.append(Ask(seq_id, [1, 2, 3, 4] * 5, 40))
    guesses = index.guess(asks)
    assert [guess.token_ids[:5] for guess in guesses] == [(1, 2, 3, 4, 1)] * 200

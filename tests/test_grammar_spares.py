"""Grammars made ahead: one is as good as compiled just now, and there is a bound to them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import numpy as np
import pytest

from specserve.constraint import Constraint, GrammarSpec
from specserve.errors import EngineError, RequestError
from specserve.grammar import Grammars
from specserve.server.compiler import GrammarCompiler
from specserve.server.spare_grammars import SpareGrammars
from tests.grammar_world import END, SPECS, bpe_tokenizer, constraint, grammars

pytestmark = pytest.mark.timeout(120)

# Reaches a limit of the library within some tokens.
HARD = GrammarSpec(kind="regex", text="([a-z]{1,400}){1,400}x", param="regex")


class CountedGrammars:
    """In place of Grammars.constraint: what was compiled, in order."""

    def __init__(self) -> None:
        self.made: list[Constraint] = []
        self._real = Grammars.constraint

    def __call__(self, made_by: Grammars, spec: GrammarSpec) -> Constraint:
        self.made.append(self._real(made_by, spec))
        return self.made[-1]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> CountedGrammars:
    counts = CountedGrammars()
    monkeypatch.setattr(Grammars, "constraint", lambda self, spec: counts(self, spec))
    return counts


@asynccontextmanager
async def a_compiler() -> AsyncIterator[GrammarCompiler]:
    compiler = GrammarCompiler(bpe_tokenizer(), seconds=60)
    warm = GrammarSpec(kind="regex", text="warm", param="regex")
    await compiler.constraints(warm, 1)  # a tokenizer's first takes long, so it gets no spare
    try:
        yield compiler
    finally:
        compiler.close()


async def ask(compiler: GrammarCompiler, spec: GrammarSpec, count: int = 1) -> list[Constraint]:
    """What is got, once whatever was to be made behind it is made, too."""
    got = await compiler.constraints(spec, count)
    await compiler.constraints(msgspec.structs.replace(spec, text="behind", kind="regex"), 0)
    return got


def read(walk: Constraint, seed: int, most: int = 400) -> list[bytes | str | None]:
    """The masks along a text that they allow, and how it ended."""
    rng, known, seen = random.Random(seed), list[int](), list[bytes | str | None]()
    while len(known) < most and END not in known:
        try:
            mask = walk.mask(known, 0, ())
        except EngineError as error:
            return [*seen, error.args[0]]
        assert mask is not None
        seen.append(mask)
        bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
        known.append(rng.choice(np.flatnonzero(bits).tolist()))
    return seen


async def test_a_grammar_asked_for_again_is_made_ahead_and_given_once(
    counted: CountedGrammars,
) -> None:
    async with a_compiler() as compiler:
        counted.made.clear()
        [first] = await ask(compiler, SPECS["schema"])
        assert counted.made == [first]
        renamed = msgspec.structs.replace(SPECS["schema"], param="another field")
        [second] = await ask(compiler, renamed)
        assert counted.made[:2] == [first, second]
        [third] = await ask(compiler, SPECS["schema"])
        assert counted.made[2] is third  # the spare
        got = await ask(compiler, SPECS["schema"], count=3)
        assert len({id(one) for one in (first, second, third, *got)}) == 6
        [other] = await ask(compiler, msgspec.structs.replace(SPECS["schema"], compact=True))
        assert counted.made[-1] is other


@pytest.mark.parametrize("name", SPECS)
async def test_a_spare_says_what_a_fresh_one_says(name: str) -> None:
    async with a_compiler() as compiler:
        for seed in range(6):
            [walk] = await ask(compiler, SPECS[name])
            assert read(walk, seed) == read(constraint(name), seed)


async def test_a_text_that_reached_a_limit_changes_no_other_text() -> None:
    alone = read(grammars().constraint(HARD), seed=3)
    assert isinstance(alone[-1], str), "no limit was reached: choose a harder pattern"
    async with a_compiler() as compiler:
        for _ in range(4):
            [walk] = await ask(compiler, HARD)
            assert read(walk, seed=3) == alone


async def test_what_cannot_be_compiled_is_told_every_time() -> None:
    bad = GrammarSpec(kind="regex", text="a(", param="regex")
    async with a_compiler() as compiler:
        for _ in range(3):
            with pytest.raises(RequestError, match="unclosed group"):
                await ask(compiler, bad)


def spec(text: str) -> GrammarSpec:
    return GrammarSpec(kind="regex", text=text, param="regex")


def test_spares_are_bounded_by_number_and_by_text_and_the_oldest_goes_first() -> None:
    made = constraint("regex")
    spares = SpareGrammars(max_entries=3, max_chars=100)
    for text in ("a", "b", "c"):
        assert not spares.wants(spec(text))
        spares.put(spec(text), made)
    assert spares.take(spec("a")) is made
    assert spares.take(spec("a")) is None
    assert spares.wants(spec("a"))
    spares.put(spec("d"), made)  # b was asked for longest ago
    assert [spares.take(spec(text)) is made for text in "bcd"] == [False, True, True]
    spares.put(spec("e" * 90), made)
    spares.put(spec("f" * 20), made)
    assert spares.take(spec("e" * 90)) is None
    assert spares.take(spec("f" * 20)) is made
    spares.put(spec("g" * 101), made)
    assert spares.take(spec("g" * 101)) is None


async def test_asking_for_thousands_of_grammars_once_keeps_no_spare(
    counted: CountedGrammars,
) -> None:
    async with a_compiler() as compiler:
        counted.made.clear()
        for idx in range(200):
            await compiler.constraints(spec(f"number {idx}"), 1)
        await asyncio.sleep(0)
        await compiler.constraints(spec("behind"), 0)
        assert len(counted.made) == 200
